"""Checksums of records: every byte that was written has one, and no byte is read without comparing it.

Each extent is cut into parts, so that what is used alone is compared alone, before it is used. A manifest lists the
checksums of all parts.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

from common.store import Extent
from common.store.checksums import CheckedExtent, ChecksummedExtent, ExtentChecksums, PartSums
from fuyou.layout.record import Record, RecordExtents

Part = Literal["parameters", "states"]  # Of a record; those of an extent are ranges of it
PARTS: tuple[Part, ...] = get_args(Part)

PART_BYTES = 16 << 20  # Bytes of parameters with one checksum; a multiple of a page


def sealed_name(record: Record, part: Part) -> str:
    """Return the name of a record's part for messages, such as ``block 7, optimizer states``."""
    return f"{record.name}, {'optimizer states' if part == 'states' else part}"


def part_ends(record: Record, part: Part, chunk_elements: int) -> list[int]:
    """Return the end of each part of an extent that has a checksum, in bytes.

    Of optimizer states, these are the components of each chunk: an update reads a chunk, an export its low bits alone.
    """
    if part == "parameters":
        return [*range(PART_BYTES, record.parameter_nbytes, PART_BYTES), record.parameter_nbytes]
    ends = []
    position = 0
    for chunk in record.chunks(chunk_elements):
        for component in record.precision.components:
            position += component.nbytes(chunk.stop - chunk.start)
            ends.append(position)
    return ends


class RecordSums:
    """The newest checksums of every record in every slot.

    Args:
        known: those of what the store holds already.
    """

    def __init__(
        self,
        records: Sequence[Record],
        extents: Sequence[RecordExtents],
        chunk_elements: int,
        known: Mapping[Extent, PartSums],
    ):
        self._records = records
        self._chunk_elements = chunk_elements
        self._extents: dict[tuple[int, Part], tuple[Extent, ...]] = {
            (index, part): getattr(pairs, part) for index, pairs in enumerate(extents) for part in PARTS
        }
        self._sums: dict[Extent, PartSums] = dict(known)

    def of_write(self, record: int, part: Part, slot: int, directories: Sequence[Path]) -> ExtentChecksums:
        """Return checksums to which a part of a record is added while it is written to ``slot``."""
        ends = part_ends(self._records[record], part, self._chunk_elements)
        what = sealed_name(self._records[record], part)
        return ExtentChecksums(self._extents[record, part][slot], directories, what, ends)

    def written(self, record: int, part: Part, slot: int, sums: PartSums) -> None:
        """Store the checksums of a part of a record that was written to ``slot`` (0 if frozen)."""
        self._sums[self._extents[record, part][slot]] = sums

    def checked(self, record: int, part: Part, slot: int) -> CheckedExtent:
        """Return a part of a record, in ``slot`` (0 if frozen), as it can be read."""
        extent = self._extents[record, part][slot]
        ends = part_ends(self._records[record], part, self._chunk_elements)
        return CheckedExtent(sealed_name(self._records[record], part), extent, ends, self._sums[extent])

    def sealed(self, slot: int) -> list[ChecksummedExtent]:
        """Return all checksums of ``slot`` and of frozen records."""
        entries = []
        for record in self._records:
            for part in PARTS:
                for extent in self._extents[record.index, part][slot if record.trainable else 0 :][:1]:
                    if extent in self._sums:
                        entries.append(
                            ChecksummedExtent(sealed_name(record, part), extent, self._sums[extent])
                        )
        return entries
