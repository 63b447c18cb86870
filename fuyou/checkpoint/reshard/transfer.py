"""Moving every record's parameters and optimizer states from the stores of some ranks into the stores of others.

Stores of different ranks hold the same elements of a record: cut elsewhere, padded to another length, in chunks of
another size. So a record is moved one kind of value at a time (parameters, low 16 bits of the master weights, each
moment), in pieces of :data:`PIECE_ELEMENTS` elements: each reader of a part of a piece sends it to its new owner.
All ranks make the same list of such transfers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from common.memory.buffers import round_up
from common.store import Extent, Layout, Store
from common.store.backends.posix import aligned_bytes
from common.store.checksums import ExtentChecksums
from common.store.verify import ChecksummedExtent
from fuyou.layout.checksums import PARTS, Part, sealed_name
from fuyou.layout.model_layout import ModelLayout
from fuyou.layout.optimizer_state import StateComponent
from fuyou.layout.record import Record, allocate_extents
from fuyou.layout.share import Share
from fuyou.runtime.ranks.agreement import Agreement
from fuyou.schedule.memory_plan import chunk_elements

PIECE_ELEMENTS = 4 << 20  # Elements of a record that are moved at once; a multiple of a page's, at two bytes each


@dataclass(frozen=True)
class ValueKind:
    """One kind of value that is stored of a record: its parameters, or one component of the optimizer states."""

    part: Part
    width: int  # Bytes of one value
    per: int = 1  # Elements that share one value
    before: tuple[StateComponent, ...] = ()  # Components that precede it in each chunk of states

    def nbytes(self, elements: int) -> int:
        """Return the bytes of the values of this many elements, a multiple of :attr:`per`."""
        return elements // self.per * self.width


def value_kinds(record: Record) -> list[ValueKind]:
    """Return every kind of value that is stored of a record."""
    kinds = [ValueKind("parameters", record.unit_bytes)]
    if record.trainable:
        parts = record.precision.components
        kinds += [
            ValueKind("states", component.dtype.itemsize, component.per, parts[:at])
            for at, component in enumerate(parts)
        ]
    return kinds


class ShardLayout:
    """Where everything lies in the store of one rank.

    Args:
        model: layout of the whole model, shared with nobody.
        slot: the one that counts.
    """

    def __init__(self, model: ModelLayout, share: Share, directories: int, slots: int, slot: int):
        shared = model.shared(share)
        self.share, self.records, self.slot = share, shared.records, slot
        self.layout = Layout(directories)
        self._extents = allocate_extents(self.layout, self.records, slots)
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

    def byte_runs(self, index: int, kind: ValueKind, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Return where elements ``[start, stop)``, all of them stored here, lie in the extent.

        Returns:
            For each contiguous run: its offset in the extent, its first byte counted from that of element ``start``,
            and its length in bytes.
        """
        first, _ = self.stored_range(index, kind.part)
        if kind.part == "parameters":
            yield (start - first) * kind.width, 0, (stop - start) * kind.width
            return
        record = self.records[index]
        for chunk in record.chunks(self._chunk_elements):
            begin, end = max(start, first + chunk.start), min(stop, first + chunk.stop)
            if begin < end:
                at = record.precision.state_nbytes(chunk.start)
                at += sum(component.nbytes(chunk.stop - chunk.start) for component in kind.before)
                at += kind.nbytes(begin - first - chunk.start)
                yield at, kind.nbytes(begin - start), kind.nbytes(end - begin)


@dataclass(frozen=True)
class SourceShard:
    """An old rank's store, which one of the ranks running now reads from."""

    layout: ShardLayout
    reader: int  # Rank that reads it


@dataclass(frozen=True)
class RangeTransfer:
    """Elements ``[start, stop)`` of a record that go from a source (by its number) to a rank."""

    source: int
    target: int
    start: int
    stop: int


@dataclass(frozen=True)
class _ValueRange:
    """Elements ``[start, stop)`` of one kind of value of a record."""

    record: int
    kind: ValueKind
    start: int
    stop: int


