"""Checksums of all records: computed on writing, listed in the manifest, compared on reading."""

from collections.abc import Iterable, Sequence
from typing import Literal, get_args

from common.store import Extent
from common.store.store import ChecksummedExtent
from fuyou.layout.record import Record, RecordExtents

Part = Literal["parameters", "states"]
PARTS: tuple[Part, ...] = get_args(Part)

CHECK_EVERY = 32  # Steps in which each record is checked once, at a 32nd of the cost of checking all


def sealed_name(record: Record, part: Part) -> str:
    """Return the name of a record's part for messages, such as ``block 7, optimizer states``."""
    return f"{record.name}, {'optimizer states' if part == 'states' else part}"


class RecordSums:
    """The newest checksums of every record in every slot, starting with those of a manifest (``sealed``)."""

    def __init__(
        self, records: Sequence[Record], extents: Sequence[RecordExtents], sealed: Iterable[ChecksummedExtent] = ()
    ):
        self._records = records
        self._extents: dict[tuple[int, Part], tuple[Extent, ...]] = {
            (index, part): getattr(pairs, part) for index, pairs in enumerate(extents) for part in PARTS
        }
        self._sums: dict[Extent, tuple[int, ...]] = {entry.extent: entry.sums for entry in sealed}

    def written(self, record: int, slot: int, parameters: tuple[int, ...], states: tuple[int, ...] = ()) -> None:
        """Store the checksums of a part of a record that was written to ``slot`` (0 if frozen)."""
        if parameters:
            self._sums[self._extents[record, "parameters"][slot]] = parameters
        if states:
            self._sums[self._extents[record, "states"][slot]] = states

    def expected(self, record: int, part: Part, slot: int, step: int) -> tuple[int, ...] | None:
        """Return the checksums for reading a part in ``step``; None if it is not checked then."""
        return self._sums.get(self._extents[record, part][slot]) if (step + record) % CHECK_EVERY == 0 else None

    def sealed(self, slot: int) -> list[ChecksummedExtent]:
        """Return all checksums of ``slot`` and of frozen records."""
        entries = []
        for record in self._records:
            for part in PARTS:
                for extent in self._extents[record.index, part][slot if record.trainable else 0 :][:1]:
                    if extent in self._sums:
                        entries.append(ChecksummedExtent(sealed_name(record, part), extent, self._sums[extent]))
        return entries
