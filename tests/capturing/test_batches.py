"""Which documents go through the verifier together."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from eagle3.capturing.batches import plan_batches, shard_groups
from eagle3.tokens import spread_subset
from tests.capturing.worlds import run, samples, settings, token_lines, write_lines


@given(lengths=st.lists(st.integers(1, 60), max_size=40), batch_tokens=st.integers(1, 200))
def test_batches_hold_every_document_once_within_the_limit(
    lengths: list[int], batch_tokens: int
) -> None:
    batches = plan_batches(lengths, batch_tokens)
    assert sorted(place for batch in batches for place in batch) == list(range(len(lengths)))
    ordered = [lengths[place] for batch in batches for place in batch]
    assert ordered == sorted(ordered, reverse=True), "longest first"
    for batch in batches:
        longest = max(lengths[place] for place in batch)
        assert len(batch) * longest <= batch_tokens or len(batch) == 1


@given(tokens=st.lists(st.integers(1, 5000), max_size=30), batch_tokens=st.integers(1, 100))
def test_groups_hold_every_shard_once_and_enough_to_sort(
    tokens: list[int], batch_tokens: int
) -> None:
    groups = list(shard_groups(tokens, batch_tokens))
    assert [number for group in groups for number in group] == list(range(len(tokens)))
    for group in groups[:-1]:
        assert sum(tokens[number] for number in group) >= 64 * batch_tokens


def test_a_subset_is_spread_over_the_file(chat_verifier: Path, tmp_path: Path) -> None:
    lines = token_lines(20)
    tokens = write_lines(tmp_path / "tokens.jsonl", lines)
    found, _ = run(settings(chat_verifier, tmp_path / "out", tokens=str(tokens), num_samples=5))
    assert found.documents == 5
    wanted = [line["ids"] for line in spread_subset(lines, 5)]
    assert [s.input_ids.tolist() for s in samples(tmp_path / "out")] == wanted
