"""A file of arrays, one for each row of the data, that is filled in any order and goes on where it was left."""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from common.errors import UserError
from common.files.atomic import replace_file

Shapes = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of what each row has, by name."""
_MARKS, _IDENTITY = "marks", "identity.json"


class RowTable:
    """Arrays of N rows by name, in a folder: a file for each, and a mark for each row that is there.

    The mark is the checksum of the row, and is written when the row is on the drive: what a crash has cut short has
    none. Several processes may fill different rows at once.

    Args:
        folder: with the files, made by :meth:`create`.
        shapes: what each row has.
        rows: N.
    """

    def __init__(self, folder: Path, shapes: Shapes, rows: int) -> None:
        self._folder = folder
        self._arrays = {
            name: np.memmap(folder / f"{name}.raw", dtype, "r+", shape=(rows, *shape))
            for name, (shape, dtype) in shapes.items()
        }
        self._marks = np.memmap(folder / f"{_MARKS}.raw", np.uint64, "r+", shape=(rows,))

    @staticmethod
    def create(folder: Path, shapes: Shapes, rows: int, identity: str) -> None:
        """Make the files, with no row in them, unless they are there for the same ``identity``.

        Raises:
            UserError: there is no room.
        """
        wanted = json.dumps({"identity": identity, "rows": rows, "shapes": {k: list(v) for k, v in shapes.items()}})
        try:
            if (folder / _IDENTITY).read_text() == wanted:
                return
        except OSError:
            pass
        sizes = {name: rows * int(np.prod(shape)) * np.dtype(dtype).itemsize for name, (shape, dtype) in shapes.items()}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / _IDENTITY).unlink(missing_ok=True)
            for name, nbytes in {**sizes, _MARKS: 8 * rows}.items():
                with (folder / f"{name}.raw").open("wb") as file:
                    file.truncate(nbytes)
            replace_file(folder / _IDENTITY, wanted, durable=True)
        except OSError as error:
            raise UserError(f"{folder} cannot be written: {error.strerror}.") from error

    def has(self, rows: np.ndarray) -> bool:
        """Return whether all of these rows are there."""
        return bool((self._marks[rows] != 0).all())

    def put(self, rows: np.ndarray, values: Mapping[str, np.ndarray]) -> None:
        """Write rows, ``[R]``, whose values are ``[R, ...]`` by name; what is shorter than the table's is filled up
        with zeros."""
        for name, array in self._arrays.items():
            given = values[name]
            padding = [(0, 0), *((0, whole - own) for whole, own in zip(array.shape[1:], given.shape[1:], strict=True))]
            array[rows] = np.pad(given, padding)
            array.flush()
        for row in rows.tolist():
            self._marks[row] = self._mark(row)
        self._marks.flush()

    def read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return the values of rows, ``[R, ...]`` by name.

        Raises:
            UserError: one is not there, or not what was written.
        """
        for row in rows.tolist():
            if self._marks[row] != self._mark(row):
                raise UserError(
                    f"Row {row:,} of {self._folder} is damaged: delete that folder. --resume makes it anew, and goes "
                    "on."
                )
        return {name: array[rows] for name, array in self._arrays.items()}

    def _mark(self, row: int) -> int:
        """Return the checksum of a row, with a bit more, so that none is 0."""
        found = 0
        for array in self._arrays.values():
            found = zlib.crc32(np.ascontiguousarray(array[row]).data, found)
        return found | 1 << 32
