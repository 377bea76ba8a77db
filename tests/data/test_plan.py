"""Packs dealt to ranks and steps, the validation plan, and the report."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.data.masks import Runs, supervised_runs
from eagle3.data.mixture import epoch_documents
from eagle3.data.packing import PackingRule, Segmentation, segment_documents
from eagle3.data.plan import EpochPlan, deal, packing_report, training_plan, validation_plan
from eagle3.data.segments import Packs, Segment
from eagle3.names import LongDocuments

SPLIT = LongDocuments.split
GOLDEN = Path(__file__).parents[1] / "golden"
RECORDED = json.loads((GOLDEN / "sampler.json").read_text())["rows"]
WORLDS = st.tuples(st.integers(1, 5), st.integers(1, 4))


def single(document: int, rows: int = 3) -> Segment:
    return Segment(document, 0, rows, 0, rows)


def segmented(lengths: np.ndarray, rule: PackingRule) -> Segmentation:
    """All rows gated."""
    rows = np.stack([np.zeros_like(lengths), lengths - 1], axis=1)
    gates = Runs(np.arange(len(lengths) + 1), rows)
    return segment_documents(range(len(lengths)), lengths, gates, rule)


def alone(rows: list[int]) -> Packs:
    """One document a pack."""
    rule = PackingRule(max([1, *rows]), SPLIT, 0, 1)
    return segmented(np.array(rows, np.int64) + 1, rule).segments


def plan_of(packs: Packs, world_size: int, accumulate: int) -> EpochPlan:
    """Consecutive packs in a step."""
    return EpochPlan(packs, deal(packs.supervised, world_size, accumulate))


def heavy_tail(documents: int, seed: int = 3) -> tuple[Segmentation, int]:
    """Log-normal lengths with answers of 10 % to 90 % in packs of 2,048 rows."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(6.5, 1.2, documents), 8, 8192).astype(np.int64)
    prompts = (lengths * rng.uniform(0.1, 0.9, documents)).astype(np.int64)
    gates = Runs(np.arange(documents + 1), np.stack([prompts, lengths - 1], axis=1))
    rule = PackingRule(2048, SPLIT, 64, 3)
    return segment_documents(range(documents), lengths, gates, rule), rule.max_seq_len


@given(packs=st.integers(0, 40), world=WORLDS)
def test_ranks_are_disjoint_and_complete(packs: int, world: tuple[int, int]) -> None:
    plan = plan_of(alone([3] * packs), *world)
    per_step = world[0] * world[1]
    assert (plan.world_size, plan.accumulate) == world
    assert plan.steps == (packs + per_step - 1) // per_step
    seen = []
    for step in range(plan.steps):
        in_step = []
        for rank in range(world[0]):
            window = plan.rank_window(step, rank)
            assert len(window) == world[1]
            in_step += [pack[0].document for pack in window if pack]
        assert sorted(in_step) == list(range(step * per_step, min((step + 1) * per_step, packs)))
        seen += in_step
    assert sorted(seen) == list(range(packs))
    assert sorted(plan.places.ravel()) == list(range(plan.steps * per_step))


@given(packs=st.integers(1, 40), world=WORLDS)
def test_a_partial_step_is_spread_over_ranks_before_slots(
    packs: int, world: tuple[int, int]
) -> None:
    plan = plan_of(alone([3] * packs), *world)
    for step in range(plan.steps):
        filled = [[bool(p) for p in plan.rank_window(step, rank)] for rank in range(world[0])]
        shares = [sum(slots) for slots in filled]
        assert max(shares) - min(shares) <= 1
        assert all(slots == sorted(slots, reverse=True) for slots in filled)


def test_dealt_as_drawn() -> None:
    plan = plan_of(alone([6, 7, 8, 9, 2, 3, 4, 5, 1]), world_size=2, accumulate=2)
    rows = [
        [[sum(s.rows for s in pack) for pack in plan.rank_window(step, rank)] for step in range(3)]
        for rank in range(2)
    ]
    assert rows == [[[8, 7], [4, 3], [1, 0]], [[9, 6], [5, 2], [0, 0]]]


