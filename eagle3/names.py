"""Choices by name: every option that would otherwise be a boolean or a bare string."""

from enum import StrEnum


class LayerIdConvention(StrEnum):
    """What an aux layer id counts: the state entering layer k, or the output of layer k."""

    entering = "entering"
    after = "after"


class LastHidden(StrEnum):
    """Whether the stored last state is taken before or after the verifier's final norm."""

    pre_norm = "pre_norm"
    post_norm = "post_norm"


class LongDocuments(StrEnum):
    """What happens to a document longer than ``max_seq_len`` rows."""

    split = "split"  # type: ignore[assignment]  # hides str.split, which nobody calls on it
    truncate = "truncate"
    drop = "drop"


class Arrival(StrEnum):
    """Whether all training documents are there at the start, or a capture still writes them."""

    complete = "complete"
    growing = "growing"


class DataChange(StrEnum):
    """What continuing a run does when the documents are not those it began with."""

    refuse = "refuse"
    accept = "accept"


class ReadMode(StrEnum):
    """How states leave the disk, see :mod:`eagle3.data.byte_reader`."""

    auto = "auto"
    buffered = "buffered"
    direct = "direct"


class TrainOn(StrEnum):
    """Which tokens gate a loss: as captured, only the last answer of a document, or all."""

    assistant = "assistant"
    last_turn = "last_turn"
    all = "all"


class Noise(StrEnum):
    """Shape of the noise added to aux states in training."""

    gaussian = "gaussian"
    uniform = "uniform"


class Arch(StrEnum):
    """Type of the drafter's decoder layer; ``qwen3`` adds RMSNorm on queries and keys."""

    llama = "llama"
    qwen3 = "qwen3"


class NormPreset(StrEnum):
    """Named norm layouts, see :class:`eagle3.model.layers.NormLayout`."""

    portable = "portable"
    eagle3_1 = "eagle3_1"
    speculators = "speculators"


class LmHeadInit(StrEnum):
    """Where the draft ``lm_head`` starts: the verifier's rows, or random."""

    verifier = "verifier"
    random = "random"


class BodyInit(StrEnum):
    """Where ``fc`` and the final norm start.

    ``logit_lens``: ``fc`` passes the highest aux state through, beside small random weights, and
    the final norm is the verifier's, so that with the verifier's head rows the untrained drafter
    reads that state as a logit lens does.
    """

    logit_lens = "logit_lens"
    random = "random"


class ComputedRows(StrEnum):
    """Rows that the layer computes: all, or only those that some loss reads."""

    all = "all"
    read = "read"


class EmbeddingHalf(StrEnum):
    """When the embedding half of queries, keys and values is multiplied."""

    each_step = "each_step"
    once = "once"


class AttentionImpl(StrEnum):
    """Implementation of the TTT attention, see :mod:`eagle3.ops.ttt_attention`."""

    reference = "reference"
    sdpa = "sdpa"
    merged = "merged"


class LossImpl(StrEnum):
    """Implementation of the loss over the chain, see :mod:`eagle3.ops.distillation.chain`."""

    reference = "reference"
    deferred = "deferred"


class Recompute(StrEnum):
    """Activations that are made again in the backward pass instead of kept."""

    none = "none"
    mlp = "mlp"


class Compile(StrEnum):
    """What goes through ``torch.compile`` in training, see :mod:`eagle3.compilation`."""

    none = "none"
    layer = "layer"


class RopeType(StrEnum):
    """Rotary embedding variants, named as in Hugging Face ``rope_parameters.rope_type``."""

    default = "default"
    linear = "linear"
    llama3 = "llama3"
    yarn = "yarn"


class OptimizerName(StrEnum):
    """AdamW on everything, or Muon on the matrices of ``fc`` and the layer beside it."""

    adamw = "adamw"
    muon = "muon"


class Schedule(StrEnum):
    """Learning-rate shape after warmup."""

    cosine = "cosine"
    linear = "linear"
    constant = "constant"


class Accelerator(StrEnum):
    """Device kind; ``auto`` takes CUDA when there is a card."""

    auto = "auto"
    cpu = "cpu"
    gpu = "gpu"


class RankStart(StrEnum):
    """``auto``: by this program, or by torchrun; ``srun``: each rank is a task of srun."""

    auto = "auto"
    srun = "srun"


class StrategyName(StrEnum):
    """How several ranks share the work: ``ddp`` keeps all weights on every rank, ``fsdp2`` shares
    out weights, gradients and optimizer states. One rank alone has nothing to share."""

    ddp = "ddp"
    fsdp2 = "fsdp2"


class Precision(StrEnum):
    """``auto``: bfloat16 autocast on CUDA, plain float32 on CPU (where it measured faster)."""

    auto = "auto"
    float32 = "float32"
    bf16_mixed = "bf16_mixed"


class WandbMode(StrEnum):
    """``auto``: online when an API key is at hand, else offline."""

    auto = "auto"
    online = "online"
    offline = "offline"
    disabled = "disabled"


STOP_METRICS = {
    "val/acceptance_replay": 1,
    "val/acceptance_pooled": 1,
    "val/accuracy": 1,
    "val/loss": -1,
}
"""Values of ``val.early_stop``; 1 where more is better, -1 where less is."""


class CaptureSource(StrEnum):
    """Where missing shards come from; ``off`` makes missing shards an error."""

    off = "off"
    smollm2_tokens = "smollm2_tokens"


class CaptureMode(StrEnum):
    """What ``python -m eagle3.capture`` does: ``forecast`` only counts, ``merge`` joins the
    directories of several machines, ``verify`` captures some samples again and compares."""

    capture = "capture"
    forecast = "forecast"
    merge = "merge"
    verify = "verify"


class CaptureFormat(StrEnum):
    """Native shards, or one ``.pt`` file a document, on which training can start at once."""

    native = "native"
    v1 = "v1"


class StatesDtype(StrEnum):
    """In which a verifier computes, and in which its states are stored."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class Regenerate(StrEnum):
    """Which answers the verifier writes: none, those that a prompt waits for, the last one of
    every conversation, or all."""

    off = "off"
    missing = "missing"
    last = "last"
    all = "all"


class ServerForm(StrEnum):
    """How a running server hands out states, see :mod:`eagle3.verifier.states`."""

    sglang_aux = "sglang_aux"
    sglang_last = "sglang_last"
    sglang_spec_capture = "sglang_spec_capture"
    vllm_connector = "vllm_connector"


class RehearsalPlace(StrEnum):
    """Where a run is rehearsed; ``off``: it is no rehearsal."""

    off = "off"
    cpu = "cpu"


class Switch(StrEnum):
    """Whether something optional is done."""

    on = "on"
    off = "off"


class CardName(StrEnum):
    """Cards that can be planned for without being there."""

    rtx_pro_6000 = "rtx_pro_6000"
    h100 = "h100"
    h200 = "h200"
    b200 = "b200"


class ExportTarget(StrEnum):
    """Who is to load an export; ``both``: SGLang and vLLM, ``speculators``: vLLM, in that form."""

    both = "both"
    sglang = "sglang"
    vllm = "vllm"
    speculators = "speculators"


class ExportEmbeddings(StrEnum):
    """Whether the verifier's embedding is copied into an export; engines share it anyway."""

    omit = "omit"
    verifier = "verifier"


class ExportDtype(StrEnum):
    """Of exported weights."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class DecodingPart(StrEnum):
    """What speculative decoding spends its time on; ``prefill``: the prompt, through both."""

    prefill = "prefill"
    verifier = "verifier"
    drafter = "drafter"
    choice = "choice"
