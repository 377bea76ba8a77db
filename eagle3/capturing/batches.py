"""Which documents go through the verifier together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_BATCHES = 64
"""Of a group of shards, so that documents of like length find each other."""


def plan_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Batches of like length, longest first, so that trouble with memory shows at once.

    Args:
        lengths: Tokens of each document.
        batch_tokens: Limit of documents times longest; a longer document goes alone.

    Returns:
        Places in ``lengths``, each once.
    """
    batches: list[list[int]] = []
    longest = 0
    for place in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if not batches or (len(batches[-1]) + 1) * longest > batch_tokens:
            batches.append([])
            longest = lengths[place]
        batches[-1].append(place)
    return batches


def shard_groups(tokens: Sequence[int], batch_tokens: int) -> Iterator[range]:
    """Consecutive shards that are filled together.

    One shard may hold a dozen long documents, too few to be sorted by length without waste; all
    shards at once would leave none finished until the end.

    Args:
        tokens: Of each shard.
        batch_tokens: Of one prefill.

    Yields:
        Numbers of the shards of a group, each shard once.
    """
    first, total = 0, 0
    for number, count in enumerate(tokens):
        total += count
        if total >= _BATCHES * batch_tokens:
            yield range(first, number + 1)
            first, total = number + 1, 0
    if first < len(tokens):
        yield range(first, len(tokens))
