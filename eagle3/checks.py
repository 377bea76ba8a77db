"""Checks across the fields of a composed :class:`eagle3.config.Config`; no files are read."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from eagle3.config import RESUME_AUTO, Config, OptimConfig
from eagle3.errors import ConfigError
from eagle3.names import STOP_METRICS, Arrival, CaptureSource, Compile, OptimizerName
from eagle3.ops.distillation import LOSSES
from eagle3.strategy_check import needs_whole_weights

_HOW_TO_SET = {
    "verifier": "paths.verifier=/directory/with/config.json and *.safetensors",
    "shards": "paths.shards=/directory/with/data_*.pt",
    "val_shards": "paths.val_shards=/directory/with/data_*.pt",
    "arrow": "paths.arrow=/directory/that/datasets/saved",
    "source_labels": "paths.source_labels=/file.csv with sample_id,source",
    "vocab_map": "paths.vocab_map=/file/or/directory/with/d2t and t2d",
    "init": "paths.init=/file.ckpt, or the directory or file of a head",
}


def check(config: Config) -> None:
    """Refuse a configuration that cannot run, before anything is read or built.

    Raises:
        ConfigError: one line per problem, each with the key, what was found and what is allowed.
    """
    problems = [problem for find in _CHECKS for problem in find(config)]
    if problems:
        raise ConfigError("\n       ".join(problems))


def check_paths(config: Config) -> None:
    """Refuse directories that are not there, before a run folder is made for them.

    Raises:
        ConfigError: one line per missing path.
    """
    wanted = ["val_shards", "vocab_map", "init", "arrow", "source_labels"]
    if config.capture.source is CaptureSource.off:
        wanted += ["verifier"]
        if config.data.arrival is Arrival.complete:  # otherwise the capture may make it later
            wanted += ["shards"]
    missing = [
        f"paths.{name}={path} does not exist: give {_HOW_TO_SET[name]}"
        for name in wanted
        if (path := getattr(config.paths, name)) is not None and not Path(path).exists()
    ]
    missing += [
        f"data.mixture: {part.path} does not exist: give directories of captured states"
        for part in config.data.mixture
        if not Path(part.path).exists()
    ]
    if config.resume not in (None, RESUME_AUTO) and not Path(config.resume).is_file():
        missing.append(f"resume={config.resume} is not a file: give a checkpoint of a run, or auto")
    if missing:
        raise ConfigError("\n       ".join(missing))


def device_count(devices: object) -> int:
    """Processes that ``trainer.devices`` asks for: the count itself, or one per listed card.

    Raises:
        ConfigError: neither a count >= 1 nor a list of distinct card numbers.
    """
    if isinstance(devices, int) and not isinstance(devices, bool) and devices >= 1:
        return devices
    if (
        isinstance(devices, list)
        and devices
        and all(isinstance(card, int) and card >= 0 for card in devices)
        and len(set(devices)) == len(devices)
    ):
        return len(devices)
    raise ConfigError(
        f"trainer.devices={devices!r}: expected a count >= 1 or a list of distinct card numbers, "
        "such as trainer.devices=4 or 'trainer.devices=[4,5,6,7]'"
    )


def accumulate(config: Config, world_size: int) -> int:
    """Packs per rank in one optimizer step, so that all ranks together reach ``tokens_per_step``.

    Raises:
        ConfigError: ``tokens_per_step`` is no multiple of ``world_size * max_seq_len`` rows.
    """
    wanted, unit = config.tokens_per_step, world_size * config.max_seq_len
    if wanted is None:
        return 1
    if wanted < unit or wanted % unit:
        below = max(1, wanted // unit) * unit
        raise ConfigError(
            f"tokens_per_step={wanted} cannot be reached: with {world_size} rank(s) and "
            f"max_seq_len={config.max_seq_len} it comes in multiples of {unit}; "
            f"the nearest are {below} and {below + unit}"
        )
    return wanted // unit


def _paths(config: Config) -> Iterator[str]:
    if config.capture.source != CaptureSource.off:
        return  # the capture provides the verifier, the shards and the vocabulary map
    needed = ["verifier"] if config.data.mixture else ["verifier", "shards"]
    if config.model.draft_vocab_size < config.model.vocab_size and config.paths.init is None:
        needed.append("vocab_map")
    for name in needed:
        if getattr(config.paths, name) is None:
            yield f"paths.{name} is not set: give {_HOW_TO_SET[name]}"


def _mixture(config: Config) -> Iterator[str]:
    parts = config.data.mixture
    if not parts:
        return
    if config.paths.shards is not None:
        yield "paths.shards and data.mixture are both set: give one of them"
    if config.capture.source != CaptureSource.off:
        yield "data.mixture and capture.source are both set: a capture fills one directory"
    for part in parts:
        if not part.path or not 0 < part.weight < math.inf:
            yield (
                f"data.mixture: path={part.path!r}, weight={part.weight}: expected a directory and "
                "a weight > 0, such as data.mixture=[{path: /data/a, weight: 1.0}]"
            )


def _growing(config: Config) -> Iterator[str]:
    """What is not known before the last document has arrived cannot be asked for."""
    data, paths = config.data, config.paths
    if data.arrival is not Arrival.growing:
        return
    capture = None if config.capture.source is CaptureSource.off else config.capture.source
    same = paths.val_shards is not None and paths.val_shards == paths.shards
    apart = "another directory than paths.shards, its documents are not trained"
    for key, value, fits, expected in (
        (
            "trainer.max_steps",
            config.trainer.max_steps,
            config.trainer.max_steps is not None,
            "the optimizer steps that the learning rate is planned for",
        ),
        ("paths.val_shards", paths.val_shards, paths.val_shards is not None, "a directory"),
        ("paths.val_shards", paths.val_shards, not same, apart),
        ("data.mixture", data.mixture or None, not data.mixture, "paths.shards alone"),
        ("data.max_samples", data.max_samples, data.max_samples is None, "null"),
        ("resume", config.resume, config.resume is None, "null: there is no plan to continue"),
        ("capture.source", capture, capture is None, "off: another process captures"),
    ):
        if not fits:
            found = "null" if value is None else value
            yield f"data.arrival=growing: found {key}={found}, expected {expected}"


def _name(config: Config) -> Iterator[str]:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", config.name):
        yield f"name={config.name!r}: it names a folder, give letters, digits, '.', '_' and '-'"


def _ranges(config: Config) -> Iterator[str]:
    c, data, optim, val = config, config.data, config.optim, config.val
    decay, rope = config.loss.step_loss_decay, config.model.rope
    health, pull = config.health, optim.pull_to_start
    for key, value, allowed, fits in (
        ("lr", c.lr, "> 0 and finite", 0 < c.lr < math.inf),
        ("epochs", c.epochs, ">= 1", c.epochs >= 1),
        ("max_seq_len", c.max_seq_len, ">= 2", c.max_seq_len >= 2),
        ("ttt_steps", c.ttt_steps, ">= 1", c.ttt_steps >= 1),
        ("noise_std", c.noise_std, ">= 0 and finite", 0 <= c.noise_std < math.inf),
        ("seed", c.seed, "from 0 to 4294967295", 0 <= c.seed < 2**32),
        ("data.val_ratio", data.val_ratio, "in [0, 1)", 0 <= data.val_ratio < 1),
        ("data.max_bad_samples", data.max_bad_samples, ">= 0", data.max_bad_samples >= 0),
        ("data.arrival_timeout_s", data.arrival_timeout_s, "> 0", data.arrival_timeout_s > 0),
        ("data.num_workers", data.num_workers, ">= 1", data.num_workers >= 1),
        ("data.prefetch_windows", data.prefetch_windows, ">= 1", data.prefetch_windows >= 1),
        ("data.max_samples", data.max_samples, ">= 1 or null", _at_least_one(data.max_samples)),
        ("loss.step_loss_decay", decay, "> 0 and finite", 0 < decay < math.inf),
        ("model.rope.theta", rope.theta, "> 0 and finite", 0 < rope.theta < math.inf),
        ("model.rope.factor", rope.factor, "> 0 and finite", 0 < rope.factor < math.inf),
        ("optim.warmup_ratio", optim.warmup_ratio, "in [0, 1)", 0 <= optim.warmup_ratio < 1),
        ("optim.min_lr_ratio", optim.min_lr_ratio, "in [0, 1]", 0 <= optim.min_lr_ratio <= 1),
        ("optim.weight_decay", optim.weight_decay, ">= 0", optim.weight_decay >= 0),
        ("optim.beta1", optim.beta1, "in [0, 1)", 0 <= optim.beta1 < 1),
        ("optim.beta2", optim.beta2, "in [0, 1)", 0 <= optim.beta2 < 1),
        ("optim.eps", optim.eps, "> 0", optim.eps > 0),
        ("optim.muon_momentum", optim.muon_momentum, "in [0, 1)", 0 <= optim.muon_momentum < 1),
        ("optim.muon_ns_steps", optim.muon_ns_steps, "in [1, 99]", 1 <= optim.muon_ns_steps < 100),
        ("optim.clip_norm", optim.clip_norm, "> 0", optim.clip_norm > 0),
        ("val.draft_steps", val.draft_steps, ">= 1", val.draft_steps >= 1),
        ("val.max_seq_len", val.max_seq_len, ">= 2", val.max_seq_len >= 2),
        ("val.every_steps", val.every_steps, ">= 1 or null", _at_least_one(val.every_steps)),
        ("val.patience", val.patience, ">= 1", val.patience >= 1),
        ("optim.pull_to_start", optim.pull_to_start, ">= 0 and finite", 0 <= pull < math.inf),
        ("health.stall_minutes", health.stall_minutes, "> 0", health.stall_minutes > 0),
        ("health.grad_norm_factor", health.grad_norm_factor, "> 1", health.grad_norm_factor > 1),
        ("health.heartbeat_s", health.heartbeat_s, "> 0", health.heartbeat_s > 0),
    ):
        if not fits:
            yield f"{key}={value}: expected a value {allowed}"


def _at_least_one(value: int | None) -> bool:
    return value is None or value >= 1


def _split(config: Config) -> Iterator[str]:
    # a segment spends rows on context before and on look-ahead after the rows it trains
    context = config.data.split_context_tokens
    for steps_key, steps, rows_key, rows in (
        ("ttt_steps", config.ttt_steps, "max_seq_len", config.max_seq_len),
        ("val.draft_steps", config.val.draft_steps, "val.max_seq_len", config.val.max_seq_len),
    ):
        if context < 0 or context + steps - 1 >= rows:
            yield (
                f"data.split_context_tokens={context}: expected >= 0 and, with the look-ahead of "
                f"{steps_key}={steps}, below {rows_key}={rows}"
            )


def _model(config: Config) -> Iterator[str]:
    model = config.model
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    for key in (
        "hidden_size",
        "vocab_size",
        "draft_vocab_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "num_aux_layers",
        "max_position_embeddings",
    ):
        if getattr(model, key) < 1:
            yield f"model.{key}={getattr(model, key)}: expected a value >= 1"
    if kv_heads >= 1 and heads % kv_heads:
        yield (
            f"model.num_attention_heads={heads}: expected a multiple of "
            f"model.num_key_value_heads={kv_heads}, every key head serves as many query heads"
        )
    if model.head_dim % 2:
        yield f"model.head_dim={model.head_dim}: expected an even number (rotary pairs)"
    if model.draft_vocab_size > model.vocab_size:
        yield (
            f"model.draft_vocab_size={model.draft_vocab_size} is larger than "
            f"model.vocab_size={model.vocab_size}: give at most the verifier's vocabulary"
        )
    for key, steps in (
        ("ttt_steps", config.ttt_steps),
        ("val.draft_steps", config.val.draft_steps),
    ):
        if model.sliding_window is not None and model.sliding_window <= steps:
            yield (
                f"model.sliding_window={model.sliding_window}: expected more than {key}={steps}, "
                "or a chain loses sight of its own start"
            )


def _loss(config: Config) -> Iterator[str]:
    if not config.loss.mix:
        yield "loss.mix is empty: give at least one term, such as [{name: kl, weight: 1.0}]"
    for term in config.loss.mix:
        if term.name not in LOSSES:
            yield f"loss.mix: unknown loss {term.name!r}; expected one of {', '.join(LOSSES)}"
        if not term.weight > 0:
            yield f"loss.mix: weight {term.weight} of {term.name}: expected a value > 0"


def _optimizer(config: Config) -> Iterator[str]:
    if config.optim.optimizer is OptimizerName.muon:
        return  # with AdamW's options for the weights that are left to AdamW
    for name in ("muon_momentum", "muon_ns_steps"):
        value = getattr(config.optim, name)
        if value != getattr(OptimConfig, name):
            yield (
                f"optim.{name}={value} does nothing with optim.optimizer="
                f"{config.optim.optimizer}: give optim.optimizer=muon, or leave it out"
            )


def _compile(config: Config) -> Iterator[str]:
    if config.compute.compile is Compile.none:
        return
    from torch._inductor.config import cpp  # what the compiler itself will call

    names = [name for name in cpp.cxx if name]
    if not any(shutil.which(name) for name in names):
        yield (
            f"compute.compile={config.compute.compile} needs a C++ compiler, and "
            f"{' or '.join(names)} is not on PATH: install it (apt-get install g++), name another "
            "in the environment variable CXX, or give compute.compile=none"
        )


def _aux_layers(config: Config) -> Iterator[str]:
    for key, ids in (
        ("data.aux_layer_ids", config.data.aux_layer_ids),
        ("capture.aux_layer_ids", config.capture.aux_layer_ids),
    ):
        unused = ids is None or (
            key.startswith("capture") and config.capture.source == CaptureSource.off
        )
        if unused:
            continue
        assert ids is not None
        if len(ids) != config.model.num_aux_layers or len(set(ids)) != len(ids):
            yield (
                f"{key}={list(ids)}: expected model.num_aux_layers="
                f"{config.model.num_aux_layers} distinct layer ids"
            )


def _trainer(config: Config) -> Iterator[str]:
    trainer = config.trainer
    try:
        accumulate(config, device_count(trainer.devices))
    except ConfigError as error:
        yield str(error)
    if not _at_least_one(trainer.max_steps):
        yield f"trainer.max_steps={trainer.max_steps}: expected a value >= 1 or null"
    if not _at_least_one(trainer.checkpoint_every_steps):
        every = trainer.checkpoint_every_steps
        yield f"trainer.checkpoint_every_steps={every}: expected a value >= 1 or null"
    minutes = trainer.checkpoint_every_minutes
    if minutes is not None and not minutes > 0:
        yield f"trainer.checkpoint_every_minutes={minutes}: expected minutes > 0 or null"
    if trainer.keep_last < 1:
        yield f"trainer.keep_last={trainer.keep_last}: expected a value >= 1"
    if trainer.log_every_steps < 1:
        yield f"trainer.log_every_steps={trainer.log_every_steps}: expected a value >= 1"
    if not trainer.all_reduce_timeout_s > 0:
        yield f"trainer.all_reduce_timeout_s={trainer.all_reduce_timeout_s}: expected seconds > 0"


def _pull(config: Config) -> Iterator[str]:
    if config.optim.pull_to_start > 0 and config.paths.init is None:
        yield (
            f"optim.pull_to_start={config.optim.pull_to_start} and paths.init is not set: give "
            f"{_HOW_TO_SET['init']} to be pulled to, also when the run goes on, or 0"
        )


def _rehearsal(config: Config) -> Iterator[str]:
    for key in ("width_divisor", "samples", "epochs", "checkpoint_every_steps"):
        if getattr(config.rehearsal, key) < 1:
            found = getattr(config.rehearsal, key)
            yield f"rehearsal.{key}={found}: expected a value >= 1"


def _early_stop(config: Config) -> Iterator[str]:
    metric = config.val.early_stop
    if metric is not None and metric not in STOP_METRICS:
        yield f"val.early_stop={metric}: expected null or one of {', '.join(STOP_METRICS)}"


_CHECKS: tuple[Callable[[Config], Iterator[str]], ...] = (
    _paths,
    _mixture,
    _growing,
    _name,
    _ranges,
    _split,
    _model,
    _loss,
    _optimizer,
    _compile,
    _aux_layers,
    _trainer,
    needs_whole_weights,
    _pull,
    _early_stop,
    _rehearsal,
)
