"""Rotary embedding: by position values, both config layouts, against transformers."""

from __future__ import annotations

import pytest
import torch

from eagle3.config import RopeConfig
from eagle3.errors import ConfigError
from eagle3.model.layers import rotate
from eagle3.model.rope import Rope, frequencies, rope_from_hf
from eagle3.names import RopeType

SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 64.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
    },
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_frequencies_equal_those_of_transformers(kind: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {**SCALINGS[kind], "rope_theta": 50000.0}
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        head_dim=128,
        max_position_embeddings=131072,
        rope_parameters=parameters,
    )
    theirs = LlamaRotaryEmbedding(config)
    ours, scale = frequencies(rope_from_hf({"rope_parameters": parameters}), 128)
    torch.testing.assert_close(ours, theirs.inv_freq.float(), rtol=1e-5, atol=1e-9)
    assert scale == pytest.approx(theirs.attention_scaling)


def test_positions_are_values_not_lengths() -> None:
    rope = Rope(RopeConfig(theta=10000.0), 8)
    assert not torch.equal(rope(torch.tensor([5, 6, 7]))[0], rope(torch.tensor([0, 1, 2]))[0])
    assert torch.equal(rope(torch.tensor([6]))[0][0], rope(torch.tensor([5, 6]))[0][1])


def test_only_differences_of_positions_matter() -> None:
    rope = Rope(RopeConfig(theta=100.0), 8)
    query, key = torch.randn(1, 1, 8), torch.randn(1, 1, 8)

    def score(at_query: int, at_key: int) -> torch.Tensor:
        turned = [
            rotate(x, *rope(torch.tensor([position])))
            for x, position in ((query, at_query), (key, at_key))
        ]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(9, 4), score(14, 9))
    assert abs(float(score(9, 4) - score(9, 5))) > 1e-4


@pytest.mark.parametrize(
    "layout",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 50000}},
        {"rope_theta": 50000, "rope_scaling": None},
        {"rope_theta": 50000.0},
    ],
    ids=["new", "old", "bare"],
)
def test_theta_is_read_from_either_layout(layout: dict[str, object]) -> None:
    assert rope_from_hf(layout) == RopeConfig(theta=50000.0)


def test_old_scaling_layout_and_unknown_type() -> None:
    old = {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert rope_from_hf(old) == RopeConfig(type=RopeType.linear, factor=2.0)
    with pytest.raises(ConfigError, match=r"'longrope' is not known; known: default, linear"):
        rope_from_hf({"rope_scaling": {"rope_type": "longrope"}})
    with pytest.raises(ConfigError, match="original_max_position_embeddings"):
        frequencies(RopeConfig(type=RopeType.yarn, factor=4.0), 8)
