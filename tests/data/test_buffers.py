"""Memory that is used again exactly when nobody looks at it any more."""

import gc
import threading
from collections.abc import Callable

import pytest
import torch

from eagle3.data.batch import PackedBatch
from eagle3.data.buffers import BufferPool, huge_pages

PAGE = 4096


def place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_tensors_are_as_asked_and_on_whole_pages(dtype: torch.dtype) -> None:
    tensor = BufferPool().empty(5, 7, dtype)
    assert tensor.shape == (5, 7)
    assert tensor.dtype is dtype
    assert tensor.is_contiguous()
    assert tensor.data_ptr() % PAGE == 0
    tensor.fill_(3)
    assert bool((tensor == 3).all())


def test_memory_comes_back_with_the_last_tensor() -> None:
    pool = BufferPool()
    tensor = pool.empty(64, 64, torch.float32)
    first = place(tensor)
    del tensor
    assert place(pool.empty(64, 64, torch.float32)) == first


@pytest.mark.parametrize(
    "look",
    [
        lambda tensor: tensor[3:],
        lambda tensor: tensor.view(-1)[5],
        lambda tensor: tensor.view(torch.int32).T,
        lambda tensor: tensor.detach(),
        lambda tensor: tensor.numpy()[2:],
        lambda tensor: tensor.untyped_storage(),
        lambda tensor: [tensor[None]],
    ],
    ids=["slice", "element", "other dtype", "detached", "numpy", "storage", "in a list"],
)
def test_a_view_keeps_the_memory(look: Callable[[torch.Tensor], object]) -> None:
    pool = BufferPool()
    tensor = pool.empty(64, 64, torch.float32)
    first = place(tensor)
    view = look(tensor)
    del tensor
    gc.collect()
    other = pool.empty(64, 64, torch.float32)
    assert place(other) != first
    del view
    gc.collect()
    assert place(pool.empty(64, 64, torch.float32)) == first


def test_a_trimmed_pack_keeps_the_memory() -> None:
    pool = BufferPool()
    rows = torch.arange(4)
    pack = PackedBatch(
        input_ids=rows,
        next_ids=rows,
        aux_hidden=pool.empty(4, 6, torch.bfloat16).fill_(1),
        last_hidden=pool.empty(4, 2, torch.bfloat16),
        loss_mask=rows >= 0,
        document_ids=torch.tensor([0, 0, -1, -1]),
        position_ids=rows,
        start_mask=rows >= 0,
        document_lengths=(3,),
    )
    first = place(pack.aux_hidden)
    pack = pack.trim()
    pool.empty(4, 6, torch.bfloat16).fill_(9)
    assert bool((pack.aux_hidden == 1).all())
    del pack
    assert place(pool.empty(4, 6, torch.bfloat16)) == first


def test_sizes_do_not_mix() -> None:
    pool = BufferPool()
    small = place(pool.empty(2, 2, torch.float32))
    large = place(pool.empty(64, 64, torch.float32))
    again = pool.empty(64, 64, torch.float32), pool.empty(2, 2, torch.float32)
    assert [place(tensor) for tensor in again] == [large, small]


def test_tensors_outlive_their_pool() -> None:
    pool = BufferPool()
    tensor = pool.empty(3, 3, torch.float32).fill_(2)
    del pool
    gc.collect()
    assert bool((tensor == 2).all())


def test_threads_never_share_memory() -> None:
    pool, wrong = BufferPool(), []

    def work(mark: int) -> None:
        for _ in range(200):
            tensors = [pool.empty(8, 8, torch.int64).fill_(mark) for _ in range(3)]
            if not all(bool((tensor == mark).all()) for tensor in tensors):
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("size", [0, 1, 4096, 2 << 20, (2 << 20) + 1])
def test_huge_pages_have_the_size(size: int) -> None:
    memory = huge_pages(size)
    assert len(memory) == size
    memory[:] = 5
    assert int(memory.sum(dtype="int64")) == 5 * size
    assert memory.ctypes.data % (2 << 20) == 0 or not size