def training_documents(masks: list[list[bool]], rule: PackingRule) -> Segmentation:
    lengths = np.array([len(mask) for mask in masks], np.int64)
    gates = Runs.stack(supervised_runs(np.array(mask)) for mask in masks).gated_rows()
    return segment_documents(range(len(masks)), lengths, gates, rule)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[bool]], PackingRule]:
    """Masks with holes, some longer than a pack."""
    steps, context = draw(st.integers(1, 4)), draw(st.integers(0, 4))
    rule = PackingRule(draw(st.integers(context + steps, 20)), SPLIT, context, steps)
    masks = st.lists(st.booleans(), min_size=2, max_size=50)
    return draw(st.lists(masks, min_size=1, max_size=12)), rule


@settings(deadline=None, max_examples=60)
@given(case=cases(), world=WORLDS, seed=st.integers(0, 3), epoch=st.integers(0, 3))
def test_each_gated_row_and_step_is_trained_once_over_all_ranks(
    case: tuple[list[list[bool]], PackingRule], world: tuple[int, int], seed: int, epoch: int
) -> None:
    masks, rule = case
    documents = training_documents(masks, rule).segments
    plan = training_plan(documents, rule.max_seq_len, seed, epoch, *world)
    trained: Counter[tuple[int, int, int]] = Counter()
    for rank in range(world[0]):
        windows = [plan.rank_window(step, rank) for step in range(plan.steps)]
        assert all(len(window) == world[1] for window in windows)
        for pack in (pack for window in windows for pack in window):
            assert sum(s.rows for s in pack) <= rule.max_seq_len
            trained.update(
                (s.document, row, step)
                for s in pack
                for row in range(s.own_start, s.own_stop)
                for step in range(rule.steps)
                if row + step < s.stop and masks[s.document][row + step + 1]
            )
    assert trained == Counter(
        (document, row, step)
        for document, mask in enumerate(masks)
        for row in range(len(mask) - 1)
        for step in range(rule.steps)
        if row + step + 1 < len(mask) and mask[row + step + 1]
    )


@settings(deadline=None, max_examples=40)
@given(case=cases(), seed=st.integers(0, 2), epoch=st.integers(0, 2))
def test_every_rank_computes_the_same_plan_and_others_differ(
    case: tuple[list[list[bool]], PackingRule], seed: int, epoch: int
) -> None:
    masks, rule = case
    np.random.seed(0)
    plans = []
    for _ in range(2):
        documents = training_documents(masks, rule).segments
        plans.append(training_plan(documents, rule.max_seq_len, seed, epoch, 2, 2))
        np.random.rand()
    assert plans[0].fingerprint == plans[1].fingerprint
    assert np.array_equal(plans[0].places, plans[1].places)
    assert plans[0].packs == plans[1].packs


def test_fingerprint_tells_epochs_seeds_and_ranks_apart() -> None:
    documents, rows = heavy_tail(200)
    plans = [
        training_plan(documents.segments, rows, seed, epoch, world_size, 1)
        for seed, epoch, world_size in [(0, 0, 2), (0, 1, 2), (1, 0, 2), (0, 0, 4)]
    ]
    assert len({plan.fingerprint for plan in plans}) == len(plans)
    assert all(len(bytes.fromhex(plan.fingerprint)) == 16 for plan in plans)


@pytest.mark.parametrize("documents", [30, 500])
def test_packs_of_a_step_and_their_numbers_do_not_depend_on_the_ranks(documents: int) -> None:
    found, rows = heavy_tail(documents)
    steps = []
    for world_size, accumulate in ((1, 4), (2, 2), (4, 1)):
        plan = training_plan(found.segments, rows, 0, 0, world_size, accumulate)
        assert plan.packs == training_plan(found.segments, rows, 0, 0, 1, 4).packs
        for step in range(plan.steps):
            for rank in range(world_size):
                window = plan.rank_window(step, rank)
                for slot, pack in enumerate(window):
                    place = plan.place(step, rank, slot)
                    assert pack == (plan.packs[place] if place < len(plan.packs) else ())
        steps.append([sorted(places.ravel()) for places in plan.places])
    assert steps[0] == steps[1] == steps[2]


