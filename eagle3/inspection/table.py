"""An audit as plain text: aligned, numbers with units, findings last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from eagle3.inspection.facts import (
    AgreementFacts,
    Audit,
    ContentFacts,
    DirectoryFacts,
    LengthBin,
    PackingFacts,
    ReadFacts,
    Severity,
    StateFacts,
)
from eagle3.inspection.shown import marked

_BAR = 30
_BAD_FILES = 5
_LABEL = 14
_MARKS = {Severity.ok: "ok", Severity.warning: "WARNING", Severity.stop: "STOP"}


def table(audit: Audit, *, colour: bool) -> str:
    """The whole report; ``colour`` marks supervised text on a terminal."""
    sections = [
        _directory(audit.directory),
        _contents(audit.contents),
        _histogram(audit.contents.lengths.histogram),
        _packing(audit.packing),
        _reading(audit.reading, audit.directory.bytes_per_token),
        _states(audit.states),
        *([_agreement(audit.agreement)] if audit.agreement else []),
        *([_vocab(audit)] if audit.vocab else []),
        *(
            [f"{shown.name}, supervised tokens marked:", marked(shown, colour=colour)]
            for shown in audit.shown
        ),
        _findings(audit),
    ]
    return "\n\n".join("\n".join(section) for section in sections)


def size(num_bytes: float) -> str:
    """``3.60 GB (3.35 GiB)``, or in MB below one of them."""
    if num_bytes < 1e9:
        return f"{num_bytes / 1e6:.1f} MB ({num_bytes / 2**20:.1f} MiB)"
    return f"{num_bytes / 1e9:.2f} GB ({num_bytes / 2**30:.2f} GiB)"


def aligned(rows: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """Columns of equal width: the first one left, the others right aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        indent
        + "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _lines(pairs: Sequence[tuple[str, str]]) -> list[str]:
    return [f"  {label:<{_LABEL}}{text}" for label, text in pairs]


def _directory(found: DirectoryFacts) -> list[str]:
    ids = "not declared" if found.aux_layer_ids is None else f"entering {list(found.aux_layer_ids)}"
    vocab = "unknown, ids not checked" if found.vocab_size is None else f"{found.vocab_size:,}"
    said = found.said_by

    def by(name: str) -> str:
        return f" ({said[name]})" if name in said else ""

    lines = _lines(
        [
            ("format", f"{found.format}, {found.dtype}, {found.files:,} files"),
            (
                "size",
                f"{size(found.disk_bytes)}, {found.bytes_per_token:,} bytes of states a token",
            ),
            (
                "aux layers",
                f"{found.num_aux_layers}{by('num_aux_layers')}, {ids}{by('aux_layer_ids')}",
            ),
            ("last state", f"{found.last_hidden or 'not declared'}{by('last_hidden')}"),
            ("hidden size", f"{found.hidden_size:,}{by('hidden_size')}"),
            ("vocabulary", f"{vocab}{by('vocab_size')}"),
            ("fingerprint", found.fingerprint),
        ]
    )
    bad = [f"  bad: {file.reason}" for file in found.bad_files[:_BAD_FILES]]
    more = len(found.bad_files) - len(bad)
    return [found.path, *lines, *bad, *([f"  ... and {more:,} more bad files"] if more else [])]


def _contents(found: ContentFacts) -> list[str]:
    learned, copies, held = found.supervision, found.duplicates, found.validation
    lengths = found.lengths
    pairs = [
        ("documents", f"{found.documents:,}, and {found.too_short:,} of less than two tokens"),
        (
            "tokens",
            f"{found.tokens:,}, {learned.tokens:,} supervised ({learned.share:.1%}, "
            f"train on {learned.train_on})",
        ),
        (
            "length",
            f"{lengths.shortest:,} to {lengths.longest:,} tokens, mean {lengths.mean:,.0f}; "
            f"p10 {lengths.p10:,.0f}, p50 {lengths.p50:,.0f}, p90 {lengths.p90:,.0f}, "
            f"p99 {lengths.p99:,.0f}",
        ),
        ("masks", f"{learned.empty.count:,} all-zero, {learned.full.count:,} all-one"),
        (
            "duplicates",
            f"{copies.copies.count:,} copies; {copies.prompts:,} prompts, "
            f"{copies.prompts_with_siblings:,} with several answers "
            f"({copies.sibling_documents:,} documents)",
        ),
        (
            "validation",
            f"{held.documents:,} documents ({held.document_share:.1%}; "
            f"{held.token_share:.1%} of the tokens) at a ratio of {held.val_ratio:g}",
        ),
    ]
    sources = [
        [
            source.name or "no label",
            f"{source.documents:,}",
            f"{source.tokens:,}",
            f"{source.supervised_tokens:,}",
        ]
        for source in found.sources
    ]
    head = ["source", "documents", "tokens", "supervised"]
    return ["contents", *_lines(pairs), *aligned([head, *sources])]


