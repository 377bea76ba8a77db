"""Hydra -> one frozen :class:`eagle3.config.Config`, and the frame around every entry point.

``conf/`` is plain YAML. Its first default is ``schema``: the schema's own defaults as a plain
tree, so every key can be overridden from the command line and no default is written twice. After
composition the tree is merged onto the typed schema, where an unknown key or a wrong type is an
error with the nearest valid key, and frozen.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import hydra
import yaml  # type: ignore[import-untyped]
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from eagle3.config import Config
from eagle3.config_tree import dotted_keys, nearest, thaw
from eagle3.errors import ConfigError, UserError
from eagle3.launch import end_with_launcher
from eagle3.pool.job import OPTION, PoolJob
from eagle3.run_folder import append_failed_job, read_failed_jobs
from eagle3.sweep_options import OPTIONS
from eagle3.terminal import JobFailedError, print_lines_at_once, report_error

_INTERRUPTED = 128 + signal.SIGINT
C = TypeVar("C")


@dataclass(frozen=True)
class Command(Generic[C]):
    """An entry point: ``python -m eagle3.NAME``, configured by ``conf/NAME.yaml``."""

    name: str
    schema: type[C]
    """Frozen dataclass of every key; the first default of ``conf/NAME.yaml`` is its tree."""

    @property
    def schema_name(self) -> str:
        return "schema" if self.schema is Config else f"{self.name}_schema"

    @property
    def source(self) -> str:
        """File that says type, unit and meaning of every key."""
        return f"{self.schema.__module__.replace('.', '/')}.py"


TRAIN = Command("train", Config)


@dataclass(frozen=True)
class Job:
    """How Hydra started this job."""

    sweep_dir: Path | None = None
    """Folder of the sweep this job belongs to; null: a single run."""
    experiment: str | None = None
    """Chosen option of ``conf/experiment``."""
    overrides: tuple[str, ...] = ()
    """As given on the command line."""
    number: int = 0
    """Place in the sweep, from 0."""

    @property
    def overridden(self) -> tuple[str, ...]:
        """Dotted keys that the command line sets."""
        return tuple(override.lstrip("+~").partition("=")[0] for override in self.overrides)


class NoteSweep(Callback):
    """Keeps the folder of the sweep that this process runs, whichever launcher runs its jobs."""

    folders: ClassVar[list[Path]] = []

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Hydra calls this before the first job."""
        self.folders.append(Path(config.hydra.sweep.dir).resolve())


def conf_dir() -> Path:
    """The YAML tree: inside an installed package, or beside the package in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


def register_schema(command: Command[C] = TRAIN) -> None:  # type: ignore[assignment]
    """Give Hydra the schema's defaults as the plain config that ``conf/NAME.yaml`` begins with."""
    defaults = OmegaConf.to_container(OmegaConf.structured(command.schema), enum_to_str=True)
    assert isinstance(defaults, dict)
    callback = {"_target_": f"{__name__}.{NoteSweep.__name__}"}
    defaults["hydra"] = {"callbacks": {"note_sweep": callback}}
    store = ConfigStore.instance()
    store.store(name=command.schema_name, node=defaults, provider="eagle3")
    Plugins.instance()  # imports the plugins, so that none of them stores its option after ours
    for (group, name), option in OPTIONS.items():
        store.store(name=name, group=group, node=option, provider="eagle3")


def to_config(composed: DictConfig) -> Config:
    """:func:`to_schema` for the configuration of a training run."""
    return to_schema(composed, TRAIN)


def to_schema(composed: DictConfig, command: Command[C]) -> C:
    """Check a composed tree against the schema and freeze it.

    Raises:
        ConfigError: an unknown key, a wrong type, or an interpolation that does not resolve.
    """
    schema = OmegaConf.structured(command.schema)
    valid = set(dotted_keys(schema))
    for key in dotted_keys(composed):
        if key not in valid:
            raise _unknown_key(key, command)
    thaw(schema)
    try:
        config = OmegaConf.to_object(OmegaConf.merge(schema, composed))
    except (ConfigKeyError, ConfigAttributeError) as error:
        raise _unknown_key(str(error.full_key), command) from error
    except OmegaConfBaseException as error:
        raise ConfigError(_wrong_value(error, command)) from error
    assert isinstance(config, command.schema)
    return config


