"""A directory opened for looking at it: more is tolerated here than training would take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eagle3.data.bad_samples import BadSamples
from eagle3.data.declaration import (
    Declaration,
    StoredDeclaration,
    convert_layer_ids,
    resolve_declaration,
)
from eagle3.data.formats import FORMATS
from eagle3.data.index import DocumentIndex, build_index
from eagle3.data.store import Store
from eagle3.inspection.facts import BadFile, DirectoryFacts
from eagle3.inspection.stated import COMMAND_LINE, Sizes
from eagle3.names import LastHidden, LayerIdConvention
from eagle3.shards_commands.options import as_options

_ANY_NUMBER = 2**62


@dataclass(frozen=True, eq=False)
class OpenDirectory:
    """Files, index, and what is said about the states as far as it is."""

    store: Store
    index: DocumentIndex
    sizes: Sizes
    aux_layer_ids: tuple[int, ...] | None
    """*entering* convention; None: not declared."""
    last_hidden: LastHidden | None
    said_by: dict[str, str]

    @property
    def state_names(self) -> list[str]:
        """One for each stored state, aux layers by id where it is known."""
        count = self.sizes.layout.num_aux_layers
        ids = self.aux_layer_ids
        aux = [f"aux {k + 1}" if ids is None else f"entering {ids[k]}" for k in range(count)]
        return [*aux, "last"]

    @property
    def bytes_per_token(self) -> int:
        """Of hidden states."""
        return self.sizes.layout.width * self.index.dtype.itemsize


def open_directory(
    store: Store, sizes: Sizes, given: Declaration, cache: Path, num_workers: int
) -> OpenDirectory:
    """Index ``store``; undeclared facts stay open, bad files are only recorded.

    Raises:
        DataError: no usable document, or the command line and the directory disagree.
    """
    stored = store.declaration()
    ids, last_hidden = _agreed(given, stored, sizes.layout.num_aux_layers, store.directory)
    index = build_index(store, cache, BadSamples(_ANY_NUMBER), num_workers)
    said_by = dict(sizes.said_by)
    for name, value in vars(given).items():
        if value is not None:
            said_by[name] = COMMAND_LINE
        elif getattr(stored.declaration, name) is not None:
            said_by[name] = stored.file
    return OpenDirectory(store, index, sizes, ids, last_hidden, said_by)


def directory_facts(opened: OpenDirectory) -> DirectoryFacts:
    """What the directory is."""
    layout, index = opened.sizes.layout, opened.index
    return DirectoryFacts(
        path=str(opened.store.directory),
        format=_format_name(opened.store.directory),
        dtype=str(index.dtype).removeprefix("torch."),
        num_aux_layers=layout.num_aux_layers,
        hidden_size=layout.hidden_size,
        vocab_size=opened.sizes.vocab_size,
        aux_layer_ids=opened.aux_layer_ids,
        last_hidden=None if opened.last_hidden is None else str(opened.last_hidden),
        said_by=opened.said_by,
        fingerprint=index.fingerprint,
        files=len(index.files),
        disk_bytes=sum(_size(opened.store.directory / file) for file in index.files),
        bytes_per_token=opened.bytes_per_token,
        bad_files=tuple(BadFile(path, as_options(reason)) for path, reason in index.bad),
    )


def _agreed(
    given: Declaration, stored: StoredDeclaration, num_aux_layers: int, directory: Path
) -> tuple[tuple[int, ...] | None, LastHidden | None]:
    """Ids (entering) and kind of the last state, as far as they are declared."""
    found = stored.declaration
    ids = given.aux_layer_ids or found.aux_layer_ids
    convention = given.layer_id_convention or found.layer_id_convention
    last_hidden = given.last_hidden or found.last_hidden
    if ids is not None and convention is not None and last_hidden is not None:
        resolved = resolve_declaration(given, stored, num_aux_layers, directory)
        return resolved.aux_layer_ids, resolved.last_hidden
    if ids is None or convention is None:
        return None, last_hidden
    return convert_layer_ids(ids, convention, LayerIdConvention.entering), last_hidden


def _format_name(directory: Path) -> str:
    return next(name for name, form in FORMATS.items() if form.is_here(directory))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # gone since it was indexed; reading it will say so
        return 0
