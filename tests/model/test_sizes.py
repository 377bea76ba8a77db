"""The large drafter at full size, on the meta device."""

from __future__ import annotations

import torch

from eagle3.compose import compose_config
from eagle3.model.build import parameter_table
from eagle3.model.drafter import Drafter
from eagle3.model.verifier_head import VerifierHead
from eagle3.names import LastHidden


def test_counts_of_the_kimi_drafter() -> None:
    config = compose_config(["experiment=kimi_100k"]).model
    with torch.device("meta"):
        drafter = Drafter(config)
        head = VerifierHead(
            torch.empty(config.hidden_size),
            torch.empty(config.draft_vocab_size, config.hidden_size),
            eps=1e-6,
            last_hidden=LastHidden.pre_norm,
        )
    names = {"embed_tokens": "e", "head": "h", "norm": "n"}
    rows = {row.name: row for row in parameter_table(drafter, head, names)}
    assert rows["embed_tokens"].count == 1_174_405_120
    assert rows["verifier_head"].count == 229_376_000
    assert not rows["embed_tokens"].trainable
    assert not rows["verifier_head"].trainable
    trainable = {name: row.count for name, row in rows.items() if row.trainable}
    assert sum(trainable.values()) == 1_190_948_864
    assert trainable["fc.weight"] == 154_140_672
    assert trainable["lm_head.weight"] == 229_376_000
    assert sum(n for name, n in trainable.items() if name.startswith("layer.")) == 807_425_024
