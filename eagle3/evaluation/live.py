"""Answer prompts with and without drafting: acceptance, time, and that the answers are the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from eagle3.capture_progress import Progress
from eagle3.config import ComputeConfig
from eagle3.data.batch import PackedBatch
from eagle3.decoding.clock import Clock
from eagle3.decoding.costs import Costs, measure_costs, typical
from eagle3.decoding.speculative import Answer, Drafting, decode
from eagle3.evaluation.config import LiveConfig
from eagle3.evaluation.live_inputs import LiveModels
from eagle3.model.ttt import unroll
from eagle3.replay import answer_rows, replay
from eagle3.verifier.base import Sampling

PLAIN = 0
"""Drafts of a round that is no round."""
GAP = 1e-4
"""Between the two best logits, below which rounding may choose in float32."""
_ROUNDINGS = 4
_COST_REPEATS = 6
"""At least, over all batches."""


@dataclass
class Timed:
    """All answers of one way to decode."""

    clock: Clock
    answers: dict[int, Answer] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(len(answer.ids) for answer in self.answers.values())

    @property
    def rounds(self) -> int:
        return sum(answer.rounds for answer in self.answers.values())

    @property
    def acceptance_length(self) -> float:
        """Tokens per verifier pass; the first token of an answer comes from the prefill."""
        return sum(answer.emitted for answer in self.answers.values()) / max(self.rounds, 1)

    @property
    def by_position(self) -> tuple[float, ...]:
        """Share of rounds that accept draft 1, 2, ..."""
        columns = zip(*(answer.accepted for answer in self.answers.values()), strict=True)
        return tuple(sum(column) / max(self.rounds, 1) for column in columns)


@dataclass(frozen=True)
class Comparison:
    """Of greedy answers with the verifier's own ``generate``."""

    same: int
    excused: int
    """First difference where the two best logits are within rounding of each other."""
    wrong: tuple[str, ...]
    """A line for each other difference."""


