"""Rows of a Hugging Face ``datasets`` directory saved to disk: token ids and masks.

``state.json`` lists Arrow stream files, whose rows follow each other. They are mapped, so a row
costs its own pages only. Needs pyarrow, which the extra ``speculators`` installs, and nothing of
``datasets``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from eagle3.errors import DataError

STATE_NAME = "state.json"
_SEVERAL_SPLITS = "dataset_dict.json"
_COLUMNS = ("input_ids", "loss_mask")
_LENGTH = "seq_len"


@dataclass(frozen=True)
class ArrowRow:
    """What a row says about its document."""

    input_ids: NDArray[Any]
    """[n], integers."""
    loss_mask: NDArray[Any]
    """[n], numbers or bool."""


class ArrowRows:
    """The rows of one directory. Safe to use from several threads.

    Raises:
        DataError: no such directory, a file that cannot be read, or a column that is missing.
        Without pyarrow, naming the extra.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files = tuple(directory / name for name in _data_files(directory))
        arrow = _pyarrow(directory)
        tables = [_open(path, arrow) for path in self.files]
        try:
            table = arrow.concat_tables(tables)
        except arrow.ArrowInvalid as error:
            raise DataError(
                f"{directory}: found Arrow files with different columns ({error}), expected those "
                "of one data set. Prepare the data again."
            ) from error
        missing = [name for name in _COLUMNS if name not in table.column_names]
        if missing:
            raise DataError(
                f"{directory}: found columns {', '.join(table.column_names)}, expected "
                f"{' and '.join(missing)} among them. Is it the data set that was captured?"
            )
        self._size = int(table.num_rows)
        self._columns = {
            name: table.column(name) for name in (*_COLUMNS, _LENGTH) if name in table.column_names
        }

    def __len__(self) -> int:
        return self._size

    def __reduce__(self) -> tuple[type[ArrowRows], tuple[Path]]:
        """A process that probes files gets the place and maps the files itself."""
        return ArrowRows, (self.directory,)

    def row(self, number: int) -> ArrowRow:
        """Row ``number``, below ``len(self)``.

        Raises:
            DataError: not lists of numbers, of the length that ``seq_len`` says.
        """
        ids = self._numbers("input_ids", number)
        mask = self._numbers("loss_mask", number)
        if _LENGTH in self._columns:
            length = self._columns[_LENGTH][number].as_py()
            if length != len(ids):
                raise DataError(
                    f"{self.directory}: row {number}: key '{_LENGTH}': found {length}, expected "
                    f"{len(ids)}, the length of input_ids. Prepare the data again."
                )
        return ArrowRow(ids, mask)

    def _numbers(self, column: str, number: int) -> NDArray[Any]:
        scalar = self._columns[column][number]
        values = getattr(scalar, "values", None)
        if values is None or values.null_count:
            raise self._not_numbers(column, number, f"{scalar.type} with nothing in it")
        found: NDArray[Any] = values.to_numpy(zero_copy_only=False)
        allowed = "iu" if column == "input_ids" else "iubf"
        if found.dtype.kind not in allowed:
            raise self._not_numbers(column, number, str(scalar.type))
        return found

    def _not_numbers(self, column: str, number: int, found: str) -> DataError:
        return DataError(
            f"{self.directory}: row {number}: key '{column}': found {found}, expected a list of "
            "integers. Prepare the data again."
        )


def is_arrow_directory(directory: Path) -> bool:
    """Whether ``datasets`` saved a data set here."""
    return (directory / STATE_NAME).is_file()


def _data_files(directory: Path) -> list[str]:
    path = directory / STATE_NAME
    if (directory / _SEVERAL_SPLITS).is_file():
        raise DataError(
            f"{directory}: found a data set of several splits ({_SEVERAL_SPLITS}), expected the "
            "one that was captured. Set paths.arrow to the directory of that split."
        )
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["_data_files"]
        names = [entry["filename"] for entry in entries]
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error}), expected the list of Arrow files of a data set "
            "saved to disk. Set paths.arrow to its directory."
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path}: key '_data_files': found no list of file names ({error!r}), expected what "
            "the datasets library writes. Prepare the data again."
        ) from error
    if not names or not all(isinstance(n, str) and Path(n).name == n for n in names):
        raise DataError(
            f"{path}: key '_data_files': found {names!r}, expected names of files beside it. "
            "Prepare the data again."
        )
    return names


def _open(path: Path, arrow: Any) -> Any:
    try:
        return arrow.ipc.open_stream(arrow.memory_map(str(path))).read_all()
    except (OSError, arrow.ArrowException) as error:
        raise DataError(
            f"{path}: cannot be read as an Arrow stream ({error}). Copy it or prepare it again."
        ) from error


def _pyarrow(directory: Path) -> Any:
    """Imported here, because only these directories need it."""
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        raise DataError(
            f"{directory}: found an Arrow data set, which needs the package pyarrow ({error}). "
            "Install it: pip install 'eagle3[speculators]'."
        ) from error
    return pyarrow
