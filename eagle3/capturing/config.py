"""The configuration of ``python -m eagle3.capture``."""

from __future__ import annotations

from dataclasses import dataclass, field

from eagle3.names import CaptureFormat, CaptureMode, Regenerate, ServerForm, StatesDtype, TrainOn


@dataclass(frozen=True)
class AnswersConfig:
    """Answers by the verifier in place of those in the file."""

    regenerate: Regenerate = Regenerate.missing
    max_new_tokens: int = 1024
    """Of one answer; a longer one is cut, and has no end-of-sequence token."""
    temperature: float | None = None
    """0: greedy; null: this and the next two as the verifier's generation_config.json says."""
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0
    batch_tokens: int = 8192
    """Of one batch: answers times the longest prompt with its answer."""


@dataclass(frozen=True)
class ServerConfig:
    """A running server that computes the states."""

    url: str | None = None
    """Null: the model runs in this process."""
    form: ServerForm | None = None
    last_url: str | None = None
    """With ``sglang_aux``: a second server, which gives the last state."""
    shared: str | None = None
    """With ``vllm_connector``: the directory into which the server writes, as seen here."""
    shared_as: str | None = None
    """The same directory as the server calls it; null: by the same name."""
    in_flight: int = 16
    """Documents that are asked for at a time."""
    attempts: int = 4
    """Tries for one document."""
    timeout_s: float = 600.0
    """Of one request."""
    patience_s: float = 1800.0
    """For a server that is down to come back."""


@dataclass(frozen=True)
class CaptureRunConfig:
    """What is captured, from what, and where to."""

    mode: CaptureMode = CaptureMode.capture
    verifier: str | None = None
    """Hugging Face directory; a server must run the same model."""
    prompts: str | None = None
    """Prompts or conversations, one a line; see :mod:`eagle3.conversations.reading`."""
    tokens: str | None = None
    """Instead of ``prompts``: token ids, see :mod:`eagle3.tokens`."""
    out: str | None = None
    """New directory, or one in which the same capture was interrupted."""
    format: CaptureFormat = CaptureFormat.native
    aux_layer_ids: list[int] = field(default_factory=list)
    """Ascending; id k is the state entering layer k. Empty: [2, n // 2, n - 3] of n layers."""
    dtype: StatesDtype = StatesDtype.float32
    """Of the computation in this process; of a server, what it was started with."""
    stored_dtype: StatesDtype = StatesDtype.bfloat16
    """Of the states on disk."""
    device: str = "auto"
    """``auto``: a GPU where there is one."""
    batch_tokens: int | None = None
    """Tokens of one prefill, padding included; null: 1024 on CPU, 8192 on a GPU."""
    max_length: int | None = None
    """Longer documents are left out and listed; null: no limit."""
    train_on: TrainOn = TrainOn.assistant
    """Which tokens the stored mask supervises."""
    num_samples: int | None = None
    """Use so many of the documents, spread over the file; null: all."""
    seed: int = 0
    """Of that choice, and of the samples that ``mode=verify`` looks at."""
    part: int = 0
    """This process captures part ``part`` of ``parts``, counted from 0, into its own ``out``."""
    parts: int = 1
    merge: list[str] = field(default_factory=list)
    """With ``mode=merge``: the directories of all parts."""
    shard_gb: float = 2.0
    """Size of a native shard, in GB."""
    writers: int = 2
    """Threads that write."""
    max_failed: int = 0
    """Documents that may fail and be left out; one more stops the capture."""
    verify_samples: int = 8
    """Samples that ``mode=verify`` captures again."""
    answers: AnswersConfig = field(default_factory=AnswersConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
