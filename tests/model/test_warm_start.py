"""A drafter that starts from a trained head computes what that computed, or says what differs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.config import ModelConfig
from eagle3.data.vocab import VocabMap
from eagle3.errors import ConfigError, DataError, UserError
from eagle3.model.build import build_drafter
from eagle3.model.drafter import Drafter
from eagle3.model.trained_head import CHECKPOINT, SPECFORGE, SPECULATORS, read_trained_head
from eagle3.model.warm_start import WarmStart, check_aux_layers, warm_start
from eagle3.names import Arch, LmHeadInit, NormPreset
from tests.helpers import TINY, judge, make_document, pack, tiny_drafter, tiny_head
from tests.model.trained_heads import (
    AUX_LAYER_IDS,
    foreign_config,
    verifier_of,
    write_head,
)

KINDS = (CHECKPOINT, SPECFORGE, SPECULATORS)
FOREIGN = (SPECFORGE, SPECULATORS)


def begin(
    path: Path, trained: Drafter, config: ModelConfig = TINY, vocab: VocabMap | None = None
) -> tuple[Drafter, WarmStart]:
    """A fresh drafter of ``config`` that has taken what lies at ``path``."""
    head, verifier = read_trained_head(path), verifier_of(trained)
    fresh = build_drafter(config, vocab or head.vocab_map(config.vocab_size), verifier, seed=9)
    return fresh, warm_start(fresh, head, verifier)


def assert_same_function(fresh: Drafter, trained: Drafter) -> None:
    """Logits of step 0, and every row's loss over a chain, bit for bit."""
    documents = pack([make_document(9, seed=1), make_document(6, seed=2)])
    fused = fresh.fuse(documents.aux_hidden)
    assert torch.equal(fused, trained.fuse(documents.aux_hidden))
    assert torch.equal(fresh.logits(fused), trained.logits(fused))
    head = tiny_head(trained.config)
    ours, theirs = (judge(d, head, documents, ttt_steps=3).steps for d in (fresh, trained))
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine.losses, other.losses)


@pytest.mark.parametrize("layout", NormPreset)
@pytest.mark.parametrize("arch", Arch)
@pytest.mark.parametrize("kind", KINDS)
def test_every_form_gives_back_the_trained_function(
    tmp_path: Path, kind: str, arch: Arch, layout: NormPreset
) -> None:
    config = replace(TINY, arch=arch, norm_layout=layout)
    trained = tiny_drafter(config)
    fresh, begun = begin(write_head(tmp_path, trained, kind), trained, config)
    assert_same_function(fresh, trained)
    assert set(begun.sources) == {name for name, _ in fresh.named_parameters()}
    assert all(source == f"{kind} {read_path(tmp_path, kind)}" for source in begun.sources.values())
    assert "all 20 rows" in begun.lines[1]


def read_path(directory: Path, kind: str) -> Path:
    return directory / "best.ckpt" if kind == CHECKPOINT else directory


def as_bin(directory: Path) -> Path:
    file = directory / "model.safetensors"
    torch.save(load_file(file), directory / "pytorch_model.bin")
    file.unlink()
    return directory


def as_two_files(directory: Path) -> Path:
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    for index, part in enumerate((names[:6], names[6:])):
        save_file({n: tensors[n] for n in part}, directory / f"model-{index}.safetensors")
    (directory / "model.safetensors").unlink()
    return directory


def as_file(directory: Path) -> Path:
    return directory / "model.safetensors"


def as_bin_file(directory: Path) -> Path:
    return as_bin(directory) / "pytorch_model.bin"


@pytest.mark.parametrize("place", [as_bin, as_two_files, as_file, as_bin_file])
def test_every_place_is_read(tmp_path: Path, place: Callable[[Path], Path]) -> None:
    trained = tiny_drafter()
    fresh, _ = begin(place(write_head(tmp_path, trained, SPECFORGE)), trained)
    assert_same_function(fresh, trained)


