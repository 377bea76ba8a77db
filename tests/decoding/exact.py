"""The distribution of short answers by enumeration, and what chance may do to counts of them."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from eagle3.decoding.choice import processed
from eagle3.verifier.base import Sampling
from eagle3.verifier.huggingface import HuggingFaceVerifier
from tests.decoding.tiny import WORDS


def exact_distribution(
    verifier: HuggingFaceVerifier, prompt: Tensor, sampling: Sampling
) -> dict[tuple[int, ...], float]:
    """Probability of every answer of three tokens, from the model's own logits."""
    found = {}
    following: dict[tuple[int, ...], Tensor] = {}
    for length in range(3):
        for ids in itertools.product(range(WORDS), repeat=length):
            text = torch.cat((prompt, torch.tensor(ids, dtype=torch.int64)))
            following[ids] = processed(verifier.logits(text)[-1], sampling)
    for ids in itertools.product(range(WORDS), repeat=3):
        steps = [float(following[ids[:place]][ids[place]]) for place in range(3)]
        found[ids] = steps[0] * steps[1] * steps[2]
    return found


def chi_square_limit(freedom: int) -> float:
    """Passed once in about 10,000 times (Wilson and Hilferty's approximation)."""
    return float(freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3)
