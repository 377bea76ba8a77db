"""What the stored states are: which layers, counted how, and before or after the final norm.

A directory may say it in a file of its own, the config may say it, and both may. What neither
says is an error, because a wrong guess trains well and drafts badly.

Two ways of counting are in use. *entering* k is the residual stream that enters layer k, which is
``hidden_states[k]`` of Hugging Face; *after* k is the output of layer k. The same state is
``after k == entering k + 1``. Everything past this module uses *entering*.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from eagle3.errors import DataError
from eagle3.names import LastHidden, LayerIdConvention

CONFIG_NAME = "data_config.json"
STARTED_NAME = ".capture.json"
"""Stands beside the files of one of our captures until it is complete."""
FORMAT_VERSION = 1
_Choice = TypeVar("_Choice", bound=StrEnum)


@dataclass(frozen=True)
class Declaration:
    """What one source (the config, or a directory) says about the states; None: it does not."""

    aux_layer_ids: tuple[int, ...] | None = None
    """Ids of the K aux layers, low to high, without the last state."""
    layer_id_convention: LayerIdConvention | None = None
    """What ``aux_layer_ids`` count."""
    last_hidden: LastHidden | None = None


@dataclass(frozen=True)
class StoredDeclaration:
    """The declaration found in a directory, and who wrote it."""

    declaration: Declaration = field(default_factory=Declaration)
    writer: str | None = None
    """Version of speculators named by ``data_config.json``."""
    hint: str = ""
    """What captures in this format mostly hold; empty: as the versions with ``.pt`` files."""
    file: str = CONFIG_NAME
    """The file that says it, or would."""


@dataclass(frozen=True)
class ResolvedDeclaration:
    """The agreed facts."""

    aux_layer_ids: tuple[int, ...]
    """*entering* convention."""
    last_hidden: LastHidden
    declared_by: dict[str, str]
    """Where each fact came from: ``config`` or the name of the directory's file."""


def convert_layer_ids(
    ids: Iterable[int], source: LayerIdConvention, target: LayerIdConvention
) -> tuple[int, ...]:
    """Rename the same states from one way of counting to the other."""
    to_entering = 1 if source is LayerIdConvention.after else 0
    from_entering = 1 if target is LayerIdConvention.after else 0
    return tuple(k + to_entering - from_entering for k in ids)


def read_declaration(directory: Path, num_aux_layers: int) -> StoredDeclaration:
    """Read ``data_config.json``; a directory without one declares nothing.

    ``hidden_states.layer_ids`` may hold K ids or K + 1. With K + 1 the last one belongs to the
    last state (speculators writes it so) and is dropped.

    Raises:
        DataError: not JSON, an unknown format version, ids that are not K or K + 1 ascending
            integers, an unknown choice, or a capture that is not complete.
    """
    path = directory / CONFIG_NAME
    if is_unfinished(directory):
        raise DataError(
            f"{directory}: found the files of a capture that was interrupted ({STARTED_NAME}), "
            "expected a complete one. Start the run or the capture that made them again; it goes "
            "on where it stopped."
        )
    return _read_facts(path, num_aux_layers) if path.is_file() else StoredDeclaration()


def read_unfinished_declaration(directory: Path, num_aux_layers: int) -> StoredDeclaration:
    """What a capture that is still running says: the same, in the file that marks it.

    Another writer may mark its directory by an empty file, which declares nothing.

    Raises:
        DataError: as :func:`read_declaration`, but for the capture that is not complete.
    """
    started = directory / STARTED_NAME
    with contextlib.suppress(FileNotFoundError):  # the capture may finish at this moment
        if started.stat().st_size:
            return replace(_read_facts(started, num_aux_layers), file=STARTED_NAME)
    path = directory / CONFIG_NAME
    return _read_facts(path, num_aux_layers) if path.is_file() else StoredDeclaration()


def _read_facts(path: Path, num_aux_layers: int) -> StoredDeclaration:
    content = _read_json(path)
    version = _section(content, "format", path).get("data_format_version", FORMAT_VERSION)
    if version != FORMAT_VERSION:
        raise DataError(
            f"{path}: key 'format.data_format_version': found {version!r}, expected "
            f"{FORMAT_VERSION}. Convert the directory, or capture it again."
        )
    states = _section(content, "hidden_states", path)
    where = f"{path}: key 'hidden_states."
    ids = states.get("layer_ids")
    if ids is not None:
        ids = check_layer_ids(ids, (num_aux_layers, num_aux_layers + 1), f"{where}layer_ids'")
        ids = ids[:num_aux_layers]
    convention = _choice(states, "layer_id_convention", LayerIdConvention, where)
    last_hidden = _choice(states, "last_hidden", LastHidden, where)
    writer = content.get("speculators_version")
    return StoredDeclaration(
        Declaration(ids, convention, last_hidden), None if writer is None else str(writer)
    )


def is_unfinished(directory: Path) -> bool:
    """One of our own captures was interrupted here, or is still running."""
    return (directory / STARTED_NAME).exists()


