"""Token files: what is read, what is refused, and how a subset is drawn."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.errors import DataError
from eagle3.tokens import (
    TokenSequence,
    asset_path,
    read_token_file,
    spread_subset,
)


def numbered(count: int) -> list[TokenSequence]:
    return [TokenSequence((i, i), 1) for i in range(count)]


@pytest.mark.parametrize("name", ["tokens.jsonl", "tokens.jsonl.gz"])
def test_a_line_is_a_document(tmp_path: Path, name: str) -> None:
    text = '{"ids": [5, 6, 7], "n": 1, "kind": "math", "prompt": "é"}\n{"ids": [8], "n": 1}\n'
    data = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    first, second = read_token_file(tmp_path / name)
    assert first == TokenSequence((5, 6, 7), 1, "math")
    assert first.loss_mask == (0, 1, 1)
    assert second.loss_mask == (0,)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"ids": [1, 2], "n": 1', "line 2: not JSON"),
        ("[1, 2]", "expected an object"),
        ('{"n": 1}', "key 'ids' is None"),
        ('{"ids": [], "n": 0}', "key 'ids' is []"),
        ('{"ids": [1, 2.5], "n": 1}', "key 'ids' is [1, 2.5]"),
        ('{"ids": [1, -2], "n": 1}', "key 'ids' is [1, -2]"),
        ('{"ids": [1, 2]}', "key 'n' is None"),
        ('{"ids": [1, 2], "n": 3}', "key 'n' is 3, expected the number of prompt tokens, 0 to 2"),
    ],
    ids=["cut", "list", "no_ids", "empty", "float", "negative", "no_n", "n_too_large"],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "tokens.jsonl"
    path.write_text('{"ids": [1, 2], "n": 1}\n' + line)
    with pytest.raises(DataError) as error:
        read_token_file(path)
    assert f"{path}, line 2" in str(error.value)
    assert said in str(error.value)


@pytest.mark.parametrize(
    "content",
    [None, b"", b"no gzip", gzip.compress(b"{}" * 999, mtime=0)[:20]],
    ids=["missing", "empty", "no_gzip", "cut"],
)
def test_a_missing_empty_or_cut_file_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "tokens.jsonl.gz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"tokens\.jsonl\.gz: .*[Ee]xpected"):
        read_token_file(path)


@given(count=st.integers(1, 200), data=st.data(), seed=st.integers(0, 5))
def test_a_subset_takes_one_of_each_block(count: int, data: st.DataObject, seed: int) -> None:
    wanted = data.draw(st.integers(1, count))
    chosen = [s.ids[0] for s in spread_subset(numbered(count), wanted, seed)]
    assert len(chosen) == wanted
    for block, place in enumerate(chosen):
        assert block * count // wanted <= place < (block + 1) * count // wanted


def test_a_subset_follows_its_seed_only() -> None:
    documents = numbered(1000)
    assert spread_subset(documents, 50, 0) == spread_subset(documents, 50, 0)
    assert spread_subset(documents, 50, 0) != spread_subset(documents, 50, 1)
    assert spread_subset(documents, None) == tuple(documents)


@pytest.mark.parametrize("wanted", [0, -1, 11])
def test_an_impossible_subset_is_refused(wanted: int) -> None:
    with pytest.raises(DataError, match=f"num_samples is {wanted}, expected 1 to 10"):
        spread_subset(numbered(10), wanted)


def test_the_asset_is_whole_and_a_subset_keeps_its_kinds() -> None:
    documents = read_token_file(asset_path())
    assert len(documents) == 3247
    assert sum(len(d.ids) for d in documents) == 780_883
    assert sum(len(d.ids) - d.prompt_length for d in documents) == 649_160
    shares = Counter(d.kind for d in documents)
    subset = Counter(d.kind for d in spread_subset(documents, 400))
    for kind, count in shares.items():
        assert abs(subset[kind] / 400 - count / 3247) < 0.04