def test_bfloat16_is_converted_and_the_lines_say_what_was_left(tmp_path: Path) -> None:
    trained = tiny_drafter()
    directory = write_head(tmp_path, trained, SPECULATORS, torch.bfloat16)
    fresh, begun = begin(directory, trained)
    assert fresh.fc.weight.dtype == torch.float32
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.copy_(parameter.bfloat16())
    assert_same_function(fresh, trained)
    text = "\n".join(begun.lines)
    assert "13 in bfloat16, converted to float32" in text
    assert "left: embed_tokens.weight" in text
    assert "warning" not in text


def test_an_embedding_of_its_own_is_told(tmp_path: Path) -> None:
    trained = tiny_drafter()
    directory = write_head(tmp_path, trained, SPECFORGE)
    trained.embed_tokens = trained.embed_tokens.clone()
    trained.embed_tokens[3:5] += 1.0
    _, begun = begin(directory, trained)
    assert "not the verifier's in 2 rows" in begun.lines[-1]


@given(ids=st.sets(st.integers(0, TINY.vocab_size - 1), min_size=20, max_size=20))
def test_another_map_takes_rows_by_token_id(
    tmp_path_factory: pytest.TempPathFactory, ids: set[int]
) -> None:
    trained = tiny_drafter()
    directory = write_head(tmp_path_factory.mktemp("head"), trained, SPECFORGE)
    vocab = VocabMap.from_selected(ids, TINY.vocab_size)
    config = replace(TINY, lm_head_init=LmHeadInit.random)
    fresh, begun = begin(directory, trained, config, vocab)
    old = VocabMap(trained.d2t, trained.t2d).selected.tolist()
    verifier = verifier_of(trained)
    for row, token in enumerate(sorted(ids)):
        expected = (
            trained.lm_head.weight[old.index(token)] if token in old else verifier.head[token]
        )
        assert torch.equal(fresh.lm_head.weight[row], expected)  # fmt: skip
    shared = len(ids & set(old))
    if shared < 20:
        assert f"{shared} of 20 rows by verifier token id, {20 - shared} from" in begun.lines[1]
        assert f"{20 - shared} rows of the verifier" in begun.sources["lm_head.weight"]
    assert torch.equal(fresh.d2t, vocab.d2t)
    assert torch.equal(fresh.fc.weight, trained.fc.weight)


def test_a_map_of_another_size_takes_rows_too(tmp_path: Path) -> None:
    trained = tiny_drafter()
    config = replace(TINY, draft_vocab_size=TINY.vocab_size)
    fresh, _ = begin(
        write_head(tmp_path, trained, CHECKPOINT), trained, config, VocabMap.identity(50)
    )
    rows = VocabMap(trained.d2t, trained.t2d).selected
    assert torch.equal(fresh.lm_head.weight[rows], trained.lm_head.weight)


@pytest.mark.parametrize("dropped", [("t2d",), ("d2t", "t2d")])
def test_the_map_follows_from_what_is_stored(tmp_path: Path, dropped: tuple[str, ...]) -> None:
    config = TINY if len(dropped) == 1 else replace(TINY, draft_vocab_size=TINY.vocab_size)
    trained = tiny_drafter(config)
    directory = write_head(tmp_path, trained, SPECFORGE)
    change(directory, lambda tensors: [tensors.pop(name) for name in dropped])
    fresh, _ = begin(directory, trained, config)
    assert torch.equal(fresh.t2d, trained.t2d)
    assert_same_function(fresh, trained)


