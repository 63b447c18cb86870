"""Checksums of all records: set when they are written, listed in the manifest, compared when they are read."""

from collections.abc import Iterable, Sequence
from typing import Literal, get_args

from common.store import Extent
from common.store.verify import ChecksummedExtent
from fuyou.layout.record import Record, RecordExtents

Part = Literal["parameters", "states"]
PARTS: tuple[Part, ...] = get_args(Part)

# Number of steps of training in which each record is checked once: damage that a drive does unnoticed is found within
# so many steps, for a thirty-second of what it costs to check everything.
CHECK_EVERY = 32


def sealed_name(record: Record, part: Part) -> str:
    """Return the name of a record's part in messages, such as ``block 7, optimizer states``."""
    return f"{record.name}, {'optimizer states' if part == 'states' else part}"


class RecordSums:
    """The newest checksums of every record in every slot.

    Args:
        records: all records of the model.
        extents: their places.
        sealed: checksums that a manifest lists.
    """

    def __init__(
        self, records: Sequence[Record], extents: Sequence[RecordExtents], sealed: Iterable[ChecksummedExtent] = ()
    ):
        self._records = records
        self._places: dict[tuple[int, Part], tuple[Extent, ...]] = {
            (index, part): getattr(places, part) for index, places in enumerate(extents) for part in PARTS
        }
        self._sums: dict[Extent, tuple[int, ...]] = {one.extent: one.sums for one in sealed}

    def written(self, record: int, slot: int, parameters: tuple[int, ...], states: tuple[int, ...] = ()) -> None:
        """Note the checksums of a record, or a part of it, that was written to ``slot`` (0 for a frozen one)."""
        if parameters:
            self._sums[self._places[record, "parameters"][slot]] = parameters
        if states:
            self._sums[self._places[record, "states"][slot]] = states

    def expected(self, record: int, part: Part, slot: int, step: int) -> tuple[int, ...] | None:
        """Return the checksums that a part must have when it is read in ``step``; None if it is not checked then."""
        return self._sums.get(self._places[record, part][slot]) if (step + record) % CHECK_EVERY == 0 else None

    def sealed(self, slot: int) -> list[ChecksummedExtent]:
        """Return all checksums of ``slot``, and of what is frozen."""
        found = []
        for record in self._records:
            for part in PARTS:
                for place in self._places[record.index, part][slot if record.trainable else 0 :][:1]:
                    if place in self._sums:
                        found.append(ChecksummedExtent(sealed_name(record, part), place, self._sums[place]))
        return found
