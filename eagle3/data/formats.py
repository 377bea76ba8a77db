"""Which format a directory has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from eagle3.data.layout import StateLayout
from eagle3.data.native import NativeStore, has_lost_manifest, is_native, is_unfinished
from eagle3.data.native_manifest import MANIFEST_NAME
from eagle3.data.speculators import Speculators, list_states
from eagle3.data.speculators_v1 import SpeculatorsV1, list_documents
from eagle3.data.store import Store
from eagle3.errors import DataError


@dataclass(frozen=True)
class Format:
    """How a format is recognised and opened."""

    files: str
    """What its files are called, for messages."""
    is_here: Callable[[Path], bool]
    """Whether a directory, perhaps a missing one, has files of it."""
    open: Callable[[Path, StateLayout, Path | None], Store]
    """Directory, layout, place of an Arrow data set."""


FORMATS = {
    "native": Format(
        "manifest.json", is_native, lambda directory, layout, _: NativeStore(directory, layout)
    ),
    "speculators v1": Format(
        "data_0.pt, data_1.pt, ...",
        lambda directory: bool(list_documents(directory)),
        lambda directory, layout, _: SpeculatorsV1(directory, layout),
    ),
    "speculators 0.9": Format(
        "hs_0.safetensors, hs_1.safetensors, ...",
        lambda directory: bool(list_states(directory)),
        Speculators,
    ),
}
_EXPECTED = " or ".join(form.files for form in FORMATS.values())


def open_store(directory: Path, layout: StateLayout, arrow: Path | None = None) -> Store:
    """Open a directory of captured states; its files are listed, not read.

    Args:
        directory: in any of the known formats.
        layout: sizes that its states must have.
        arrow: the token ids and masks of speculators 0.9; None: in the directory or its parent.

    Raises:
        DataError: there is no such directory, none of the known formats is in it, or two are.
    """
    if not directory.is_dir():
        raise DataError(
            f"{directory}: found no such directory, expected captured hidden states. "
            f"Set paths.shards to the directory that holds {_EXPECTED}"
        )
    found = {name: form for name, form in FORMATS.items() if form.is_here(directory)}
    if len(found) > 1:
        kinds = " and ".join(f"{name} ({form.files})" for name, form in found.items())
        raise DataError(
            f"{directory}: found files of {kinds}, expected one format. Move one of them to a "
            "directory of its own; several directories can be given in paths.shards."
        )
    for form in found.values():
        return form.open(directory, layout, arrow)
    raise nothing_to_open(directory)


def nothing_to_open(directory: Path) -> DataError:
    """What to say about a directory in which there is none of the known formats."""
    if is_unfinished(directory):
        return DataError(
            f"{directory}: found shards that are still being written, or whose writing was "
            "interrupted, expected a complete directory. Start the command that writes them "
            "again; it goes on where it stopped."
        )
    if has_lost_manifest(directory):
        return DataError(
            f"{directory}: found shards or an index of a native directory without "
            f"{MANIFEST_NAME}, expected it beside them. Copy it again from its origin, or convert "
            "the capture again."
        )
    inside = directory / "hidden_states"
    if list_states(inside):
        return DataError(
            f"{directory}: found the prepared data of speculators, expected its states. "
            f"Set paths.shards={inside}."
        )
    others = sorted(p.name for p in directory.iterdir())[:3]
    return DataError(
        f"{directory}: found {', '.join(others) or 'an empty directory'}, expected {_EXPECTED} "
        "Set paths.shards to the directory with these files, or capture them first."
    )


def has_documents(directory: Path) -> bool:
    """Whether there is anything that :func:`open_store` would open."""
    return any(form.is_here(directory) for form in FORMATS.values())
