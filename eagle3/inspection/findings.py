"""Judgements on the facts of an audit; every threshold stands here."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from eagle3.audit import MIN_ROWS, clearly_above
from eagle3.inspection.facts import (
    AgreementFacts,
    Audit,
    DirectoryFacts,
    DuplicateFacts,
    Finding,
    Named,
    PackingFacts,
    Severity,
    StateFacts,
    SupervisionFacts,
    VocabFacts,
)
from eagle3.names import TrainOn

MOSTLY_SUPERVISED = 0.95
"""Share of supervised tokens above which the prompt is probably not masked."""
ODD_MASKS = 0.01
"""Share of documents with an all-zero or all-one mask that is worth a look."""
BAD_FILES = 0.01
"""Share of unusable files above which the capture is broken."""
DUPLICATES = 0.01
"""Share of documents that are copies of another."""
ON_POLICY = 0.8
"""Share of responses' tokens that the verifier would say itself, below which acceptance suffers."""
UNRELATED = 0.3
"""The same, below which states and tokens do not belong together."""
SAME_STATES = 0.01
"""Distance of two stored states below which they are one state stored twice."""
LENS_DROP = 0.02
"""Drop of the logit-lens agreement from one aux layer to the next that speaks of wrong order."""
PACKING_LOSS = 0.01
"""Rows lost, or laid twice, over all rows."""
COVERAGE = 0.9
"""Share of the supervised tokens in the draft vocabulary."""

Findings = Iterator[Finding]


def judge(audit: Audit) -> tuple[Finding, ...]:
    """All findings, the passed checks included, in the order of the table."""
    contents = audit.contents
    train_on = contents.supervision.train_on
    return (
        *_declared(audit.directory),
        *_bad_files(audit.directory),
        *_supervision(contents.supervision),
        *_odd_masks(contents.supervision.empty, "all-zero masks", contents.documents),
        *(
            _odd_masks(contents.supervision.full, "all-one masks", contents.documents)
            if train_on != TrainOn.all
            else ()
        ),
        *_duplicates(contents.duplicates, contents.documents),
        *_packing(audit.packing),
        *_states(audit.states),
        *_layers_differ(audit.states),
        *(_agreement(audit.agreement, audit) if audit.agreement else _without_verifier()),
        *(_vocab(audit.vocab) if audit.vocab else ()),
    )


def _ok(topic: str, reason: str) -> Finding:
    return Finding(Severity.ok, topic, reason)


def _declared(directory: DirectoryFacts) -> Findings:
    missing = []
    if directory.aux_layer_ids is None:
        missing += ["--aux-layer-ids", "--layer-id-convention"]
    if directory.last_hidden is None:
        missing.append("--last-hidden")
    if missing:
        yield Finding(
            Severity.warning,
            "declaration",
            "the directory does not say what its states are",
            f"give {', '.join(missing)} here, and data.aux_layer_ids, data.layer_id_convention and "
            "data.last_hidden in training",
        )
    else:
        yield _ok("declaration", "layers, their convention and the norm are declared")


def _bad_files(directory: DirectoryFacts) -> Findings:
    bad = directory.bad_files
    if not bad:
        yield _ok("files", f"all {directory.files:,} are usable")
        return
    share = len(bad) / (directory.files + len(bad))
    yield Finding(
        Severity.stop if share > BAD_FILES else Severity.warning,
        "files",
        f"{len(bad):,} of {directory.files + len(bad):,} are unusable; the first: {bad[0].reason}",
        "capture them again or remove them",
    )


def _supervision(found: SupervisionFacts) -> Findings:
    if found.tokens == 0:
        yield Finding(
            Severity.stop,
            "supervision",
            "no token of any document is supervised",
            "the chat template or answer markers of the capture did not match: capture again, or "
            "use --train-on all (data.train_on=all)",
        )
    elif found.share > MOSTLY_SUPERVISED and found.train_on != TrainOn.all:
        yield Finding(
            Severity.warning,
            "supervision",
            f"{found.share:.1%} of the tokens are supervised",
            "check that prompts are masked; the sample shown here marks what is supervised",
        )
    else:
        yield _ok("supervision", f"{found.share:.1%} of the tokens are supervised")


def _odd_masks(found: Named, topic: str, documents: int) -> Findings:
    reason = f"{found.count:,} of {documents:,} documents"
    if found.count <= ODD_MASKS * documents:
        yield _ok(topic, reason)
        return
    yield Finding(
        Severity.warning,
        topic,
        f"{reason}, among them {', '.join(found.first[:3])}",
        "check how the capture found the answers in these",
    )


def _duplicates(found: DuplicateFacts, documents: int) -> Findings:
    copies = found.copies
    reason = f"{copies.count:,} of {documents:,} documents are copies of another"
    if copies.count <= DUPLICATES * documents:
        yield _ok("duplicates", reason)
        return
    yield Finding(
        Severity.warning,
        "duplicates",
        f"{reason}, among them {', '.join(copies.first[:3])}",
        "remove copies: they weigh twice in training (never in validation and training at once)",
    )


def _packing(found: tuple[PackingFacts, ...]) -> Findings:
    for packing in found:
        topic = f"packing {packing.max_seq_len:,}"
        reason = (
            f"{packing.lost_share:.1%} of the rows are lost, {packing.overhead_share:.1%} are laid "
            "twice"
        )
        if packing.lost_share + packing.overhead_share > PACKING_LOSS:
            yield Finding(Severity.warning, topic, reason, "prefer a larger max_seq_len")
        else:
            yield _ok(topic, f"fill {packing.fill:.1%}, {reason}")