class RecordTransfer:
    """Moves all records from the stores of the old ranks into those of the new ones. Every rank makes one.

    Args:
        sources: all stores of the old ranks, in their order.
        stores: those of them that this rank reads, open, by their number.
        targets: layouts of all new stores, in the order of ranks.
    """

    def __init__(
        self,
        sources: Sequence[SourceShard],
        stores: dict[int, Store],
        targets: Sequence[ShardLayout],
        agreement: Agreement,
    ):
        self._sources, self._stores, self._targets, self._agreement = sources, stores, targets, agreement
        self._rank = agreement.share.rank

    def fill(self, store: Store) -> list[ChecksummedExtent]:
        """Fill this rank's new ``store``, and return the checksums of what it holds then. Collective.

        Nothing is synced yet.
        """
        target = self._targets[self._rank]
        sealed = []
        for record in target.records:
            sums = {
                part: ExtentChecksums(target.extent(record.index, part), store.directories, sealed_name(record, part))
                for part in (PARTS if record.trainable else PARTS[:1])
            }
            longest = max(target.records[record.index].units for target in self._targets)
            for kind in value_kinds(record):
                for start in range(0, longest, PIECE_ELEMENTS):
                    piece = _ValueRange(record.index, kind, start, min(start + PIECE_ELEMENTS, longest))
                    self._write(store, piece, self._gather(piece), sums[kind.part])
            for part, written in sums.items():
                sealed.append(
                    ChecksummedExtent(sealed_name(record, part), target.extent(record.index, part), written.values)
                )
        return sealed

    def _write(self, store: Store, piece: _ValueRange, data: torch.Tensor | None, sums: ExtentChecksums) -> None:
        if data is None:
            return
        target, kind = self._targets[self._rank], piece.kind
        begin = max(piece.start, target.stored_range(piece.record, kind.part)[0])
        extent = target.extent(piece.record, kind.part)
        for at, first, nbytes in target.byte_runs(
            piece.record, kind, begin, begin + data.nbytes // kind.width * kind.per
        ):
            store.write(extent, data[first : first + nbytes].numpy(), at, nbytes, sums).result()

    def _gather(self, piece: _ValueRange) -> torch.Tensor | None:
        """Return what this rank is to store of a piece, ``uint8``, from wherever it is; None if that is nothing."""
        kind = piece.kind
        stored = self._targets[self._rank].stored_range(piece.record, kind.part)
        begin, end = _overlap(stored, (piece.start, piece.stop))
        mine = torch.from_numpy(aligned_bytes(kind.nbytes(end - begin))) if begin < end else None
        sends: list[tuple[int, torch.Tensor]] = []
        receives: list[tuple[int, torch.Tensor]] = []
        for transfer in self._plan(piece):
            source, received = self._sources[transfer.source], None
            if transfer.target == self._rank:
                assert mine is not None
                received = mine[kind.nbytes(transfer.start - begin) : kind.nbytes(transfer.stop - begin)]
            if source.reader == self._rank:
                nbytes = kind.nbytes(transfer.stop - transfer.start)
                data = torch.empty(nbytes, dtype=torch.uint8) if received is None else received
                self._read(transfer, piece, data)
                if received is None:
                    sends.append((transfer.target, data))
            elif received is not None:
                receives.append((source.reader, received))
        self._agreement.exchange(sends, receives)
        return mine

    def _read(self, transfer: RangeTransfer, piece: _ValueRange, data: torch.Tensor) -> None:
        layout = self._sources[transfer.source].layout
        extent = layout.extent(piece.record, piece.kind.part)
        for at, first, nbytes in layout.byte_runs(piece.record, piece.kind, transfer.start, transfer.stop):
            self._stores[transfer.source].read_now(extent, data[first : first + nbytes].numpy(), at, nbytes)

    def _plan(self, piece: _ValueRange) -> Iterator[RangeTransfer]:
        """Return how a piece comes to all ranks.

        Of what several sources have, a rank takes its own, or one of the others' in turn. Padding comes from nowhere:
        it is zero.
        """
        index, part = piece.record, piece.kind.part
        used = round_up(self._targets[0].records[index].used_units, piece.kind.per)
        for rank, target in enumerate(self._targets):
            begin, end = _overlap(target.stored_range(index, part), (piece.start, min(piece.stop, used)))
            while begin < end:
                ranges = [source.layout.stored_range(index, part) for source in self._sources]
                able = [number for number, (first, last) in enumerate(ranges) if first <= begin < last]
                own_sources = [number for number in able if self._sources[number].reader == rank]
                chosen = own_sources[0] if own_sources else able[rank % len(able)]
                until = min(end, ranges[chosen][1])
                yield RangeTransfer(chosen, rank, begin, until)
                begin = until


def _overlap(part: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return max(part[0], other[0]), min(part[1], other[1])