def change(directory: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


def bias(tensors: dict[str, Tensor]) -> None:
    tensors["midlayer.self_attn.q_proj.bias"] = torch.zeros(32)


def second_layer(tensors: dict[str, Tensor]) -> None:
    tensors["layers.1.mlp.up_proj.weight"] = torch.zeros(48, 32)


def query_norm(tensors: dict[str, Tensor]) -> None:
    tensors["midlayer.self_attn.q_norm.weight"] = torch.ones(8)


def both_names(tensors: dict[str, Tensor]) -> None:
    tensors["layers.0.mlp.up_proj.weight"] = tensors["midlayer.mlp.up_proj.weight"].clone()


def no_fc(tensors: dict[str, Tensor]) -> None:
    del tensors["fc.weight"]


def no_up(tensors: dict[str, Tensor]) -> None:
    del tensors["midlayer.mlp.up_proj.weight"]


def no_head(tensors: dict[str, Tensor]) -> None:
    del tensors["lm_head.weight"]


def wide_fc(tensors: dict[str, Tensor]) -> None:
    tensors["fc.weight"] = torch.zeros(32, 128)


def quantised(tensors: dict[str, Tensor]) -> None:
    tensors["fc.weight"] = tensors["fc.weight"].to(torch.float8_e4m3fn)


def not_finite(tensors: dict[str, Tensor]) -> None:
    tensors["norm.weight"][3] = torch.nan


def no_map(tensors: dict[str, Tensor]) -> None:
    del tensors["d2t"], tensors["t2d"]


def absolute(tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] += torch.arange(20)


def other_verifier(tensors: dict[str, Tensor]) -> None:
    tensors["t2d"] = torch.cat((tensors["t2d"], torch.zeros(6, dtype=torch.bool)))


def prefixed(tensors: dict[str, Tensor]) -> None:
    for name in list(tensors):
        tensors[f"draft_model.{name}"] = tensors.pop(name)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (bias, r"found midlayer.self_attn.q_proj.bias, expected none.*attention_bias"),
        (second_layer, r"unknown layers.1.mlp.up_proj.weight, expected only one layer"),
        (query_norm, r"unknown midlayer.self_attn.q_norm.weight.*set model.arch.*qwen3"),
        (both_names, r"found \S*mlp.up_proj.weight and \S*mlp.up_proj.weight, expected one"),
        (no_fc, r"fc.weight missing, expected every weight"),
        (no_up, r"midlayer.mlp.up_proj.weight missing, expected every weight"),
        (no_head, r"0 rows of lm_head.weight"),
        (wide_fc, r"fc.weight is \[32, 128\], expected \[32, 96\]: set model"),
        (quantised, r"fc.weight is torch.float8_e4m3fn, expected float32"),
        (not_finite, r"norm.weight holds NaN or inf"),
        (no_map, r"found 20 rows of lm_head.weight and no d2t"),
        (absolute, r"looks absolute"),
        (other_verifier, r"t2d \[56\].*expected t2d \[50\] \(model.vocab_size\)"),
        (prefixed, r"found draft_model.d2t.*expected midlayer.\*"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, edit: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    trained = tiny_drafter()
    directory = write_head(tmp_path, trained, SPECFORGE)
    change(directory, edit)
    with pytest.raises(UserError, match=message) as caught:
        begin(directory, trained)
    assert str(directory) in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(TINY, intermediate_size=64), r"set model.intermediate_size=48"),
        (replace(TINY, num_attention_heads=2, num_key_value_heads=1, head_dim=16), r"head_dim=8"),
        (replace(TINY, rms_norm_eps=1e-6), r"set model.rms_norm_eps=1e-05"),
        (replace(TINY, rope=replace(TINY.rope, theta=1e6)), r"set model.rope.theta=100.0"),
        (replace(TINY, norm_layout=NormPreset.eagle3_1), r"set model.norm_layout=portable"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_settings_that_differ_are_given_and_nothing_is_changed(
    tmp_path: Path, kind: str, config: ModelConfig, message: str
) -> None:
    trained = tiny_drafter()
    head, verifier = read_trained_head(write_head(tmp_path, trained, kind)), verifier_of(trained)
    fresh = build_drafter(config, head.vocab_map(config.vocab_size), verifier, seed=9)
    before = fresh.fc.weight.clone()
    with pytest.raises(ConfigError, match=message):
        warm_start(fresh, head, verifier)
    assert torch.equal(fresh.fc.weight, before)


@pytest.mark.parametrize("layout", [NormPreset.eagle3_1, NormPreset.speculators])
@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_layout_that_differs_is_given(tmp_path: Path, kind: str, layout: NormPreset) -> None:
    trained = tiny_drafter(replace(TINY, norm_layout=layout))
    with pytest.raises(ConfigError, match=f"set model.norm_layout={layout}"):
        begin(write_head(tmp_path, trained, kind), trained)


def test_a_norm_layout_without_a_name_is_refused(tmp_path: Path) -> None:
    trained = tiny_drafter()
    directory = write_head(tmp_path, trained, SPECULATORS)
    config = foreign_config(trained, SPECULATORS) | {"norm_before_residual": True}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"has norm_before_residual, .*no model.norm_layout"):
        begin(directory, trained)


def test_without_config_the_names_tell_the_norms_and_the_lines_the_rest(tmp_path: Path) -> None:
    trained = tiny_drafter()
    directory = write_head(tmp_path, trained, SPECFORGE)
    (directory / "config.json").unlink()
    fresh, begun = begin(directory, trained)
    assert_same_function(fresh, trained)
    assert "no config.json beside it" in begun.lines[0]
    with pytest.raises(ConfigError, match=r"no further norm.*set model.norm_layout=portable"):
        begin(directory, trained, replace(TINY, norm_layout=NormPreset.speculators))


def test_stretched_rotary_embedding_is_compared(tmp_path: Path) -> None:
    trained = tiny_drafter()
    directory = write_head(tmp_path, trained, SPECFORGE)
    scaling = {"type": "linear", "factor": 4.0}
    config = foreign_config(trained, SPECFORGE) | {"rope_scaling": scaling}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"(?s)model.rope.type=linear.*model.rope.factor=4.0"):
        begin(directory, trained)


