"""What an audit finds out, as frozen values that go into JSON unchanged.

The names of the fields are the keys of the JSON file; units are in the names or beside them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

JSON_VERSION = 1


class Severity(StrEnum):
    """What a finding means for a training run."""

    ok = "ok"
    warning = "warning"
    stop = "stop"


@dataclass(frozen=True)
class Finding:
    """One judgement, with the figure it rests on and what to do about it."""

    severity: Severity
    topic: str
    reason: str
    action: str = ""
    """Empty: nothing to do."""


@dataclass(frozen=True)
class Named:
    """A count and the first few it counts."""

    count: int
    first: tuple[str, ...]


@dataclass(frozen=True)
class BadFile:
    """A file or document that cannot be used, and why."""

    path: str
    reason: str


@dataclass(frozen=True)
class DirectoryFacts:
    """What the directory is; ``said_by`` names the origin of every fact that may be declared."""

    path: str
    format: str
    dtype: str
    num_aux_layers: int
    hidden_size: int
    vocab_size: int | None
    """Of the verifier; None: nobody said it, and token ids were not checked."""
    aux_layer_ids: tuple[int, ...] | None
    """*entering* convention; None: not declared."""
    last_hidden: str | None
    """None: not declared."""
    said_by: dict[str, str]
    fingerprint: str
    files: int
    disk_bytes: int
    """Size of the files."""
    bytes_per_token: int
    """Of hidden states."""
    bad_files: tuple[BadFile, ...]


@dataclass(frozen=True)
class LengthBin:
    """Documents of ``low`` to ``high - 1`` tokens."""

    low: int
    high: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class LengthFacts:
    """Tokens of a document."""

    shortest: int
    mean: float
    p10: float
    p50: float
    p90: float
    p99: float
    longest: int
    histogram: tuple[LengthBin, ...]


@dataclass(frozen=True)
class SupervisionFacts:
    """Tokens that a loss learns from, under ``train_on``."""

    train_on: str
    tokens: int
    share: float
    empty: Named
    """Documents without a supervised token."""
    full: Named
    """Documents with nothing but supervised tokens."""
    share_histogram: tuple[int, ...]
    """Documents by their own supervised share, in equal bins from 0 to 1."""


@dataclass(frozen=True)
class DuplicateFacts:
    """Documents with the same token ids, and prompts with several answers."""

    copies: Named
    """Documents whose token ids came before."""
    prompts: int
    """Different prompts."""
    prompts_with_siblings: int
    """Prompts with more than one document."""
    sibling_documents: int
    """Documents of these prompts."""


@dataclass(frozen=True)
class SourceFacts:
    """Documents of one source label."""

    name: str
    documents: int
    tokens: int
    supervised_tokens: int


@dataclass(frozen=True)
class ValidationFacts:
    """What the hash of the prompt holds out."""

    val_ratio: float
    documents: int
    document_share: float
    token_share: float


@dataclass(frozen=True)
class ContentFacts:
    """What the index alone says."""

    documents: int
    """Of at least two tokens."""
    tokens: int
    too_short: int
    """Documents of less than two tokens, left out."""
    lengths: LengthFacts
    supervision: SupervisionFacts
    duplicates: DuplicateFacts
    sources: tuple[SourceFacts, ...]
    validation: ValidationFacts


@dataclass(frozen=True)
class PackingFacts:
    """The first epoch at one ``max_seq_len``, all documents, one pack an optimizer step."""

    max_seq_len: int
    long_documents: int
    """Documents of more rows."""
    packs: int
    fill: float
    supervised_share: float
    overhead_share: float
    """Context and look-ahead rows over rows laid."""
    lost_share: float
    """Rows not trained under the chosen rule, over all rows."""
    lost_if_truncated: float
    """Rows past ``max_seq_len``, over all rows."""


@dataclass(frozen=True)
class ReadFacts:
    """Bytes of hidden states an epoch reads, and how fast they must come."""

    rows: int
    """Rows of an epoch without overhead."""
    epoch_bytes: int
    """The last state only where a loss reads it."""
    epoch_bytes_with_all_last: int
    tokens_per_s: float
    gb_per_s: float
    """1e9 bytes a second for ``tokens_per_s``, last states skipped where no loss reads them."""


@dataclass(frozen=True)
class LayerFacts:
    """One stored state over all tokens of the sampled documents."""

    name: str
    bad_rows: int
    """Rows with NaN or inf."""
    zero_rows: int
    rms_median: float
    """Without first tokens, as the next."""
    rms_p99: float
    rms_first_token: float
    """Median over documents."""


@dataclass(frozen=True)
class PairFacts:
    """How far two stored states are apart: median of |a - b| / max(|a|, |b|) over rows."""

    first: str
    second: str
    distance: float


@dataclass(frozen=True)
class StateFacts:
    """What the states of the sampled documents look like."""

    documents: int
    tokens: int
    read_bytes: int
    layers: tuple[LayerFacts, ...]
    """K aux layers, low to high, then the last state."""
    pairs: tuple[PairFacts, ...]
    unreadable: tuple[BadFile, ...]


@dataclass(frozen=True)
class AgreementFacts:
    """What final norm and head of the verifier make of the states; rates over ``rows``."""

    rows: int
    """Tokens whose successor is supervised."""
    pre_norm_rate: float
    """Argmax is the data's next token, the last state read as pre-norm."""
    post_norm_rate: float
    unit_share: float
    """Last states that have RMS 1 once divided by the norm's gain, as every post-norm state has."""
    stored_as: str | None
    """What the last state is by these figures; None: they do not tell."""
    read_as: str
    """How it is read below."""
    on_policy: float
    """Argmax of the last state is the data's next token."""
    lens: tuple[float, ...]
    """Argmax of norm and head on aux layer k is that of the last state; low layer first."""
    num_layers: int
    """Of the verifier."""


@dataclass(frozen=True)
class VocabFacts:
    """A draft vocabulary on the supervised tokens of the sampled documents."""

    draft_size: int
    tokens: int
    coverage: float


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of a document, all supervised or none."""

    supervised: bool
    tokens: int
    text: str


@dataclass(frozen=True)
class Shown:
    """A document to read."""

    name: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Audit:
    """All of it."""

    directory: DirectoryFacts
    contents: ContentFacts
    packing: tuple[PackingFacts, ...]
    reading: ReadFacts
    states: StateFacts
    agreement: AgreementFacts | None
    """None: no verifier was given."""
    vocab: VocabFacts | None
    """None: no draft vocabulary was given."""
    shown: tuple[Shown, ...]
    findings: tuple[Finding, ...] = ()

    @property
    def stops(self) -> tuple[Finding, ...]:
        """Findings that training should not start with."""
        return tuple(f for f in self.findings if f.severity is Severity.stop)

    def with_findings(self, findings: tuple[Finding, ...]) -> Audit:
        """The same facts, judged."""
        return replace(self, findings=findings)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"json_version": JSON_VERSION, **asdict(self)}