def decode_by_turns(
    models: LiveModels,
    prompts: Sequence[Tensor],
    live: LiveConfig,
    most_drafts: int,
    say: Callable[[str], None],
) -> tuple[dict[int, Timed], Costs]:
    """Every batch in every way, one after another and each time another way first.

    Between the batches single passes are timed, on what the batch has answered, so that a machine
    which is busy now and then is so for both.

    Returns:
        Answers by the number of drafts, :data:`PLAIN` without; and the typical cost of passes with
        up to ``most_drafts`` drafts.
    """
    ways = list(dict.fromkeys([PLAIN, *live.draft_tokens]))
    device = models.verifier.device
    found = {way: Timed(Clock(device)) for way in ways}
    progress = Progress(len(prompts) * len(ways), say, "decoding", "answers")
    order = sorted(range(len(prompts)), key=lambda number: (len(prompts[number]), number))
    batches = [order[at : at + live.batch_size] for at in range(0, len(order), live.batch_size)]
    _answer(models, [prompts[order[0]]], [0], ways[-1], live, Timed(Clock(device)), 4)  # warm up
    costs: list[Costs] = []
    repeats = -(-_COST_REPEATS // len(batches))
    for turn, batch in enumerate(batches):
        for place in range(len(ways)):
            way = ways[(turn + place) % len(ways)]
            chosen = [prompts[number] for number in batch]
            _answer(models, chosen, batch, way, live, found[way], live.max_new_tokens)
            progress.add(len(batch))
        halves = [_half_answered(prompts[n], found[PLAIN].answers[n]) for n in batch]
        costs += measure_costs(models.drafted, models.drafter, halves, most_drafts, repeats)
    return found, typical(costs)


def _half_answered(prompt: Tensor, answer: Answer) -> Tensor:
    return torch.cat((prompt, torch.tensor(answer.ids[: len(answer.ids) // 2]).long()))


def _answer(
    models: LiveModels,
    prompts: Sequence[Tensor],
    numbers: Sequence[int],
    way: int,
    live: LiveConfig,
    into: Timed,
    max_new_tokens: int,
) -> None:
    drafting = None if way == PLAIN else Drafting(models.drafter, way)
    verifier = models.plain if way == PLAIN else models.drafted
    sampling = Sampling(max_new_tokens, live.temperature, live.top_p, live.top_k, live.seed)
    start = time.perf_counter()
    answers = decode(verifier, prompts, sampling, into.clock, drafting, numbers=numbers)
    into.seconds += time.perf_counter() - start
    into.answers.update(zip(numbers, answers, strict=True))


def compare_with_generate(
    models: LiveModels,
    prompts: Sequence[Tensor],
    found: dict[int, Timed],
    live: LiveConfig,
    say: Callable[[str], None],
) -> Comparison:
    """Greedy answers against the model's own ``generate``, token by token."""
    same, excused, wrong = 0, 0, []
    progress = Progress(len(prompts), say, "generate", "answers")
    for number, prompt in enumerate(prompts):
        (written,) = models.verifier.generate([prompt], Sampling(live.max_new_tokens))
        wanted = tuple(written.tolist())
        for way, timed in found.items():
            ids = timed.answers[number].ids
            if ids == wanted:
                same += 1
                continue
            place = first_difference(ids, wanted)
            best, gap = _two_best(models, prompt, wanted[:place])
            if gap < tolerance(models.verifier.model.dtype, best):
                excused += 1
            else:
                wrong.append(
                    f"prompt {number}, {way} drafts: token {place} is {ids[place : place + 1]}, "
                    f"generate has {wanted[place : place + 1]}, logits {gap:.2g} apart"
                )
        progress.add(1)
    return Comparison(same, excused, tuple(wrong))


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """The first place at which they differ, the end of the shorter one included."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((n for n, (left, right) in pairs if left != right), min(len(a), len(b)))


def tolerance(dtype: torch.dtype, best: float) -> float:
    """Gap between the two best logits within which a pass over several tokens may choose the other
    one: 1e-4 in float32, a few roundings of a logit of size ``best`` in shorter dtypes."""
    return max(GAP, _ROUNDINGS * torch.finfo(dtype).eps * abs(best))


def _two_best(models: LiveModels, prompt: Tensor, ids: Sequence[int]) -> tuple[float, float]:
    """The best logit after the prompt and ``ids``, and its distance from the second."""
    text = torch.cat((prompt, torch.tensor(ids, dtype=torch.int64)))
    first, second = models.verifier.logits(text)[-1].topk(2).values.tolist()
    return float(first), float(first - second)


@torch.inference_mode()
def replay_lengths(
    models: LiveModels, prompts: Sequence[Tensor], answers: Sequence[Answer], draft_tokens: int
) -> list[float]:
    """Acceptance length with 1, 2, ... drafts, from the answers as training sees them.

    States come from one prefill of prompt and answer, the drafter is unrolled over all rows at
    once, and rounds are walked: what validation does, on the answers of this decoding.
    """
    emitted, rounds = np.zeros(draft_tokens), np.zeros(draft_tokens)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.cat((prompt, torch.tensor(answer.ids)))
        right = _right(models, ids, draft_tokens)
        walkable = answer_rows(np.arange(len(ids)) >= len(prompt))
        right[~_reached(walkable, draft_tokens)] = False
        leading = right.cumprod(axis=1)
        for place in range(draft_tokens):
            accepted = leading[:, : place + 1].sum(axis=1)
            walked = replay(walkable, accepted)
            emitted[place] += walked[0]
            rounds[place] += walked[1]
    return [float(length) for length in emitted / rounds.clip(min=1)]


def _right(models: LiveModels, ids: Tensor, steps: int) -> np.ndarray:
    """bool [n - 1, steps]: the draft of row i at step s is token i + 2 + s."""
    drafter = models.drafter
    (states,) = models.verifier.capture([ids], models.aux_layer_ids)
    aux = torch.cat(states.aux, dim=-1)[:-1].to(drafter.fc.weight.dtype)
    batch = PackedBatch.of_rows(ids[1:].to(aux.device), aux)
    draft_ids = drafter.d2t + torch.arange(len(drafter.d2t), device=aux.device)
    right = np.zeros((len(batch), steps), dtype=bool)
    for step, hidden in enumerate(unroll(drafter, batch, aux, steps, ComputeConfig.reference())):
        drafted = draft_ids[drafter.logits(hidden).argmax(-1)].cpu()
        rows = max(len(ids) - 2 - step, 0)
        right[:rows, step] = (drafted[:rows] == ids[2 + step :]).numpy()
    return right


def _reached(walkable: np.ndarray, steps: int) -> np.ndarray:
    """bool [n - 1, steps]: the token that the row's draft stands for is one of the answer."""
    rows = np.arange(len(walkable))[:, None] + np.arange(steps)
    inside = rows < len(walkable)
    return inside & walkable[rows.clip(max=len(walkable) - 1)]
