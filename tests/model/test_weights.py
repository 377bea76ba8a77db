"""Finding the verifier's frozen tensors under every naming, and the messages when it fails."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eagle3.config import ModelConfig
from eagle3.data.vocab import VocabMap
from eagle3.errors import ConfigError, VerifierError
from eagle3.model.build import (
    build_drafter,
    build_verifier_head,
    check_layers,
    check_sizes,
    parameter_table,
)
from eagle3.model.layers import rms_norm
from eagle3.model.weights import load_verifier_weights, read_verifier_config
from eagle3.names import BodyInit, LastHidden, LmHeadInit
from tests.helpers import TINY

W, H = TINY.vocab_size, TINY.hidden_size
EMBED = torch.arange(W * H, dtype=torch.float32).reshape(W, H) / (W * H)
HEAD = -EMBED
NORM = torch.linspace(0.5, 1.5, H)


def write(
    directory: Path,
    names: tuple[str, str, str | None],
    *,
    sharded: bool = False,
    config: dict[str, object] | None = None,
) -> Path:
    directory.mkdir(exist_ok=True)
    embed, norm, head = names
    tensors = {embed: EMBED, norm: NORM, "model.layers.0.mlp.up_proj.weight": torch.ones(3, 3)}
    if head is not None:
        tensors[head] = HEAD
    if sharded:
        weight_map = {}
        for index, (name, tensor) in enumerate(tensors.items()):
            file = f"model-{index:05d}.safetensors"
            save_file({name: tensor.clone()}, directory / file)
            weight_map[name] = file
        index = directory / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
    else:
        save_file({k: v.clone() for k, v in tensors.items()}, directory / "model.safetensors")
    text = {
        "model_type": "llama",
        "hidden_size": H,
        "vocab_size": W,
        "num_hidden_layers": 4,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": head is None,
    }
    (directory / "config.json").write_text(json.dumps(config or text))
    return directory


NAMINGS = {
    "plain": ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"),
    "tied": ("model.embed_tokens.weight", "model.norm.weight", None),
    "kimi": (
        "language_model.model.embed_tokens.weight",
        "language_model.model.norm.weight",
        "language_model.lm_head.weight",
    ),
    "multimodal": (
        "model.language_model.embed_tokens.weight",
        "model.language_model.norm.weight",
        "lm_head.weight",
    ),
}


@pytest.mark.parametrize("sharded", [False, True], ids=["one-file", "sharded"])
@pytest.mark.parametrize("naming", NAMINGS)
def test_every_naming_gives_the_same_tensors(tmp_path: Path, naming: str, sharded: bool) -> None:
    weights = load_verifier_weights(
        write(tmp_path, NAMINGS[naming], sharded=sharded), torch.float32
    )
    assert torch.equal(weights.embed_tokens, EMBED)
    assert torch.equal(weights.norm, NORM)
    assert torch.equal(weights.head, EMBED if naming == "tied" else HEAD)
    assert weights.config.rms_norm_eps == 1e-5


def test_text_config_of_a_multimodal_verifier_counts(tmp_path: Path) -> None:
    text = {
        "model_type": "kimi_k2",
        "hidden_size": H,
        "vocab_size": W,
        "num_hidden_layers": 61,
        "rms_norm_eps": 1e-6,
    }
    outer = {"model_type": "kimi_k25", "text_config": text, "tie_word_embeddings": False}
    write(tmp_path, NAMINGS["kimi"], config=outer)
    config = read_verifier_config(tmp_path)
    assert (config.num_layers, config.rms_norm_eps, config.tied_embeddings) == (61, 1e-6, False)


def test_gains_stored_minus_one_are_completed(tmp_path: Path) -> None:
    text = {
        "model_type": "gemma3_text",
        "hidden_size": H,
        "vocab_size": W,
        "num_hidden_layers": 4,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    }
    write(tmp_path, NAMINGS["tied"], config=text)
    weights = load_verifier_weights(tmp_path, torch.float32)
    torch.testing.assert_close(weights.norm, NORM + 1)


def test_an_untied_model_without_head_is_refused_with_the_names_tried(tmp_path: Path) -> None:
    write(tmp_path, NAMINGS["tied"])
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("true", "false"))
    with pytest.raises(VerifierError, match=r"lm_head.weight.*tie_word_embeddings is false"):
        load_verifier_weights(tmp_path, torch.float32)


def test_a_missing_embedding_names_candidates_and_what_is_there(tmp_path: Path) -> None:
    write(tmp_path, ("transformer.wte.embed_tokens.weight", "model.norm.weight", "lm_head.weight"))
    with pytest.raises(VerifierError, match=r"language_model.model.embed_tokens.*transformer.wte"):
        load_verifier_weights(tmp_path, torch.float32)


def test_missing_directory_and_wrong_shape(tmp_path: Path) -> None:
    with pytest.raises(VerifierError, match=r"config.json.*paths.verifier="):
        load_verifier_weights(tmp_path / "nowhere", torch.float32)
    write(tmp_path, NAMINGS["plain"])
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace(f'"vocab_size": {W}', f'"vocab_size": {W + 1}'))
    with pytest.raises(VerifierError, match=rf"\({W}, {H}\), config.json says \({W + 1}, {H}\)"):
        load_verifier_weights(tmp_path, torch.float32)


def test_a_truncated_weight_file_is_named(tmp_path: Path) -> None:
    write(tmp_path, NAMINGS["plain"])
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(VerifierError, match=r"model.safetensors cannot be read"):
        load_verifier_weights(tmp_path, torch.float32)


def test_sizes_that_disagree_name_the_override(tmp_path: Path) -> None:
    config = read_verifier_config(write(tmp_path, NAMINGS["plain"]))
    with pytest.raises(ConfigError, match=rf"set model.hidden_size={H}"):
        check_sizes(ModelConfig(hidden_size=H + 1, vocab_size=W), config)
    check_sizes(TINY, config)


def test_table_says_what_trains_and_where_values_come_from(tmp_path: Path) -> None:
    weights = load_verifier_weights(write(tmp_path, NAMINGS["plain"]), torch.float32)
    vocab = VocabMap.from_selected(torch.arange(0, 40, 2), W)
    drafter = build_drafter(TINY, vocab, weights, seed=0)
    head = build_verifier_head(vocab, weights, LastHidden.pre_norm, full=False)
    rows = {row.name: row for row in parameter_table(drafter, head, weights.names)}
    assert not rows["embed_tokens"].trainable
    assert rows["embed_tokens"].source == "verifier model.embed_tokens.weight"
    assert not rows["verifier_head"].trainable
    trained = {name for name, row in rows.items() if row.trainable}
    assert trained == {name for name, _ in drafter.named_parameters()}
    assert rows["lm_head.weight"].source == "verifier lm_head.weight, draft rows"
    assert rows["fc.weight"].source == "identity on the last aux layer + random"
    assert rows["norm.weight"].source == "verifier model.norm.weight"
    assert rows["layer.hidden_norm.weight"].source == "ones"
    assert rows["layer.mlp.up_proj.weight"].source == "random"


def test_draft_head_starts_at_the_verifiers_rows_and_never_ties(tmp_path: Path) -> None:
    weights = load_verifier_weights(write(tmp_path, NAMINGS["tied"]), torch.float32)
    vocab = VocabMap.from_selected(torch.arange(10, 30), W)
    drafter = build_drafter(TINY, vocab, weights, seed=0)
    assert torch.equal(drafter.lm_head.weight, weights.head[10:30])
    assert drafter.lm_head.weight.shape[0] == 20
    assert drafter.embed_tokens.shape[0] == W
    with torch.no_grad():
        drafter.lm_head.weight.zero_()
    assert torch.equal(weights.head, EMBED)


def test_the_untrained_drafter_reads_the_last_aux_state_as_a_logit_lens(tmp_path: Path) -> None:
    """With the layer silenced, its logits are close to those of the verifier's norm and head."""
    weights = load_verifier_weights(write(tmp_path, NAMINGS["plain"]), torch.float32)
    vocab = VocabMap.from_selected(torch.arange(20), W)
    drafter = build_drafter(TINY, vocab, weights, seed=0)
    aux = torch.randn(5, 3 * H, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        fused = drafter.fuse(aux)
        cosine = torch.cosine_similarity(fused, aux[:, 2 * H :], dim=-1)
        assert float(cosine.min()) > 0.8
        drafter.fc.weight[:, : 2 * H] = 0
        drafter.fc.weight[:, 2 * H :] = torch.eye(H)
        lens = rms_norm(aux[:, 2 * H :], weights.norm, TINY.rms_norm_eps) @ weights.head[:20].T
        torch.testing.assert_close(drafter.logits(drafter.fuse(aux)), lens)
    plain = build_drafter(replace(TINY, body_init=BodyInit.random), vocab, weights, seed=0)
    assert torch.equal(plain.norm.weight, torch.ones(H))
    mixed = plain.fuse(aux).detach()
    assert float(torch.cosine_similarity(mixed, aux[:, 2 * H :]).abs().max()) < 0.8


def test_random_head_depends_on_the_seed_only(tmp_path: Path) -> None:
    weights = load_verifier_weights(write(tmp_path, NAMINGS["plain"]), torch.float32)
    vocab = VocabMap.from_selected(torch.arange(20), W)
    config = replace(TINY, lm_head_init=LmHeadInit.random, lm_head_trainable=False)
    first, again, other = (build_drafter(config, vocab, weights, seed=s) for s in (3, 3, 4))
    assert torch.equal(first.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert not first.lm_head.weight.requires_grad
    assert "embed_tokens" not in first.state_dict()


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", "", "config.json is no JSON"),
        ("config.json", "[1]", "config.json holds no JSON object"),
        ("config.json", '{"text_config": "x"}', "text_config is no JSON object"),
        ("config.json", '{"hidden_size": "big", "vocab_size": 1}', "hidden_size is 'big'"),
        ("model.safetensors.index.json", "{", "index.json is no JSON"),
        ("model.safetensors.index.json", "{}", "no weight_map"),
        (
            "model.safetensors.index.json",
            json.dumps(
                {"weight_map": {n: "model.safetensors" for n in ("model.norm.weight", "e")}}
            ),
            "embed_tokens.weight",
        ),
    ],
    ids=["empty", "list", "text", "number", "cut index", "bare index", "incomplete index"],
)
def test_damaged_json_is_named(tmp_path: Path, file: str, content: str, words: str) -> None:
    write(tmp_path, NAMINGS["plain"])
    (tmp_path / file).write_text(content)
    with pytest.raises(VerifierError, match=words):
        load_verifier_weights(tmp_path, torch.float32)