def _histogram(bins: Sequence[LengthBin]) -> list[str]:
    most = max(one.documents for one in bins)
    rows = [
        [f"{one.low:,} to {one.high - 1:,}", f"{one.documents:,}", f"{one.tokens:,}"]
        for one in bins
    ]
    lines = aligned([["tokens of a document", "documents", "tokens"], *rows])
    bars = ["", *("#" * -(-one.documents * _BAR // most) for one in bins)]
    return ["lengths", *(f"{line}  {bar}".rstrip() for line, bar in zip(lines, bars, strict=True))]


def _packing(found: Sequence[PackingFacts]) -> list[str]:
    head = [
        "max_seq_len",
        "packs",
        "fill",
        "supervised",
        "long",
        "laid twice",
        "lost",
        "lost if truncated",
    ]
    rows = [
        [
            f"{p.max_seq_len:,}",
            f"{p.packs:,}",
            f"{p.fill:.2%}",
            f"{p.supervised_share:.1%}",
            f"{p.long_documents:,}",
            f"{p.overhead_share:.2%}",
            f"{p.lost_share:.2%}",
            f"{p.lost_if_truncated:.2%}",
        ]
        for p in found
    ]
    return ["packing of an epoch (packs = optimizer steps of one pack)", *aligned([head, *rows])]


def _reading(found: ReadFacts, bytes_per_token: int) -> list[str]:
    pairs = [
        (
            "an epoch",
            f"{size(found.epoch_bytes)} in {found.rows:,} rows; the last state is skipped "
            f"where no loss reads it, else {size(found.epoch_bytes_with_all_last)}",
        ),
        (
            "rate needed",
            f"{found.gb_per_s:.3f} GB/s for {found.tokens_per_s:,.0f} tokens/s, at "
            f"most {bytes_per_token * found.tokens_per_s / 1e9:.3f} GB/s",
        ),
    ]
    return ["reading", *_lines(pairs)]


def _states(found: StateFacts) -> list[str]:
    head = ["state", "NaN or inf", "zero rows", "RMS median", "RMS p99", "RMS of first token"]
    rows = [
        [
            layer.name,
            f"{layer.bad_rows:,}",
            f"{layer.zero_rows:,}",
            f"{layer.rms_median:.4g}",
            f"{layer.rms_p99:.4g}",
            f"{layer.rms_first_token:.4g}",
        ]
        for layer in found.layers
    ]
    names = [layer.name for layer in found.layers]
    neighbours = set(pairwise(names))
    pairs = ", ".join(
        f"{pair.first} / {pair.second} {pair.distance:.2f}"
        for pair in found.pairs
        if (pair.first, pair.second) in neighbours
    )
    return [
        f"states of {found.documents:,} documents, {found.tokens:,} tokens, "
        f"{size(found.read_bytes)} read",
        *aligned([head, *rows]),
        f"  distance of neighbours: {pairs}",
    ]


def _agreement(found: AgreementFacts) -> list[str]:
    lens = ", ".join(f"{rate:.1%}" for rate in found.lens)
    return [
        f"verifier's norm and head on {found.rows:,} tokens before a supervised one",
        *_lines(
            [
                (
                    "last state",
                    f"{found.stored_as or 'unclear'}: next token met on "
                    f"{found.pre_norm_rate:.1%} as pre_norm, "
                    f"{found.post_norm_rate:.1%} as post_norm",
                ),
                (
                    "on-policy",
                    f"{found.on_policy:.1%} (argmax of the last state is the next token, "
                    f"read as {found.read_as})",
                ),
                ("logit lens", f"{lens} (aux layers low to high; same argmax as the last state)"),
            ]
        ),
    ]


def _vocab(audit: Audit) -> list[str]:
    found = audit.vocab
    assert found is not None
    return [
        f"draft vocabulary: {found.draft_size:,} tokens cover {found.coverage:.2%} of "
        f"{found.tokens:,} supervised tokens of the sampled documents"
    ]


def _findings(audit: Audit) -> list[str]:
    return ["findings", *(line for lines in _finding_lines(audit) for line in lines)]


def _finding_lines(audit: Audit) -> Iterator[list[str]]:
    for finding in audit.findings:
        mark, topic = _MARKS[finding.severity], finding.topic
        lines = [f"  {mark:<8} {topic:<16} {finding.reason}"]
        if finding.action:
            lines.append(f"  {'':<8} {'':<16} -> {finding.action}")
        yield lines