def compose_config(overrides: Sequence[str] = ()) -> Config:
    """What the command line composes from ``overrides``, for notebooks, scripts and tests."""
    register_schema()
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return to_config(hydra.compose(TRAIN.name, list(overrides)))


def load_config(path: Path) -> Config:
    """Read the resolved ``config.yaml`` of a run folder through the schema."""
    if not path.is_file():
        raise ConfigError(
            f"no {path.name} in {path.parent}: give a run folder made by eagle3.train"
        )
    loaded = OmegaConf.load(path)
    assert isinstance(loaded, DictConfig)
    return to_config(loaded)


def save_config(config: Config, path: Path) -> None:
    """Write the resolved configuration as YAML that :func:`load_config` reads back."""
    OmegaConf.save(OmegaConf.structured(config), path)


def entry_point(
    job: Callable[[C, Job], float | None],
    after_sweep: Callable[[Path], None] | None = None,
    command: Command[C] = TRAIN,  # type: ignore[assignment]
) -> int:
    """Compose the configuration from the command line and run ``job`` on it, once per sweep job.

    A :class:`UserError` is printed as one message without traceback (exit code 2), any other
    exception with its traceback (exit code 1). In a sweep the jobs after a failed one still run,
    and the exit code is that of the first that failed.

    Args:
        after_sweep: called with the sweep's folder when its last job has ended, failed or not; not
            when a signal ended the sweep. Its own errors are printed and change no exit code.
        command: whose configuration this is; also other commands may take that of training.

    Returns:
        The exit code for ``sys.exit``.
    """
    print_lines_at_once()
    if sys.argv[1:2] == [OPTION]:
        return _run_pool_job(job, Path(sys.argv[2]), command)
    register_schema(command)
    main = hydra.main(config_path=str(conf_dir()), config_name=command.name, version_base="1.3")
    logging.getLogger("alembic").setLevel(logging.WARNING)  # lists its plugins under Optuna
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands its errors over instead of printing them
    sys.argv[1:] = _options_first(sys.argv[1:])
    began = time.time()

    def run(composed: DictConfig) -> float | None:
        return _run_job(job, composed, command, _this_job())

    NoteSweep.folders.clear()
    code = _exit_code(main(run), command)
    for sweep_dir in NoteSweep.folders:
        if after_sweep is not None:
            _report_sweep(after_sweep, sweep_dir)
        # a sweeper that goes on after failures does not tell of them
        failed = [f["code"] for f in read_failed_jobs(sweep_dir) if f["time"] >= began]
        code = code or next(iter(failed), 0)
    return code


def _this_job() -> Job:
    choices = HydraConfig.get()
    multirun = choices.mode == RunMode.MULTIRUN
    return Job(
        Path(choices.sweep.dir).resolve() if multirun else None,
        choices.runtime.choices.get("experiment"),
        tuple(str(override) for override in choices.overrides.task),
        choices.job.num if multirun else 0,
    )


def _run_pool_job(job: Callable[[C, Job], float | None], path: Path, command: Command[C]) -> int:
    """One job that ``hydra/launcher=gpu_pool`` has composed; returns the exit code."""
    end_with_launcher()
    given = PoolJob.read(path)
    how = Job(given.sweep_dir, given.experiment, given.overrides, given.number)
    try:
        given.keep_value(_run_job(job, OmegaConf.create(given.config), command, how))
    except JobFailedError as error:
        return error.code
    return 0


def _exit_code(main: Callable[[], None], command: Command[C]) -> int:
    """Run what Hydra has wrapped, and print the error that comes out."""
    try:
        _refuse_sweep_inside_ranks()
        main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        NoteSweep.folders.clear()
        return _INTERRUPTED
    except JobFailedError as error:
        return error.code
    except UserError as error:
        return _refused(error)
    except RuntimeError as error:
        if "Unknown plugin class" not in str(error):
            raise
        return _refused(ConfigError(f"{error}: pip install 'eagle3[sweeps]' brings it"))
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        # the job's own errors never come out here, so these are about the composition
        return _refused(ConfigError(_composition_message(error, command)))
    return 0


