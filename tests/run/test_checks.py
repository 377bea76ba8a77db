"""Configurations that cannot run are refused, with the key and what is allowed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from eagle3.checks import accumulate, check, check_paths, device_count
from eagle3.compose import to_config
from eagle3.config import Config
from eagle3.errors import ConfigError

PATHS = {"verifier": "v", "shards": "s", "vocab_map": "m"}


def config_with(**tree: Any) -> Config:
    return to_config(OmegaConf.merge({"paths": PATHS}, tree))


def test_the_defaults_with_paths_pass() -> None:
    check(config_with())


@pytest.mark.parametrize("name", PATHS)
def test_a_missing_path_says_which_override_to_give(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(config_with(paths={name: None}))
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert message.startswith(f"paths.{name} is not set: give paths.{name}=/")


def test_paths_that_a_capture_provides_are_not_asked_for() -> None:
    capture = {"source": "smollm2_tokens", "aux_layer_ids": [3, 16, 28]}
    check(to_config(OmegaConf.create({"capture": capture})))


def test_muons_own_options_pass_with_muon() -> None:
    check(config_with(optim={"optimizer": "muon", "muon_momentum": 0.9, "muon_ns_steps": 6}))


def test_compiling_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"compute.compile=layer needs a C\+\+ compiler, and g"):
        check(config_with(compute={"compile": "layer"}))
    check(config_with(compute={"compile": "none"}))


def test_the_whole_vocabulary_needs_no_map() -> None:
    check(config_with(paths={"vocab_map": None}, model={"draft_vocab_size": 49152}))


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        ({"model": {"num_attention_heads": 10}}, "model.num_attention_heads=10"),
        ({"model": {"draft_vocab_size": 50000}}, "model.draft_vocab_size=50000"),
        ({"model": {"head_dim": 63}}, "model.head_dim=63"),
        ({"model": {"hidden_size": 0}}, "model.hidden_size=0"),
        (
            {"model": {"sliding_window": 3}, "val": {"draft_steps": 2}},
            "model.sliding_window=3: expected more than ttt_steps=3",
        ),
        (
            {"model": {"sliding_window": 5}, "val": {"draft_steps": 5}},
            "model.sliding_window=5: expected more than val.draft_steps=5",
        ),
        ({"ttt_steps": 0}, "ttt_steps=0"),
        ({"lr": 0.0}, "lr=0.0"),
        ({"noise_std": -0.1}, "noise_std=-0.1"),
        ({"val": {"draft_steps": 0}}, "val.draft_steps=0"),
        ({"val": {"every_steps": 0}}, "val.every_steps=0"),
        ({"data": {"arrival_timeout_s": 0.0}}, "data.arrival_timeout_s=0.0"),
        ({"data": {"val_ratio": 1.0}}, "data.val_ratio=1.0"),
        ({"data": {"split_context_tokens": 4096}}, "data.split_context_tokens=4096"),
        ({"data": {"aux_layer_ids": [1, 1, 2]}}, "data.aux_layer_ids=[1, 1, 2]"),
        ({"optim": {"warmup_ratio": 1.0}}, "optim.warmup_ratio=1.0"),
        ({"optim": {"optimizer": "muon", "muon_ns_steps": 0}}, "optim.muon_ns_steps=0"),
        ({"optim": {"optimizer": "muon", "muon_momentum": 1.0}}, "optim.muon_momentum=1.0"),
        ({"optim": {"muon_momentum": 0.9}}, "optim.muon_momentum=0.9 does nothing with"),
        ({"loss": {"mix": [{"name": "kll"}]}}, "unknown loss 'kll'"),
        ({"loss": {"mix": []}}, "loss.mix is empty"),
        ({"loss": {"mix": [{"name": "kl", "weight": 0.0}]}}, "weight 0.0 of kl"),
        ({"trainer": {"devices": 0}}, "trainer.devices=0"),
        ({"trainer": {"devices": [4, 4]}}, "trainer.devices=[4, 4]"),
        ({"trainer": {"devices": "4,5"}}, "trainer.devices='4,5'"),
        ({"trainer": {"max_steps": 0}}, "trainer.max_steps=0"),
        ({"trainer": {"checkpoint_every_steps": 0}}, "trainer.checkpoint_every_steps=0"),
        ({"trainer": {"checkpoint_every_minutes": 0}}, "trainer.checkpoint_every_minutes=0"),
        ({"trainer": {"keep_last": 0}}, "trainer.keep_last=0"),
        ({"val": {"early_stop": "val/los"}}, "val.early_stop=val/los: expected null or one of"),
        ({"val": {"patience": 0}}, "val.patience=0"),
        ({"data": {"mixture": [{"path": "a"}]}}, "paths.shards and data.mixture are both set"),
        ({"tokens_per_step": 6000}, "tokens_per_step=6000"),
        ({"name": "a=b"}, "name='a=b'"),
        ({"capture": {"source": "smollm2_tokens"}}, "capture.aux_layer_ids=[]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_impossible_value_is_named(tree: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(config_with(**tree))
    assert key in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


MIXED = {"verifier": "v", "shards": None, "vocab_map": "m"}


def test_a_mixture_stands_for_the_shards() -> None:
    check(config_with(paths=MIXED, data={"mixture": [{"path": "a"}, {"path": "b", "weight": 0.5}]}))


@pytest.mark.parametrize(
    "part", [{"path": "a", "weight": 0.0}, {"path": "a", "weight": -1.0}, {"weight": 1.0}], ids=str
)
def test_a_mixture_needs_directories_and_positive_weights(part: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"data\.mixture: path=.*expected a directory"):
        check(config_with(paths=MIXED, data={"mixture": [part]}))


GROWING = {
    "paths": {"val_shards": "v"},
    "data": {"arrival": "growing"},
    "trainer": {"max_steps": 100},
}


def growing_with(tree: dict[str, Any]) -> Config:
    return to_config(OmegaConf.create(OmegaConf.merge({"paths": PATHS}, GROWING, tree)))


def test_documents_may_arrive_while_training() -> None:
    check(growing_with({}))


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"trainer": {"max_steps": None}}, "found trainer.max_steps=null, expected the optimizer"),
        ({"paths": {"val_shards": None}}, "found paths.val_shards=null, expected a directory"),
        ({"paths": {"val_shards": "s"}}, "found paths.val_shards=s, expected another directory"),
        ({"data": {"max_samples": 5}}, "found data.max_samples=5, expected null"),
        ({"resume": "x.ckpt"}, "found resume=x.ckpt, expected null"),
        ({"resume": "auto"}, "found resume=auto, expected null"),
        (
            {"capture": {"source": "smollm2_tokens", "aux_layer_ids": [3, 16, 28]}},
            "found capture.source=smollm2_tokens, expected off",
        ),
        (
            {"paths": {"shards": None}, "data": {"mixture": [{"path": "a"}]}},
            "found data.mixture=[MixturePart(path='a', weight=1.0)], expected paths.shards alone",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_growing_data_cannot_have_is_named(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(growing_with(tree))
    assert str(caught.value).startswith(f"data.arrival=growing: {message}")
    assert len(str(caught.value).splitlines()) == 1


def test_the_directory_of_growing_data_may_come_later(tmp_path: Path) -> None:
    there = {name: str(tmp_path) for name in ("verifier", "vocab_map", "val_shards")}
    check_paths(growing_with({"paths": there | {"shards": str(tmp_path / "later")}}))
    with pytest.raises(ConfigError, match=r"^paths\.shards=.*later does not exist"):
        check_paths(config_with(paths=there | {"shards": str(tmp_path / "later")}))


def test_growing_data_need_a_vocabulary_map_unless_all_tokens_are_drafted() -> None:
    with pytest.raises(ConfigError, match=r"^paths\.vocab_map is not set"):
        check(growing_with({"paths": {"vocab_map": None}}))
    check(growing_with({"paths": {"vocab_map": None}, "model": {"draft_vocab_size": 49152}}))


def test_all_problems_are_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        check(config_with(lr=0.0, ttt_steps=0))
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("devices", "count"), [(1, 1), (4, 4), ([4, 5, 6, 7], 4), ([3], 1)], ids=str
)
def test_devices_are_a_count_or_a_list_of_cards(devices: object, count: int) -> None:
    assert device_count(devices) == count


@pytest.mark.parametrize(
    ("tokens", "world_size", "packs"), [(None, 4, 1), (400, 4, 1), (1200, 4, 3), (1200, 1, 12)]
)
def test_tokens_per_step_is_reached_by_accumulation(
    tokens: int | None, world_size: int, packs: int
) -> None:
    config = dataclasses.replace(Config(), max_seq_len=100, tokens_per_step=tokens)
    assert accumulate(config, world_size) == packs


@pytest.mark.parametrize(
    ("tokens", "nearest"), [(100, ["400", "800"]), (1000, ["800", "1200"])], ids=str
)
def test_tokens_per_step_out_of_reach_names_the_nearest(tokens: int, nearest: list[str]) -> None:
    config = dataclasses.replace(Config(), max_seq_len=100, tokens_per_step=tokens)
    with pytest.raises(ConfigError) as caught:
        accumulate(config, 4)
    assert all(value in str(caught.value) for value in nearest)