@pytest.mark.parametrize(("world_size", "accumulate"), [(4, 1), (2, 3), (7, 2)], ids=str)
def test_heavy_tail_is_shared_evenly(world_size: int, accumulate: int) -> None:
    found, rows = heavy_tail(8000)
    plan = training_plan(found.segments, rows, 0, 0, world_size, accumulate)
    report = packing_report(found, plan, rows, 0)
    assert report.balance_rows <= 1.01
    assert report.balance_supervised <= 1.01
    assert report.step_skew < 1.1
    documents = plan.rank_sums(np.diff(plan.packs.offsets)).sum(axis=0)
    assert max(documents) < 1.1 * min(documents)


@pytest.mark.parametrize("seed", range(6))
def test_few_documents_are_shared_as_evenly_as_whole_packs_allow(seed: int) -> None:
    """A rank may have one pack of a partial last step more than the others: nobody can do better
    with rows, which full packs have equally many of. Supervised rows make up for it."""
    found, rows = heavy_tail(500, seed)
    plan = training_plan(found.segments, rows, 0, 0, 4, 1)
    report = packing_report(found, plan, rows, 0)
    whole, rest = divmod(len(plan.packs), 4)
    arithmetic = (whole + 1) / (whole + rest / 4) if rest else 1.0
    assert report.balance_rows <= 1.01 * arithmetic
    assert report.balance_supervised <= 1.01


@pytest.mark.parametrize(
    "peer", RECORDED, ids=lambda p: "-".join(str(p[k]) for k in ("samples", "max_len", "replicas"))
)
def test_fewer_steps_than_a_recorded_sampler_and_nothing_more_is_cut(peer: dict[str, Any]) -> None:
    """It counts tokens, we count rows: of a document cut at max_len, one token more is used."""
    with np.load(GOLDEN / "sampler_lengths.npz") as file:
        lengths = file[f"lengths.{peer['samples']}"].astype(np.int64)
    rule = PackingRule(peer["max_len"], LongDocuments.truncate, 0, 3)
    found = segmented(lengths, rule)
    plan = training_plan(found.segments, rule.max_seq_len, 0, 0, peer["replicas"], 1)
    report = packing_report(found, plan, rule.max_seq_len, 0)
    assert len(found.segments) == peer["samples"]
    assert found.lost_rows == peer["tokens_cut_by_truncation"] - peer["longer_than_max_len"]
    assert plan.steps < 0.93 * min(peer["batches_per_rank"])
    assert report.fill > max(0.99, peer["fill_efficiency"])
    assert len(plan.packs) <= 1.01 * peer["lower_bound_batches"]
    assert report.balance_rows <= 1.01 + 1 / plan.steps


def test_similar_packs_share_a_step_and_the_order_stays_mixed() -> None:
    found, rows = heavy_tail(8000)
    plan = training_plan(found.segments, rows, 0, 0, 4, 1)
    supervised = plan.packs.supervised
    drawn = np.random.default_rng(0).permutation(supervised)
    by_chance = packing_report(found, plan_of(alone(drawn.tolist()), 4, 1), rows, 0)
    assert by_chance.step_skew > 1.3
    assert packing_report(found, plan, rows, 0).step_skew < 1.06
    steps = plan.rank_sums(supervised).sum(axis=1)[:-1]
    half = len(steps) // 2
    assert abs(steps[:half].mean() / steps[half:].mean() - 1) < 0.1
    assert abs(np.corrcoef(steps[:-1], steps[1:])[0, 1]) < 0.2


