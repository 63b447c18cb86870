"""Every record's parameters and optimizer states, from the stores of some ranks into the stores of others.

Stores of other ranks hold the same elements of a record: cut elsewhere, padded to another length, in chunks of another
size. So a record is moved one kind of value at a time (parameters, low halves, each moment), in pieces of so many of
its elements: whoever can read a part of a piece sends it to whoever is to store it. All ranks make the same list of
such moves, so nobody has to ask.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from common.store import Extent, Layout, Store
from common.store.checksums import ExtentChecksums
from common.store.posix import aligned_bytes
from common.store.verify import ChecksummedExtent
from fuyou.layout.checksums import PARTS, Part, sealed_name
from fuyou.layout.model_layout import ModelLayout
from fuyou.layout.record import Record, allocate_extents
from fuyou.layout.share import Share
from fuyou.ranks.agreement import Agreement
from fuyou.schedule.memory_plan import chunk_elements

PIECE_ELEMENTS = 4 << 20
"""Elements of a record that are moved at once; a multiple of a page's, at two bytes each."""


@dataclass(frozen=True)
class Values:
    """One kind of value of a record."""

    part: Part
    width: int
    """Bytes of each."""
    before: int = 0
    """Bytes per element of what comes before it in each chunk of states."""


def values_of(record: Record) -> list[Values]:
    """All that is kept of a record."""
    found = [Values("parameters", record.unit_bytes)]
    if record.trainable:
        low, moment = 2 if record.precision.split else 0, record.precision.optimizer_dtype.itemsize
        found += [Values("states", 2)] if low else []
        found += [Values("states", moment, low), Values("states", moment, low + moment)]
    return found