@pytest.mark.parametrize("kind", [CHECKPOINT, SPECULATORS])
def test_other_layers_are_refused(tmp_path: Path, kind: str) -> None:
    head = read_trained_head(write_head(tmp_path, tiny_drafter(), kind))
    assert "as the head was trained on" in check_aux_layers(head, AUX_LAYER_IDS)
    with pytest.raises(ConfigError, match=r"entering layers \[2, 30, 58\].*\[3, 31, 59\]"):
        check_aux_layers(head, [3, 31, 59])


def test_sglangs_layer_numbers_prove_nothing(tmp_path: Path) -> None:
    head = read_trained_head(write_head(tmp_path, tiny_drafter(), SPECFORGE))
    assert "does not say for certain" in check_aux_layers(head, AUX_LAYER_IDS)


class Planted:
    """Runs code where a file is unpickled without care."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (exec, ("raise SystemExit('code of a file was run')",))


def test_files_that_are_no_head_are_refused(tmp_path: Path) -> None:
    torch.save({"fc.weight": Planted()}, tmp_path / "planted.bin")
    with pytest.raises(DataError, match=r"planted.bin: cannot be loaded as tensors only"):
        read_trained_head(tmp_path / "planted.bin")
    (tmp_path / "cut.safetensors").write_bytes(b"\x08\x00")
    with pytest.raises(DataError, match=r"cut.safetensors: cannot be read"):
        read_trained_head(tmp_path / "cut.safetensors")
    empty = tmp_path / "run"
    (empty / "checkpoints").mkdir(parents=True)
    with pytest.raises(DataError, match=r"found checkpoints, expected \*.safetensors.*best.ckpt"):
        read_trained_head(empty)
    with pytest.raises(DataError, match=r"nowhere: found nothing"):
        read_trained_head(tmp_path / "nowhere")


def test_files_of_two_heads_are_refused(tmp_path: Path) -> None:
    trained = tiny_drafter()
    directory = write_head(tmp_path, trained, SPECFORGE)
    save_file({"norm.weight": torch.ones(32)}, directory / "other.safetensors")
    with pytest.raises(DataError, match=r"other.safetensors: found norm.weight once more"):
        read_trained_head(directory)


@pytest.mark.parametrize("text", ["{", "[]", '{"fc_norm": true, "norm_before_fc": true}'])
def test_a_damaged_config_is_named(tmp_path: Path, text: str) -> None:
    directory = write_head(tmp_path, tiny_drafter(), SPECFORGE)
    (directory / "config.json").write_text(text)
    with pytest.raises(DataError, match=r"config.json"):
        read_trained_head(directory)