def test_a_document_of_weight_two_is_trained_twice() -> None:
    lengths = np.array([9, 30, 12, 7])
    rows = np.stack([np.zeros_like(lengths), lengths - 1], axis=1)
    gates = Runs(np.arange(5), rows)
    rule = PackingRule(16, SPLIT, 2, 3)
    chosen = epoch_documents(np.array([0, 1, 1, 0]), [1, 2], seed=0, epoch=0)
    documents = segment_documents(chosen, lengths, gates, rule).segments
    plan = training_plan(documents, 16, 0, 0, 2, 1)
    owned = Counter(
        (s.document, row)
        for pack in plan.packs
        for s in pack
        for row in range(s.own_start, s.own_stop)
    )
    assert owned == {
        (document, row): times
        for document, times in enumerate([1, 2, 2, 1])
        for row in range(lengths[document] - 1)
    }


@given(
    lengths=st.lists(st.integers(2, 60), max_size=25),
    world_size=st.integers(1, 4),
)
def test_validation_deals_whole_documents_in_order(lengths: list[int], world_size: int) -> None:
    rule = PackingRule(16, SPLIT, 3, 3)
    segments = segmented(np.array(lengths, dtype=np.int64), rule).segments
    plan = validation_plan(segments, 16, world_size)
    rank_of: dict[int, int] = {}
    seen: dict[int, list[Segment]] = {}
    for step in range(plan.steps):
        for rank in range(world_size):
            (pack,) = plan.rank_window(step, rank)
            assert sum(s.rows for s in pack) <= 16
            for segment in pack:
                assert rank_of.setdefault(segment.document, rank) == rank
                seen.setdefault(segment.document, []).append(segment)
    assert {tuple(found) for found in seen.values()} == set(segments)


def test_validation_of_few_documents_has_equal_steps() -> None:
    plan = validation_plan(alone([3]), 16, world_size=3)
    assert plan.steps == 1
    assert [plan.rank_window(0, rank) for rank in range(3)] == [((single(0),),), ((),), ((),)]


def test_report_by_hand() -> None:
    """Documents of 5 and 10 tokens, packs of 6 rows; the long one is split as 6 + 6 + 5 rows."""
    rule = PackingRule(6, SPLIT, split_context_tokens=2, steps=3)
    segmentation = segmented(np.array([5, 10]), rule)
    plan = training_plan(segmentation.segments, 6, 0, 0, world_size=2, accumulate=1)
    report = packing_report(segmentation, plan, 6, short_documents=1)
    assert (report.documents, report.packs, report.steps) == (2, 4, 2)
    assert report.fill == pytest.approx((4 + 17) / 24)
    assert report.supervised_fraction == pytest.approx(13 / 21)
    assert report.overhead_rows == 8
    assert report.clipped_share == pytest.approx(5 / 13)
    assert (report.lost_tokens, report.dropped_documents, report.short_documents) == (0, 0, 1)
    text = "\n".join(report.lines())
    assert "2 documents in 4 packs of 6 rows, 2 optimizer steps" in text
    assert "fill 87.5%" in text
    assert "1 of less than two tokens" in text


def test_balance_by_hand() -> None:
    """Supervised rows of two ranks: 9 and 1 in a step, 4 and 2 in the next, 3 and none."""
    packs = alone([9, 1, 4, 2, 3])
    segmentation = segmented(np.array([10, 2, 5, 3, 4]), PackingRule(9, SPLIT, 0, 1))
    places = np.array([[[0, 1]], [[3, 2]], [[5, 4]]])
    report = packing_report(segmentation, EpochPlan(packs, places), 9, short_documents=0)
    assert report.balance_supervised == pytest.approx(11 / 9.5)
    assert report.balance_rows == pytest.approx(11 / 9.5)
    assert report.step_skew == pytest.approx((9 / 5 + 4 / 3 + 3 / 1.5) / 3)
    assert (
        report.lines()[-1] == "the busiest of 2 ranks does 1.158 times the mean rows of an epoch, "
        "1.158 times the mean supervised rows, and 1.711 times the mean supervised rows of a step"
    )
    one = packing_report(segmentation, plan_of(packs, 1, 1), 9, short_documents=0)
    assert (one.balance_rows, one.balance_supervised, one.step_skew) == (1.0, 1.0, 1.0)
    assert "ranks" not in "\n".join(one.lines())
