"""A small verifier head and captures that fit it perfectly, for troubles to be planted in.

Rows of the head have length one and are their own best match, so a state that the norm turns into
row v makes v the verifier's next token, with certainty.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3.model.layers import rms_norm

HIDDEN, VOCAB, LAYERS, EPS = 16, 40, 8, 1e-6
AUX_IDS = [2, 4, 6]
LENS = (0.2, 0.5, 0.9)
"""Share of tokens at which an aux layer already says the verifier's token."""
CONFIG = {
    "model": {"hidden_size": HIDDEN, "vocab_size": VOCAB},
    "hidden_states": {
        "layer_ids": AUX_IDS,
        "layer_id_convention": "entering",
        "last_hidden": "pre_norm",
    },
}

Document = dict[str, Any]


def head() -> tuple[Tensor, Tensor]:
    """Gain [H] and head [W, H]; one channel is huge before the norm and quiet after it, as in real
    models, so that leaving the gain out changes the best token."""
    generator = torch.Generator().manual_seed(7)
    gain = torch.exp(0.5 * torch.randn(HIDDEN, generator=generator))
    gain[0] = 1e-3
    weight = torch.randn(VOCAB, HIDDEN, generator=generator)
    return gain, weight / weight.norm(dim=1, keepdim=True)


def make_verifier(directory: Path) -> Path:
    """``config.json``, weights and a tokenizer of one word a token: ``w0 w1 w2``."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    directory.mkdir(parents=True)
    gain, weight = head()
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "num_hidden_layers": LAYERS,
        "rms_norm_eps": EPS,
    }
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {
        "model.embed_tokens.weight": torch.zeros(VOCAB, HIDDEN),
        "model.norm.weight": gain,
        "lm_head.weight": weight,
    }
    save_file(tensors, directory / "model.safetensors")
    words = {f"w{k}": k for k in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def states_of(tokens: Tensor, generator: torch.Generator) -> Tensor:
    """Pre-norm states [n, H] whose best token is ``tokens`` [n], of random sizes."""
    gain, weight = head()
    sizes = 5 + 20 * torch.rand(len(tokens), 1, generator=generator)
    return sizes * rms_norm(weight[tokens] / gain, torch.ones(HIDDEN), EPS)


def make_document(tokens: int, seed: int) -> Document:
    """Greedy data: every next token is the verifier's; the first third is the prompt."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (tokens + 1,), generator=generator)
    aux = []
    for share in LENS:
        knows = torch.rand(tokens, generator=generator) < share
        guess = torch.randint(0, VOCAB, (tokens,), generator=generator)
        aux.append(states_of(torch.where(knows, ids[1:], guess), generator))
    mask = (torch.arange(tokens) >= tokens // 3).long()
    last = states_of(ids[1:], generator)
    return {"input_ids": ids[:-1], "loss_mask": mask, "hidden_states": [*aux, last]}


def capture(count: int = 12, tokens: int = 60) -> list[Document]:
    """Documents of ``tokens`` tokens and a few more, no two of them alike."""
    return [make_document(tokens + k, seed=k) for k in range(count)]


def save(directory: Path, documents: list[Document], config: dict[str, Any] | None = None) -> Path:
    """As the public capture script writes them, in bfloat16."""
    directory.mkdir(parents=True)
    for k, document in enumerate(documents):
        states = [state.to(torch.bfloat16) for state in document["hidden_states"]]
        torch.save({**document, "hidden_states": states}, directory / f"data_{k}.pt")
    if config is not None:
        (directory / "data_config.json").write_text(json.dumps(config))
    return directory
