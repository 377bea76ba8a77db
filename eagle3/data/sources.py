"""Where documents came from: the label under which their metrics are shown.

A document takes the first of these that says something:

1. the index of the directory (native format);
2. a CSV file: ``sources.csv`` in the directory, or the one that the config names;
3. the name of the directory.

The CSV file has the columns ``sample_id,source``. A sample id is the 16 hexadecimal digits of the
sample's hash, or the name of its file with or without the ending; the hash comes first.
"""

from __future__ import annotations

import csv
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

import numpy as np
from numpy.typing import NDArray

from eagle3.data.hashing import sample_id
from eagle3.data.index import DocumentIndex
from eagle3.errors import DataError

logger = logging.getLogger(__name__)
CSV_NAME = "sources.csv"
_COLUMNS = ("sample_id", "source")
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
ALLOWED = "1 to 64 letters, digits, '.', '_' and '-', beginning with a letter or digit"


def label(
    index: DocumentIndex, directory: Path, labels_csv: Path | None
) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Label every document; ids of the CSV file that match none are counted in one warning.

    Args:
        index: of the directory.
        directory: where it lies.
        labels_csv: as the config says; None: ``sources.csv`` of the directory, if there is one.

    Returns:
        The labels in use, sorted, and [D] the place of each document's label among them.

    Raises:
        DataError: as :func:`read_labels`, or a label of the index is not fit for a metric name.
    """
    given = read_labels(directory, labels_csv)
    found = apply_labels(index, directory, given)
    if given:
        known = set(_hashes(index)) | {key for name in index.files for key in _names(name)}
        unknown = sorted(given.keys() - known)
        if unknown:
            logger.warning(
                "%s: %d of %d sample ids match no document of %s, the first one is %s",
                labels_csv or directory / CSV_NAME,
                len(unknown),
                len(given),
                directory,
                unknown[0],
            )
    return found


def read_labels(directory: Path, labels_csv: Path | None) -> dict[str, str]:
    """Labels by sample id, from the CSV file; none where there is no file.

    Raises:
        DataError: the file that the config names is missing, or a line is malformed.
    """
    path = labels_csv or directory / CSV_NAME
    if labels_csv is None and not path.exists():
        return {}
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return _parse(file, path)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: cannot be read ({error}), expected a CSV file with the columns "
            "sample_id,source in UTF-8. Correct paths.source_labels, or the file."
        ) from error


def apply_labels(
    index: DocumentIndex, directory: Path, given: Mapping[str, str]
) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """As :func:`label`, with labels that were read before."""
    for name in index.sources:
        if name and not _LABEL.fullmatch(name):
            raise DataError(
                f"{directory}: key 'sources' of its index: found {name!r}, expected {ALLOWED}, "
                "because it names a metric. Convert the directory again with other labels."
            )
    fallback = directory_label(directory)
    own = np.array([name or fallback for name in index.sources], np.object_)[index.source]
    if given:
        by_file = [
            next((given[key] for key in _names(name) if key in given), None) for name in index.files
        ]
        unlabelled = np.array([not name for name in index.sources], np.bool_)[index.source]
        hashes = _hashes(index)
        for document in np.flatnonzero(unlabelled).tolist():
            found = given.get(hashes[document]) or by_file[int(index.file[document])]
            own[document] = found or fallback
    names, place = np.unique(own.astype(np.str_), return_inverse=True)
    return tuple(names.tolist()), place.astype(np.int64)


def directory_label(directory: Path) -> str:
    """The name of a directory, with what a metric name cannot hold replaced by ``_``."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", directory.resolve().name).lstrip("._-")
    return name[:64] or "data"


def _parse(file: TextIO, path: Path) -> dict[str, str]:
    rows = csv.reader(file, strict=True)
    labels: dict[str, str] = {}
    places: list[int] | None = None
    try:
        for row in rows:
            if not row:
                continue
            where = f"{path}, line {rows.line_num}"
            if places is None:
                places = _columns(row, where)
                continue
            key, name = _cells(row, places, where)
            if labels.setdefault(key, name) != name:
                raise DataError(
                    f"{where}: found '{name}' for {key}, expected '{labels[key]}' as in a line "
                    "before it: one sample has one label. Remove one of the lines."
                )
    except csv.Error as error:
        raise DataError(
            f"{path}, line {rows.line_num}: found text that is not CSV ({error}), expected "
            "sample_id,source. Correct the line."
        ) from error
    if places is None:
        raise DataError(f"{path}: found nothing, expected a first line sample_id,source.")
    return labels


def _columns(row: list[str], where: str) -> list[int]:
    names = [cell.strip() for cell in row]
    if any(names.count(column) != 1 for column in _COLUMNS):
        raise DataError(
            f"{where}: found the columns {','.join(names)}, expected sample_id,source. "
            "Add this line at the top."
        )
    return [names.index(column) for column in _COLUMNS]


def _cells(row: list[str], places: list[int], where: str) -> tuple[str, str]:
    if len(row) <= max(places):
        raise DataError(
            f"{where}: found {len(row)} values, expected a sample id and a source. "
            "Correct the line."
        )
    key, name = (row[place].strip() for place in places)
    if not key:
        raise DataError(f"{where}: found no sample id, expected one. Correct the line.")
    if not _LABEL.fullmatch(name):
        raise DataError(
            f"{where}: found the source {name!r}, expected {ALLOWED}, because it names a metric. "
            "Rename it."
        )
    return key, name


def _hashes(index: DocumentIndex) -> list[str]:
    return [sample_id(value) for value in index.sample_hash.tolist()]


def _names(file: str) -> tuple[str, str]:
    return file, Path(file).stem
