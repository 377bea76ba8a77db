"""The form of the speculators library, which vLLM reads too and SGLang does not.

From speculators 0.9.0 (``config.py``, ``models/eagle3/config.py``) and vLLM 0.33.0
(``transformers_utils/configs/speculators/algos.py``).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from eagle3.config import ModelConfig
from eagle3.model.layers import NormLayout
from eagle3.names import ExportDtype
from eagle3.serving.llama_form import IDS, layer_fields

SPECULATORS_VERSION = "0.9.0"
"""Release whose fields are written."""


def content(
    model: ModelConfig,
    norms: NormLayout,
    entering: tuple[int, ...],
    verifier: tuple[str, str],
    num_speculative_tokens: int,
    dtype: ExportDtype,
) -> dict[str, Any]:
    """``config.json``; without ``model_type`` at the top, by which vLLM tells the form.

    Args:
        verifier: name or path, and class.
    """
    name, architecture = verifier
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_speculative_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "draft_vocab_size": model.draft_vocab_size,
        # absent would mean true to vLLM and false to speculators
        **asdict(norms),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": str(dtype),
        IDS: list(entering),
        "transformer_layer_config": layer_fields(model, dtype),
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": name, "architectures": [architecture]},
        },
    }
