"""Which records of data files are taken, and under which names their columns are read."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from common.data.files import DataRecord
from common.errors import UserError, did_you_mean


@dataclass(frozen=True)
class RecordSelection:
    """A selection of the records of a data set, in their order.

    A held-out part is drawn evenly: of each ``1 / held_out`` records in a row, rounded, one. Which one depends on
    nothing but its place, so that training and evaluation, and every run on the same data, agree about it.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    """Names that the record shapes know, and the columns of the files that have their values."""
    limit: int | None = None
    """Number of records to take at most, from the first on; None: all."""
    held_out: float = 0.0
    """Part of the records that is held out for evaluation."""
    takes_held_out: bool = False
    """Whether the part that is held out is taken, or all others."""

    @property
    def identity(self) -> list[Any]:
        """What the taken records depend on, as JSON; empty where all are taken as they are."""
        if self == RecordSelection():
            return []
        return [sorted(self.columns.items()), self.limit, self.held_out, self.takes_held_out]

    def check_whole_files(self) -> None:
        """Refuse to take a part of a text file, which is one document.

        Raises:
            UserError: this selection would.
        """
        if self.held_out or self.limit is not None or self.columns:
            raise UserError(
                "A .txt file is one text without records: --eval-split, --max-records and --columns are for the other "
                'formats. Give --eval-data for evaluation, or write the text as records, {"text": ...}.'
            )

    def of(self, records: Iterable[tuple[str, DataRecord]]) -> Iterator[tuple[str, DataRecord]]:
        """Return what is taken of records, each with the name of its file.

        Raises:
            UserError: a record lacks a column that was named.
        """
        for number, (file, record) in enumerate(records):
            if number == self.limit:
                return
            if self.held_out and self._is_held_out(number) is not self.takes_held_out:
                continue
            yield file, self._renamed(file, record) if self.columns else record

    def _is_held_out(self, number: int) -> bool:
        window = round(1 / self.held_out)
        which, place = divmod(number, window)
        drawn = int.from_bytes(hashlib.blake2b(str(which).encode(), digest_size=8).digest(), "big") % window
        return place == drawn

    def _renamed(self, file: str, record: DataRecord) -> DataRecord:
        values = dict(record.values)
        for column in self.columns.values():
            if column not in values:
                raise UserError(
                    f"{file}, {record.place} has no column {column!r} (--columns): it has {', '.join(values)}."
                    f"{did_you_mean(column, values)}"
                )
        taken = {name: values[column] for name, column in self.columns.items()}
        rest = {name: value for name, value in values.items() if name not in self.columns.values()}
        return DataRecord({**rest, **taken}, record.place)
