"""What a verifier directory says of itself, and that its identity is its content."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from eagle3.errors import VerifierError
from eagle3.verifier import describe_verifier
from eagle3.verifier.base import require_extra


@pytest.fixture
def copied(tiny_verifier: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_verifier, tmp_path / "copied"))


def test_sizes_come_from_the_config(tiny_verifier: Path) -> None:
    found = describe_verifier(tiny_verifier)
    assert (found.name, found.hidden_size, found.num_layers) == ("tiny", 32, 4)
    assert (found.vocab_size, found.rms_norm_eps) == (100, 1e-6)


def test_a_copy_is_the_same_verifier(tiny_verifier: Path, copied: Path) -> None:
    here, there = describe_verifier(tiny_verifier), describe_verifier(copied)
    assert here.tokenizer_fingerprint == there.tokenizer_fingerprint
    assert here.weights_fingerprint == there.weights_fingerprint


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{}"),
        ("chat_template.jinja", "{{ messages }}"),
        ("tokenizer_config.json", json.dumps({"chat_template": "{{ messages }}"})),
    ],
)
def test_tokenizer_and_template_are_part_of_the_identity(
    tiny_verifier: Path, copied: Path, name: str, content: str
) -> None:
    (copied / name).write_text(content)
    here, there = describe_verifier(tiny_verifier), describe_verifier(copied)
    assert here.tokenizer_fingerprint != there.tokenizer_fingerprint
    assert here.weights_fingerprint == there.weights_fingerprint


def test_other_weights_are_another_verifier(tiny_verifier: Path, copied: Path) -> None:
    weights = copied / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    here, there = describe_verifier(tiny_verifier), describe_verifier(copied)
    assert here.weights_fingerprint != there.weights_fingerprint


def test_a_multimodal_config_keeps_the_sizes_one_level_down(copied: Path) -> None:
    config = copied / "config.json"
    config.write_text(json.dumps({"text_config": json.loads(config.read_text())}))
    assert describe_verifier(copied).num_layers == 4


def test_a_verifier_without_tokenizer_has_no_fingerprint(copied: Path) -> None:
    (copied / "tokenizer.json").unlink()
    assert describe_verifier(copied).tokenizer_fingerprint == ""


def test_missing_pieces_are_named(copied: Path) -> None:
    weights = copied / "model.safetensors"
    weights.rename(copied / "model.bin")
    with pytest.raises(VerifierError, match=r"holds no \*\.safetensors, found.*model\.bin"):
        describe_verifier(copied)
    (copied / "config.json").write_text(json.dumps({"hidden_size": 32}))
    with pytest.raises(VerifierError, match="no key 'num_hidden_layers', found"):
        describe_verifier(copied)
    (copied / "config.json").write_text("{")
    with pytest.raises(VerifierError, match=r"config\.json: cannot be read.*paths\.verifier"):
        describe_verifier(copied)


def test_a_missing_package_is_named_with_the_remedy() -> None:
    with pytest.raises(VerifierError, match=r"no_such_module.*pip install 'eagle3\[verifier\]'"):
        require_extra("torch", "no_such_module")
