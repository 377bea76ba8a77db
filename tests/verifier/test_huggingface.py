"""The captured states are the ones transformers computes, whatever else is in the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3.errors import VerifierError
from eagle3.verifier.huggingface import HuggingFaceVerifier
from tests.tiny_verifier import NUM_LAYERS, VOCAB, load_reference


@pytest.fixture(scope="module")
def verifier(tiny_verifier: Path) -> HuggingFaceVerifier:
    return HuggingFaceVerifier(tiny_verifier)


@pytest.fixture(scope="module")
def reference(tiny_verifier: Path) -> Any:
    return load_reference(tiny_verifier)


def documents(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, VOCAB, (n,), generator=generator) for n in lengths]


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_id_k_is_the_state_entering_layer_k(
    verifier: HuggingFaceVerifier, reference: Any, layer: int
) -> None:
    (ids,) = documents(17)
    with torch.inference_mode():
        expected = reference(ids[None], output_hidden_states=True).hidden_states[layer][0]
    (states,) = verifier.capture([ids], [layer])
    torch.testing.assert_close(states.aux[0], expected, rtol=0, atol=1e-5)


def test_last_state_is_taken_before_the_final_norm(
    verifier: HuggingFaceVerifier, reference: Any
) -> None:
    (ids,) = documents(17)
    (states,) = verifier.capture([ids], [NUM_LAYERS])
    with torch.inference_mode():
        output = reference(ids[None], output_hidden_states=True)
        logits = reference.lm_head(reference.model.norm(states.last))
        without_norm = reference.lm_head(states.last)
    torch.testing.assert_close(logits, output.logits[0], rtol=0, atol=1e-5)
    assert not torch.allclose(without_norm, output.logits[0], atol=0.1)
    assert torch.equal(states.aux[0], states.last), "id num_layers enters the norm"


def test_a_document_does_not_feel_the_batch(verifier: HuggingFaceVerifier) -> None:
    batch = documents(23, 1, 9, 40)
    together = verifier.capture(batch, [1, 3])
    for ids, states in zip(batch, together, strict=True):
        (alone,) = verifier.capture([ids], [1, 3])
        for a, b in zip((*states.aux, states.last), (*alone.aux, alone.last), strict=True):
            assert a.shape == (len(ids), 32)
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_states_come_in_the_order_asked_for_and_no_hook_stays(
    verifier: HuggingFaceVerifier,
) -> None:
    (ids,) = documents(5)
    (up,), (down,) = verifier.capture([ids], [1, 3]), verifier.capture([ids], [3, 1])
    assert torch.equal(up.aux[0], down.aux[1])
    assert torch.equal(up.aux[1], down.aux[0])
    assert not any(module._forward_pre_hooks for module in verifier.decoder.modules())


@pytest.mark.parametrize(
    ("ids", "layers", "said"),
    [
        ([1, 2], [1, NUM_LAYERS + 1], "aux_layer_ids [5] are not layers"),
        ([1, 2], [-1], "aux_layer_ids [-1] are not layers"),
        ([1, VOCAB], [1], "ids from 1 to 100"),
        ([-1, 1], [1], "ids from -1 to 1"),
        ([], [1], "no ids"),
    ],
    ids=["layer_past_end", "negative_layer", "id_past_vocab", "negative_id", "empty"],
)
def test_what_the_verifier_cannot_do_is_refused(
    verifier: HuggingFaceVerifier, ids: list[int], layers: list[int], said: str
) -> None:
    with pytest.raises(VerifierError) as error:
        verifier.capture([torch.tensor(ids, dtype=torch.int64)], layers)
    assert said in str(error.value)
    assert "Expected" in str(error.value)


def test_a_model_without_decoder_layers_is_refused(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=20, intermediate_size=16, **sizes)).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("layer_norm_eps", "rms_norm_eps"))
    with pytest.raises(VerifierError, match=r"BertModel has no 'layers'.*found.*'encoder'"):
        HuggingFaceVerifier(tmp_path)
