"""Moving every record's parameters and optimizer states from the stores of some ranks into the stores of others.

Stores of different ranks hold the same elements of a record: cut elsewhere, padded to another length, in chunks of
another size. So a record is moved one kind of value at a time (parameters, low bits of the master weights, each
moment), in pieces of :data:`PIECE_ELEMENTS` elements: each reader of a part of a piece sends it to its new owner.
All ranks make the same list of such transfers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from common.store import Extent, Layout, Store
from common.store.checksums import CheckedExtent, ChecksummedExtent, ExtentChecksums, PartSums
from common.store.posix import aligned_bytes
from fuyou.layout.model_layout import ModelLayout
from fuyou.layout.record import Record, allocate_extents
from fuyou.layout.record_parts import StateComponent
from fuyou.layout.record_sums import PARTS, Part, part_ends, sealed_name
from fuyou.layout.share import Share
from fuyou.runtime.ranks import Agreement
from fuyou.schedule.memory_plan import chunk_elements

# Elements of a record that are moved at once; a multiple of a page's, at two bytes each
PIECE_ELEMENTS = 4 << 20


@dataclass(frozen=True)
class ValueKind:
    """One kind of value that is stored of a record: its parameters, or one component of the optimizer states."""

    part: Part
    component: StateComponent
    before: tuple[StateComponent, ...] = ()  # Components that precede it in each chunk of states


def value_kinds(record: Record) -> list[ValueKind]:
    """Return every kind of value that is stored of a record."""
    unit = torch.uint8 if record.decoded_nbytes else record.precision.dtype
    kinds = [ValueKind("parameters", StateComponent("parameters", unit))]
    if record.trainable:
        parts = record.precision.components
        kinds += [ValueKind("states", component, parts[:at]) for at, component in enumerate(parts)]
    return kinds


class ShardLayout:
    """Where everything lies in the store of one rank.

    Args:
        model: layout of the whole model, shared with nobody.
        slot: the one that counts.
    """

    def __init__(self, model: ModelLayout, share: Share, directories: int, slot: int):
        shared = model.shared(share)
        self.share = share
        self.records = shared.records
        self.slot = slot
        self.layout = Layout(directories)
        self._extents = allocate_extents(self.layout, self.records)
        self._chunk_elements = chunk_elements(shared)

    def stored_range(self, index: int, part: Part) -> tuple[int, int]:
        """Return the first element, and the end, of what the rank stores of a record."""
        record = self.records[index]
        if part == "parameters":
            start = self.share.stored_start(record.units)
            return start, start + record.stored
        start = self.share.owned_start(record.numel)
        return start, start + record.owned

    def extent(self, index: int, part: Part) -> Extent:
        """Return the extent of a record's part in the slot that counts."""
        extents = getattr(self._extents[index], part)
        return extents[self.slot if self.records[index].trainable else 0]

    def ends(self, index: int, part: Part) -> list[int]:
        """Return the end of each part of an extent that has a checksum, in bytes."""
        return part_ends(self.records[index], part, self._chunk_elements)

    def ends_by_extent(self) -> dict[Extent, list[int]]:
        """Return these for everything in the slot that counts, and in frozen records."""
        return {
            self.extent(record.index, part): self.ends(record.index, part)
            for record in self.records
            for part in (PARTS if record.trainable else PARTS[:1])
        }

    def byte_runs(self, index: int, kind: ValueKind, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Return where elements ``[start, stop)``, all of them stored here, lie in the extent.

        Returns:
            For each contiguous run: its offset in the extent, its first byte counted from that of element ``start``,
            and its length in bytes.
        """
        first, _ = self.stored_range(index, kind.part)
        record = self.records[index]
        nbytes = kind.component.nbytes
        if kind.part == "parameters":
            if start < stop:
                yield nbytes(start - first), 0, nbytes(stop - start)
            return
        for chunk in record.chunks(self._chunk_elements):
            begin = max(start, first + chunk.start)
            end = min(stop, first + chunk.stop)
            if begin < end:
                at = record.precision.state_nbytes(chunk.start)
                at += sum(component.nbytes(chunk.stop - chunk.start) for component in kind.before)
                at += nbytes(begin - first - chunk.start)
                yield at, nbytes(begin - start), nbytes(end - begin)


class RecordTransfer:
    """Moves all records from the stores of the old ranks into those of the new ones. Every rank makes one.

    Args:
        sources: layouts of all old stores, in the order of their ranks.
        readers: for each of them, the rank of those running now that reads it.
        stores: those that this rank reads, open, by their number.
        sums: for each of them, the checksums that its extents must have.
        targets: layouts of all new stores, in the order of ranks.
    """

    def __init__(
        self,
        sources: Sequence[ShardLayout],
        readers: Sequence[int],
        stores: Mapping[int, Store],
        sums: Mapping[int, Mapping[Extent, PartSums]],
        targets: Sequence[ShardLayout],
        agreement: Agreement,
    ):
        self._sources = sources
        self._readers = readers
        self._stores = stores
        self._sums = sums
        self._targets = targets
        self._agreement = agreement
        self._rank = agreement.share.rank

    def fill(self, store: Store) -> list[ChecksummedExtent]:
        """Fill this rank's new ``store``, and return the checksums of what it holds then. Collective.

        Nothing is synced yet.
        """
        target = self._targets[self._rank]
        sealed = []
        for record in target.records:
            extents = {
                part: target.extent(record.index, part) for part in (PARTS if record.trainable else PARTS[:1])
            }
            sums = {
                part: ExtentChecksums(
                    extent, store.directories, sealed_name(record, part), target.ends(record.index, part)
                )
                for part, extent in extents.items()
            }
            longest = max(each.records[record.index].units for each in self._targets)
            for kind in value_kinds(record):
                extent = extents[kind.part]
                of_part = sums[kind.part]
                for start in range(0, longest, PIECE_ELEMENTS):
                    begin, end, data = self._gather(
                        record.index, kind, start, min(start + PIECE_ELEMENTS, longest)
                    )
                    writing = [
                        store.write(extent, data[first : first + nbytes].numpy(), at, nbytes, of_part)
                        for at, first, nbytes in target.byte_runs(record.index, kind, begin, end)
                    ]
                    for future in writing:
                        future.result()
            sealed += [
                ChecksummedExtent(sealed_name(record, part), extents[part], each.parts())
                for part, each in sums.items()
            ]
        return sealed

    def _gather(self, index: int, kind: ValueKind, start: int, stop: int) -> tuple[int, int, torch.Tensor]:
        """Return what this rank is to store of a piece, ``uint8``, from wherever it is, with its first element and its
        end."""
        begin, end = _overlap(self._targets[self._rank].stored_range(index, kind.part), start, stop)
        size = kind.component.nbytes
        mine = torch.from_numpy(aligned_bytes(size(end - begin))) if begin < end else torch.empty(0)
        sends: list[tuple[int, torch.Tensor]] = []
        receives: list[tuple[int, torch.Tensor]] = []
        for source, target, first, last in self._plan(index, kind.part, start, stop):
            received = mine[size(first - begin) : size(last - begin)] if target == self._rank else None
            if self._readers[source] == self._rank:
                data = torch.empty(size(last - first), dtype=torch.uint8) if received is None else received
                self._read(source, index, kind, first, last, data)
                if received is None:
                    sends.append((target, data))
            elif received is not None:
                receives.append((self._readers[source], received))
        self._agreement.exchange(sends, receives)
        return begin, end, mine

    def _read(
        self, source: int, index: int, kind: ValueKind, first: int, last: int, data: torch.Tensor
    ) -> None:
        """Read elements ``[first, last)``, and check them together with the rest of the parts that they are in."""
        layout = self._sources[source]
        store = self._stores[source]
        extent = layout.extent(index, kind.part)
        record = layout.records[index]
        what = sealed_name(record, kind.part)
        ends = layout.ends(index, kind.part)
        checked = CheckedExtent(what, extent, ends, self._sums[source][extent])
        for at, offset, nbytes in layout.byte_runs(index, kind, first, last):
            start, end = checked.covering(at, nbytes)
            whole = (
                data[offset : offset + nbytes].numpy()
                if nbytes == end - start
                else aligned_bytes(end - start)
            )
            store.read(checked, whole, start, end - start).result()
            if nbytes < end - start:
                data[offset : offset + nbytes] = torch.from_numpy(whole[at - start : at - start + nbytes])

    def _plan(self, index: int, part: Part, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield the source, the target, the first element, and the end of every transfer that a piece needs.

        Of what several sources have, a rank takes its own, or one of the others' in turn. Padding that no source has is
        zero.
        """
        ranges = [source.stored_range(index, part) for source in self._sources]
        known = min(stop, max(last for _, last in ranges))
        for rank, target in enumerate(self._targets):
            begin, end = _overlap(target.stored_range(index, part), start, known)
            while begin < end:
                able = [number for number, (first, last) in enumerate(ranges) if first <= begin < last]
                own_sources = [number for number in able if self._readers[number] == rank]
                chosen = own_sources[0] if own_sources else able[rank % len(able)]
                until = min(end, ranges[chosen][1])
                yield chosen, rank, begin, until
                begin = until


def _overlap(stored: tuple[int, int], start: int, stop: int) -> tuple[int, int]:
    return max(stored[0], start), min(stored[1], stop)
