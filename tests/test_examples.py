"""The rows people read after a validation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from eagle3.examples import Example, pick_examples, table
from eagle3.token_text import decoder
from tests.helpers import judge, make_document, pack, tiny_drafter, tiny_head


def test_examples_are_the_judged_rows() -> None:
    drafter, head = tiny_drafter(), tiny_head()
    batch = pack([make_document(9, 1), make_document(30, 2)])
    batch = replace(batch, document_sources=("chat", "code"))
    results = judge(drafter, head, batch, ttt_steps=3).steps
    examples = pick_examples(batch, results, drafter.d2t, count=5)
    assert len(examples) == 5
    assert examples == pick_examples(batch, results, drafter.d2t, count=5)
    selected = set((drafter.d2t + torch.arange(len(drafter.d2t))).tolist())
    tokens = batch.input_ids.tolist()
    for example in examples:
        assert len(example.draft) == len(example.verifier) == 3
        assert set(example.draft) | set(example.verifier) <= selected
        hits = [a == b for a, b in zip(example.draft, example.verifier, strict=True)]
        assert example.accepted <= [*hits, False].index(False)
        places = [i for i, token in enumerate(tokens) if token == example.context[-1]]
        labels = {batch.document_sources[int(batch.document_ids[place])] for place in places}
        assert example.source in labels
        text = " ".join(map(str, tokens))
        assert " ".join(map(str, example.context)) in text
    first = results[0].rows.starts[0]
    logits = head(batch.last_hidden[first : first + 3])
    assert examples[0].verifier == tuple(
        (logits.argmax(-1) + drafter.d2t[logits.argmax(-1)]).tolist()
    )


def test_without_a_tokenizer_the_ids_are_shown(tmp_path: Path) -> None:
    decode = decoder(tmp_path)
    assert decode([3, 4]) == "3 4"
    columns = ["context", "verifier", "draft", "accepted", "source"]
    example = Example((1, 2), (3,), (4,), 0, "chat")
    assert table([example], decode) == (columns, [["1 2", "3", "4", 0, "chat"]])