def _refused(error: UserError) -> int:
    """For a sweep that is wrong as a whole: it had no job that could be reported."""
    NoteSweep.folders.clear()
    return report_error(error)


def _report_sweep(after_sweep: Callable[[Path], None], sweep_dir: Path) -> None:
    try:
        after_sweep(sweep_dir)
    except Exception as error:  # the jobs have done their work, whatever their summary comes to
        report_error(error)


def _options_first(arguments: list[str]) -> list[str]:
    """Hydra's parser refuses overrides on both sides of an option such as ``-m``."""
    overrides = [a for a in arguments if "=" in a and not a.startswith("-")]
    return [a for a in arguments if a not in overrides] + overrides


def _run_job(
    job: Callable[[C, Job], float | None], composed: DictConfig, command: Command[C], how: Job
) -> float | None:
    config: C | None = None
    try:
        config = to_schema(composed, command)
        return job(config, how)
    except SystemExit as stop:
        # Lightning answers SIGTERM with a SystemExit that has no code, which would mean success
        raise SystemExit(128 + signal.SIGTERM if stop.code is None else stop.code) from None
    except Exception as error:
        code = report_error(error)
        if how.sweep_dir is None:
            raise SystemExit(code) from None
        _record_failure(how.sweep_dir, how, error, code, config)
        # Hydra collects exceptions of a sweep's jobs and goes on; SystemExit ends a single run
        raise JobFailedError(code) from None


def _record_failure(
    sweep_dir: Path, how: Job, error: Exception, code: int, config: object | None
) -> None:
    resolved = None
    if config is not None:
        resolved = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    assert resolved is None or isinstance(resolved, dict)
    with contextlib.suppress(OSError):  # a full disk, which may be the very error
        append_failed_job(
            sweep_dir,
            number=how.number,
            error=error,
            overrides=how.overrides,
            config=resolved,
            code=code,
        )


def _refuse_sweep_inside_ranks() -> None:
    if "RANK" in os.environ and {"-m", "--multirun"} & set(sys.argv[1:]):
        raise ConfigError(
            "--multirun was started by torchrun: every rank would run the whole sweep. "
            "Start it without torchrun; trainer.devices=N makes the ranks of each job"
        )


def _groups() -> list[str]:
    return sorted(entry.name for entry in conf_dir().iterdir() if entry.is_dir())


def _unknown_key(key: str, command: Command[C]) -> ConfigError:
    valid = list(dotted_keys(OmegaConf.structured(command.schema)))
    if command.schema is Config:
        valid += ["name", "path", "weight", *_groups()]
    return ConfigError(
        f"unknown key '{key}'; the nearest valid key is '{nearest(key, valid)}'. "
        f"All keys: python -m eagle3.{command.name} --cfg job"
    )


def _wrong_value(error: OmegaConfBaseException, command: Command[C]) -> str:
    key = f"{error.full_key}: " if error.full_key else ""
    return f"{key}{str(error).splitlines()[0]}. Types and units of all keys: {command.source}"


def _composition_message(error: Exception, command: Command[C]) -> str:
    """What went wrong before the job began, in one or two lines."""
    if isinstance(error, MissingConfigException) and "hydra/sweeper/" in str(error):
        return f"{str(error).splitlines()[0]}: pip install 'eagle3[sweeps]' brings it"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, option = error.missing_cfg_file.rpartition("/")
        options = [str(name) for name in error.options]
        return (
            f"{group}={option} does not exist; the nearest is {group}={nearest(option, options)}. "
            f"Options of {group}: {', '.join(options)}"
        )
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (ConfigKeyError, ConfigAttributeError)) and cause.full_key:
            return str(_unknown_key(str(cause.full_key), command))
        cause = cause.__cause__
    if isinstance(error, OverrideParseException):
        return (
            f"cannot read the override '{error.override}': write key=value, and quote what holds "
            "brackets, commas or = twice: 'paths.output=\"/tmp/a=b\"'"
        )
    if isinstance(error, OmegaConfBaseException):
        return _wrong_value(error, command)
    return str(error)