def check_layer_ids(ids: Any, counts: Sequence[int], where: str) -> tuple[int, ...]:
    """Ascending, distinct, non-negative integers, as many as one of ``counts`` allows.

    Raises:
        DataError: naming ``where``, what was found and what was expected.
    """
    is_list = isinstance(ids, list | tuple)
    if not is_list or not all(isinstance(k, int) and not isinstance(k, bool) for k in ids):
        raise DataError(f"{where}: found {ids!r}, expected a list of integers.")
    expected = " or ".join(str(c) for c in counts)
    if len(ids) not in counts:
        raise DataError(
            f"{where}: found {len(ids)} ids {list(ids)}, expected {expected} "
            "(model.num_aux_layers aux layers). Set model.num_aux_layers or correct the ids."
        )
    if any(k < 0 for k in ids) or any(a >= b for a, b in pairwise(ids)):
        raise DataError(
            f"{where}: found {list(ids)}, expected distinct, non-negative ids in ascending order, "
            "the order in which the states are stored."
        )
    return tuple(ids)


def resolve_declaration(
    config: Declaration, stored: StoredDeclaration, num_aux_layers: int, directory: Path
) -> ResolvedDeclaration:
    """Merge what the config and the directory say.

    Raises:
        DataError: they disagree, or a fact is declared by neither; the message names the override.
    """
    if config.aux_layer_ids is not None:
        check_layer_ids(config.aux_layer_ids, (num_aux_layers,), "data.aux_layer_ids")
    found = stored.declaration
    ids = config.aux_layer_ids or found.aux_layer_ids
    convention = config.layer_id_convention or found.layer_id_convention
    last_hidden = config.last_hidden or found.last_hidden
    if ids is None or convention is None or last_hidden is None:
        raise DataError(_undeclared(Declaration(ids, convention, last_hidden), stored, directory))
    _check_agreement(config, stored, directory)
    return ResolvedDeclaration(
        aux_layer_ids=convert_layer_ids(ids, convention, LayerIdConvention.entering),
        last_hidden=last_hidden,
        declared_by={
            key: stored.file if getattr(config, key) is None else "config"
            for key in ("aux_layer_ids", "layer_id_convention", "last_hidden")
        },
    )


def _check_agreement(config: Declaration, stored: StoredDeclaration, directory: Path) -> None:
    """Ids are compared as states, so [2] counted after and [3] counted entering agree."""
    found, file = stored.declaration, stored.file
    problems = []
    if config.last_hidden and found.last_hidden and config.last_hidden != found.last_hidden:
        problems.append(
            f"data.last_hidden={config.last_hidden} against {found.last_hidden} in {file}"
        )
    mine, theirs = config.layer_id_convention, found.layer_id_convention
    if config.aux_layer_ids is not None and found.aux_layer_ids is not None:
        entering = LayerIdConvention.entering
        a = convert_layer_ids(config.aux_layer_ids, mine or theirs or entering, entering)
        b = convert_layer_ids(found.aux_layer_ids, theirs or mine or entering, entering)
        if a != b:
            problems.append(
                f"data.aux_layer_ids={_override(config.aux_layer_ids)} ({mine or theirs}) against "
                f"{_override(found.aux_layer_ids)} ({theirs or 'not said how they count'}) in "
                f"{file}"
            )
    elif mine and theirs and mine != theirs:
        problems.append(f"data.layer_id_convention={mine} against {theirs} in {file}")
    if problems:
        raise DataError(
            f"{directory}: the config and the directory disagree: {'; '.join(problems)}. Remove "
            "the override if the directory is right, else correct the directory's "
            f"{file}; overrides use the same numbering as the directory."
        )


def _undeclared(known: Declaration, stored: StoredDeclaration, directory: Path) -> str:
    overrides = []
    if known.aux_layer_ids is None:
        overrides.append("data.aux_layer_ids=[2,30,58] (the layers of your capture)")
    if known.layer_id_convention is None:
        overrides.append("data.layer_id_convention=entering (or after)")
    if known.last_hidden is None:
        overrides.append("data.last_hidden=pre_norm (or post_norm)")
    lines = [
        f"{directory}: neither {stored.file} nor the config says what the stored states are. "
        "Expected these facts, found nothing; add:",
        *(f"  {override}" for override in overrides),
    ]
    if stored.declaration.aux_layer_ids is not None:
        lines.append(f"The directory has layer_ids {_override(stored.declaration.aux_layer_ids)}.")
    origin = f"speculators {stored.writer}, which wrote this directory," if stored.writer else ""
    hint = stored.hint or (
        f"{origin or 'speculators v0.3 and v0.4'} stored the output of layer k (after) and "
        "the last state pre_norm; engine captures mostly count the state entering layer k."
    )
    lines.append(
        f"Hint: {hint} Nothing is guessed, because a wrong choice trains well and drafts badly."
    )
    return "\n".join(lines)


def _override(ids: Iterable[int]) -> str:
    """The ids as one types them on the command line."""
    return f"[{','.join(str(k) for k in ids)}]"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON ({error}). Repair or remove the file.") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: found {type(content).__name__}, expected a JSON object.")
    return content


def _section(content: dict[str, Any], key: str, path: Path) -> dict[str, Any]:
    section = content.get(key, {})
    if not isinstance(section, dict):
        raise DataError(f"{path}: key '{key}': found {section!r}, expected a JSON object.")
    return section


def _choice(
    section: dict[str, Any], key: str, choices: type[_Choice], where: str
) -> _Choice | None:
    value = section.get(key)
    if value is None:
        return None
    if value not in list(choices):
        raise DataError(f"{where}{key}': found {value!r}, expected one of {', '.join(choices)}.")
    return choices(value)
