"""Which records of data files are taken, and under which names their columns are read."""

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from common.data.fields import LAYOUTS
from common.data.records import DataRecord, read_records
from common.errors import UserError, did_you_mean
from common.units import counted


@dataclass(frozen=True)
class RecordSelection:
    """A selection of the records of data sets, in their order.

    A held-out part is drawn evenly: the records of a data set are divided into windows of ``1 / held_out`` records, and
    one of each window is held out. Which one depends on nothing but its number in its data set, so that training and
    evaluation, and every run on the same data, agree about it.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    """Names that the record shapes know, and the columns of the files that have their values."""
    limit: int | None = None
    """Number of records to take at most of each data set, from the first on; None: all."""
    held_out: float = 0.0
    """Part of the records that is held out for evaluation."""
    takes_held_out: bool = False
    """Whether the part that is held out is taken, or all others."""
    files_of_sets: tuple[int, ...] = ()
    """Number of files of each data set, whose records are numbered separately; none: all files are one data set."""

    @property
    def identity(self) -> list[Any]:
        """What the taken records depend on, as JSON; empty where all are taken as they are."""
        if self == RecordSelection():
            return []
        return [sorted(self.columns.items()), self.limit, self.held_out, self.takes_held_out, self.files_of_sets]

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

    def read(self, files: Sequence[Path]) -> Iterator[tuple[str, DataRecord]]:
        """Read what is taken of the records of ``files``, each with the name of its file.

        Raises:
            UserError: a file cannot be read, a record lacks a column that was named, or none of them is taken.
        """
        rest, records, taken = list(files), 0, 0
        for size in self.files_of_sets or (len(rest),):
            numbered = enumerate((str(file), record) for file in rest[:size] for record in read_records(file))
            for number, (file, record) in itertools.islice(numbered, self.limit):
                records += 1
                if not self.held_out or self._is_held_out(number) is self.takes_held_out:
                    taken += 1
                    yield file, self._renamed(file, record) if self.columns else record
            rest = rest[size:]
        if records and not taken:
            raise UserError(
                f"--eval-split {self.held_out:.4g} of {counted(records, 'record')} leaves none to "
                f"{'evaluate with' if self.takes_held_out else 'train on'}. Give another part, or --eval-data."
            )

    def _is_held_out(self, number: int) -> bool:
        part = Fraction(self.held_out).limit_denominator(1_000_000)
        window = math.floor(number * part)
        first, end = math.ceil(window / part), math.ceil((window + 1) / part)
        drawn = int.from_bytes(hashlib.blake2b(str(window).encode(), digest_size=8).digest(), "big") % (end - first)
        return number == first + drawn

    def _renamed(self, file: str, record: DataRecord) -> DataRecord:
        values = dict(record.values)
        for column in self.columns.values():
            if column not in values:
                raise UserError(
                    f"{file}, {record.position} has no column {column!r} (--columns): it has {', '.join(values)}."
                    f"{did_you_mean(column, values)}"
                )
        taken = {name: values[column] for name, column in self.columns.items()}
        # Who names columns means their layout, though the record may have another that would win.
        layouts = [set(layout) for layout in LAYOUTS if not self.columns.keys().isdisjoint(layout)]
        others = {name for layout in LAYOUTS for name in layout} - set().union(*layouts) if layouts else set()
        rest = {name: value for name, value in values.items() if name not in others | set(self.columns.values())}
        return DataRecord({**rest, **taken}, record.position)