class Portion:
    """Where everything lies in the store of one rank.

    Args:
        shape: of the whole model, shared with nobody.
        share: the rank's.
        directories: of its store.
        slots: how many it has.
        slot: that counts.
    """

    def __init__(self, shape: ModelLayout, share: Share, directories: int, slots: int, slot: int):
        shared = shape.shared(share)
        self.share, self.records, self.slot = share, shared.records, slot
        self.layout = Layout(directories)
        self._extents = allocate_extents(self.layout, self.records, slots)
        self._chunk_elements = chunk_elements(shared)

    def window(self, index: int, part: Part) -> tuple[int, int]:
        """First element, and end, of what the rank keeps of a record."""
        record = self.records[index]
        if part == "parameters":
            start = self.share.stored_start(record.units)
            return start, start + record.stored
        start = self.share.owned_start(record.numel)
        return start, start + record.owned

    def extent(self, index: int, part: Part) -> Extent:
        """Of the slot that counts."""
        places = getattr(self._extents[index], part)
        return places[self.slot if self.records[index].trainable else 0]

    def runs(self, index: int, values: Values, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Where elements ``[start, stop)``, all within the window, lie: offset in the extent, first byte among those of
        the elements asked for, and bytes."""
        first, _ = self.window(index, values.part)
        if values.part == "parameters":
            yield (start - first) * values.width, 0, (stop - start) * values.width
            return
        record = self.records[index]
        for chunk in record.chunks(self._chunk_elements):
            begin, end = max(start, first + chunk.start), min(stop, first + chunk.stop)
            if begin < end:
                at = chunk.start * record.precision.state_bytes + values.before * (chunk.stop - chunk.start)
                at += (begin - first - chunk.start) * values.width
                yield at, (begin - start) * values.width, (end - begin) * values.width


@dataclass(frozen=True)
class Source:
    """A store that is read from."""

    portion: Portion
    holder: int
    """The rank that reads it."""


@dataclass(frozen=True)
class Move:
    """Elements ``[start, stop)`` of a record go from a source to a rank."""

    source: int
    target: int
    start: int
    stop: int


def redistribute(
    sources: Sequence[Source],
    stores: dict[int, Store],
    targets: Sequence[Portion],
    store: Store,
    agreement: Agreement | None,
) -> list[ChecksummedExtent]:
    """Fill this rank's new ``store``. Collective. Returns the checksums of what it holds then, which is not yet synced.

    Args:
        sources: all stores of the old ranks, in their order, each read by one of the ranks that are here now.
        stores: those of them that this rank reads.
        targets: of the new ranks, in their order.
        agreement: with the other ranks, if there are any.
    """
    rank = agreement.share.rank if agreement is not None else 0
    sealed = []
    for record in targets[rank].records:
        sums = {
            part: ExtentChecksums(
                targets[rank].extent(record.index, part), store.directories, sealed_name(record, part)
            )
            for part in (PARTS if record.trainable else PARTS[:1])
        }
        longest = max(target.records[record.index].units for target in targets)
        for values in values_of(record):
            for start in range(0, longest, PIECE_ELEMENTS):
                stop = min(start + PIECE_ELEMENTS, longest)
                data = _piece(sources, stores, targets, agreement, (record.index, values, start, stop))
                if data is None:
                    continue
                begin = max(start, targets[rank].window(record.index, values.part)[0])
                end = begin + data.nbytes // values.width
                for at, first, nbytes in targets[rank].runs(record.index, values, begin, end):
                    place = targets[rank].extent(record.index, values.part)
                    store.write(place, data[first : first + nbytes].numpy(), at, nbytes, sums[values.part]).result()
        for part, seen in sums.items():
            sealed.append(
                ChecksummedExtent(sealed_name(record, part), targets[rank].extent(record.index, part), seen.values)
            )  # fmt: skip
    return sealed


def _piece(
    sources: Sequence[Source],
    stores: dict[int, Store],
    targets: Sequence[Portion],
    agreement: Agreement | None,
    piece: tuple[int, Values, int, int],
) -> torch.Tensor | None:
    """What this rank is to store of a piece, ``uint8``, brought here from wherever it is; None: nothing."""
    index, values, start, stop = piece
    rank = agreement.share.rank if agreement is not None else 0
    begin, end = _overlap(targets[rank].window(index, values.part), (start, stop))
    mine = torch.from_numpy(aligned_bytes((end - begin) * values.width)) if begin < end else None
    sends: list[tuple[int, torch.Tensor]] = []
    receives: list[tuple[int, torch.Tensor]] = []
    for move in moves(sources, targets, index, values, start, stop):
        holder, here = sources[move.source].holder, None
        if move.target == rank:
            assert mine is not None
            here = mine[(move.start - begin) * values.width : (move.stop - begin) * values.width]
        if holder == rank:
            data = torch.empty((move.stop - move.start) * values.width, dtype=torch.uint8) if here is None else here
            portion = sources[move.source].portion
            for at, first, nbytes in portion.runs(index, values, move.start, move.stop):
                place = portion.extent(index, values.part)
                stores[move.source].read_now(place, data[first : first + nbytes].numpy(), at, nbytes)
            if here is None:
                sends.append((move.target, data))
        elif here is not None:
            receives.append((holder, here))
    if agreement is not None:
        agreement.exchange(sends, receives)
    return mine


def moves(
    sources: Sequence[Source], targets: Sequence[Portion], index: int, values: Values, start: int, stop: int
) -> Iterator[Move]:
    """How elements ``[start, stop)`` of a record come to all ranks. Of what several sources have, a rank takes its own,
    or one of the others' in turn. Padding comes from nowhere: it is zero."""
    used = targets[0].records[index].used_units
    for rank, target in enumerate(targets):
        begin, end = _overlap(target.window(index, values.part), (start, min(stop, used)))
        while begin < end:
            able = [
                number
                for number, source in enumerate(sources)
                if source.portion.window(index, values.part)[0] <= begin < source.portion.window(index, values.part)[1]
            ]
            own = [number for number in able if sources[number].holder == rank]
            chosen = own[0] if own else able[rank % len(able)]
            until = min(end, sources[chosen].portion.window(index, values.part)[1])
            yield Move(chosen, rank, begin, until)
            begin = until


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return max(one[0], other[0]), min(one[1], other[1])