def _states(found: StateFacts) -> Findings:
    if found.unreadable:
        first = found.unreadable[0]
        yield Finding(
            Severity.stop,
            "reading",
            f"{len(found.unreadable)} sampled documents cannot be read; the first: {first.reason}",
            "run `python -m eagle3.shards verify` on the directory",
        )
    bad = [layer for layer in found.layers if layer.bad_rows]
    if bad:
        counts = ", ".join(f"{layer.bad_rows:,} ({layer.name})" for layer in bad)
        yield Finding(
            Severity.stop,
            "finite states",
            f"NaN or inf in rows of {found.tokens:,} sampled tokens: {counts}",
            "capture again in bfloat16 or float32",
        )
    else:
        yield _ok("finite states", f"no NaN or inf in {found.tokens:,} sampled tokens")
    zero = [layer for layer in found.layers if layer.zero_rows]
    if zero:
        counts = ", ".join(f"{layer.zero_rows:,} ({layer.name})" for layer in zero)
        yield Finding(
            Severity.stop,
            "zero rows",
            f"nothing but zeros in rows of {found.tokens:,} sampled tokens: {counts}",
            "padding or an interrupted write was stored as states: capture these documents again",
        )


def _layers_differ(found: StateFacts) -> Findings:
    if not found.tokens:
        return
    same = [pair for pair in found.pairs if pair.distance < SAME_STATES]
    for pair in same:
        yield Finding(
            Severity.stop,
            "layers differ",
            f"the states {pair.first} and {pair.second} are the same "
            f"(distance {pair.distance:.4f})",
            "the capture stored one layer twice: correct its layer list and capture again",
        )
    if not same:
        nearest = min(found.pairs, key=lambda pair: pair.distance)
        yield _ok(
            "layers differ",
            f"nearest are {nearest.first} and {nearest.second}, distance {nearest.distance:.2f}",
        )


def _without_verifier() -> Findings:
    yield Finding(
        Severity.warning,
        "verifier",
        "norm of the last state, order of the layers and on-policy share were not checked",
        "give --verifier DIR, and data that can be read and are supervised",
    )


def _agreement(found: AgreementFacts, audit: Audit) -> Findings:
    ids = audit.directory.aux_layer_ids
    if ids is not None and max(ids) > found.num_layers:
        yield Finding(
            Severity.stop,
            "layer ids",
            f"states entering layers {list(ids)} are declared; the verifier has {found.num_layers}",
            "correct the ids or their convention, or give the verifier the states come from",
        )
    if found.rows < MIN_ROWS:
        yield Finding(
            Severity.warning,
            "verifier",
            f"only {found.rows} supervised tokens to judge by; nothing is concluded",
            "sample more documents (--samples)",
        )
        return
    yield from _norm(found, audit.directory.last_hidden)
    yield from _policy(found)
    yield from _lens_order(found, audit)


def _norm(found: AgreementFacts, declared: str | None) -> Findings:
    figures = (
        f"argmax is the next token on {found.pre_norm_rate:.1%} of {found.rows:,} tokens read as "
        f"pre_norm and {found.post_norm_rate:.1%} as post_norm; {found.unit_share:.0%} of the "
        "states have the size of a norm's output"
    )
    if found.stored_as is None:
        yield Finding(
            Severity.warning,
            "norm",
            f"figures do not tell whether the last state is pre_norm or post_norm: {figures}",
            "look it up in the capture's code; check that this is the verifier of the capture",
        )
    elif declared is None:
        yield Finding(
            Severity.warning,
            "norm",
            f"not declared, looks {found.stored_as}: {figures}",
            f"give --last-hidden {found.stored_as} (data.last_hidden={found.stored_as})",
        )
    elif declared != found.stored_as:
        yield Finding(
            Severity.stop,
            "norm",
            f"declared {declared}, but the last state is {found.stored_as}: {figures}",
            f"set data.last_hidden={found.stored_as}, or check that this is the verifier of the "
            "capture",
        )
    else:
        yield _ok("norm", f"{declared} as declared: {figures}")


def _policy(found: AgreementFacts) -> Findings:
    reason = f"the verifier would say {found.on_policy:.1%} of the responses' tokens itself"
    if found.on_policy < UNRELATED:
        yield Finding(
            Severity.stop,
            "on-policy",
            f"{reason}: states and tokens do not belong together",
            "check that this is the verifier of the capture, and that states are not shifted "
            "against the tokens",
        )
    elif found.on_policy < ON_POLICY:
        yield Finding(
            Severity.warning,
            "on-policy",
            f"{reason}: they were sampled hot or written by another model",
            "regenerate the responses with the verifier, or expect lower acceptance",
        )
    else:
        yield _ok("on-policy", reason)


def _lens_order(found: AgreementFacts, audit: Audit) -> Findings:
    names = [layer.name for layer in audit.states.layers]
    rates = ", ".join(f"{n} {r:.1%}" for n, r in zip(names, found.lens, strict=False))
    falls = any(
        above - below < -LENS_DROP and clearly_above(below, above, found.rows)
        for below, above in pairwise(found.lens)
    )
    if falls:
        yield Finding(
            Severity.stop,
            "layer order",
            f"logit-lens agreement falls with depth: {rates}; are the aux layers permuted?",
            "store the aux states low layer first, or correct the order of the ids",
        )
    else:
        yield _ok("layer order", f"logit-lens agreement does not fall with depth: {rates}")


def _vocab(found: VocabFacts) -> Findings:
    reason = f"{found.draft_size:,} tokens cover {found.coverage:.2%} of the supervised ones"
    if found.coverage < COVERAGE:
        yield Finding(
            Severity.warning,
            "draft vocabulary",
            reason,
            "build a map on this data: `python -m eagle3.shards vocab`",
        )
    else:
        yield _ok("draft vocabulary", reason)