def test_an_index_that_promises_a_tensor_the_file_lacks(tmp_path: Path) -> None:
    write(tmp_path, NAMINGS["plain"])
    names = dict.fromkeys(NAMINGS["plain"], "model.safetensors")
    save_file({"model.norm.weight": NORM}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(VerifierError, match="is not in it, though the index says so"):
        load_verifier_weights(tmp_path, torch.float32)


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (HEAD.clone().index_fill_(0, torch.tensor([3]), float("nan")), "holds NaN or inf"),
        (torch.ones(W, H, dtype=torch.int8), "stored as torch.int8: quantised"),
    ],
    ids=["nan", "int8"],
)
def test_a_head_that_cannot_be_right_is_refused(
    tmp_path: Path, head: torch.Tensor, words: str
) -> None:
    write(tmp_path, NAMINGS["plain"])
    embed, norm, name = NAMINGS["plain"]
    save_file({embed: EMBED, norm: NORM, str(name): head}, tmp_path / "model.safetensors")
    with pytest.raises(VerifierError, match=words):
        load_verifier_weights(tmp_path, torch.float32)


def test_layers_that_the_verifier_lacks_are_refused(tmp_path: Path) -> None:
    config = read_verifier_config(write(tmp_path, NAMINGS["plain"]))
    check_layers((1, 2, 4), config)
    with pytest.raises(ConfigError, match=r"\[1, 2, 5\], but the verifier has 4 layers"):
        check_layers((1, 2, 5), config)
