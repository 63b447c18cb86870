"""Filling a new store with the first values of all records, in the memory of a few rows of a parameter."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from common.activity import advancing
from common.models.checkpoint.sources import WeightSource
from fuyou.layout.cutting import row_spans
from fuyou.layout.frozen_weights import FrozenDtype
from fuyou.layout.record import Kind, Record
from fuyou.layout.record_parts import ParameterSlot
from fuyou.optimizer.chunk_update import PASS_ELEMENTS
from fuyou.optimizer.moments import split
from fuyou.runtime.data_plane.data_plane import DataPlane


def fill_store(plane: DataPlane, source: WeightSource, target: int) -> None:
    """Write this rank's part of every record's first state: weights from ``source``; what is trained to slot
    ``target``, with zero moments.

    A host parameter buffer takes a record's weights and, where master weights are split, a gradient buffer their low 16
    bits; where there are two of each, a record is written while the next is read. Beyond that there are the rows that
    are read at once (:mod:`fuyou.layout.cutting`), or the whole of a parameter whose rows ``source`` cannot read alone.
    """
    reader = _ParameterReader(source)
    free = {kind: deque(range(_pairs_of_buffers(plane, kind))) for kind in Kind}
    # The oldest first
    writing: dict[Kind, deque[tuple[int, Callable[[], None]]]] = {kind: deque() for kind in Kind}

    def wait_for_oldest(kind: Kind) -> None:
        buffer, written = writing[kind].popleft()
        written()
        free[kind].append(buffer)

    for record in advancing(plane.buffers.layout.records):
        kind = record.kind
        if not free[kind]:
            wait_for_oldest(kind)
        buffer = free[kind].popleft()
        fill = _fill_compressed if record.frozen is FrozenDtype.CHECKPOINT else _fill_values
        fill(plane, reader, record, buffer)
        writing[kind].append((buffer, plane.create(record, target, buffer)))
        plane.heap.trim()
    for kind, pending in writing.items():
        while pending:
            wait_for_oldest(kind)


def _pairs_of_buffers(plane: DataPlane, kind: Kind) -> int:
    """Return how many records of a kind can be in host memory while a store is filled: two are enough."""
    counts = plane.buffers.plan.counts
    splits = any(record.trainable and record.precision.split for record in plane.buffers.layout.of_kind(kind))
    return max(1, min(2, counts.host(kind), counts.host_gradients(kind) if splits else 2))


def _fill_values(plane: DataPlane, reader: "_ParameterReader", record: Record, buffer: int) -> None:
    encodes = bool(record.decoded_nbytes)
    dtype = record.precision.dtype
    share = record.share
    payload = torch.from_numpy(plane.buffers.host_parameters(record.kind, buffer, record.parameter_nbytes))
    # A record that is encoded, as a whole, of which this rank then keeps its slice; otherwise just the slice.
    values = _room_for(plane, record) if encodes else payload.view(dtype).zero_()
    start = 0 if encodes else share.stored_start(record.numel)
    low = None
    low_start = share.owned_start(record.numel)
    if record.trainable and record.precision.split:
        kind = record.precision.low_dtype
        nbytes = record.owned * record.precision.low_dtype.itemsize
        low = torch.from_numpy(plane.buffers.host_gradients(record.kind, buffer, nbytes)).view(kind).zero_()
    stop = start + values.numel()
    slots = [slot for slot in record.parameters if slot.offset < stop and start < slot.offset + slot.span]
    for position, tensor in reader.read(record, slots):
        flat = tensor.reshape(-1)
        if low is None or flat.dtype == dtype:
            # Rounded to nearest, as transformers does. Numbers of the record's dtype have no low bits.
            _copy_range(values, start, flat, position)
        else:
            for first in range(0, flat.numel(), PASS_ELEMENTS):
                part = flat[first : first + PASS_ELEMENTS]
                high_part = torch.empty_like(part, dtype=dtype)
                low_part = torch.empty_like(part, dtype=low.dtype)
                split(part.to(torch.float32, copy=True), high_part, low_part)
                _copy_range(low, low_start, low_part, position + first)
                _copy_range(values, start, high_part, position + first)
        del tensor, flat
    if encodes:
        with _encoded_record(plane, record, payload) as encoded:
            record.frozen.encode(values, record.decayed, encoded)


class _ParameterReader:
    """Reads what records hold of parameters.

    Memory: a range of rows (:func:`fuyou.layout.cutting.row_spans`). Of a parameter whose rows the source cannot read
    alone, the whole; where its experts are in several records, from the first of these to the last.
    """

    def __init__(self, source: WeightSource):
        self.source = source
        # Parameters whose later experts are still to come, by first name
        self._cut: dict[str, torch.Tensor] = {}

    def read(self, record: Record, slots: Sequence[ParameterSlot]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the values of these ``slots`` of a record, in ranges, each with the element at which it begins.

        Values of wide parameters come as elements of the record, two for each number.
        """
        mentioned = {slot.names[0] for slot in record.parameters}
        self._cut = {name: value for name, value in self._cut.items() if name in mentioned}
        whole = [slot for slot in slots if not self.source.reads_rows(slot.names[0])]
        values = self.source.read([slot.names[0] for slot in whole if slot.names[0] not in self._cut])
        for slot in slots:
            for position, tensor in self._whole(slot, values) if slot in whole else self._rows(slot):
                if slot.wide:
                    numbers = tensor.to(torch.float32).reshape(-1)
                    yield position, numbers.view(record.precision.dtype)
                else:
                    yield position, tensor

    def _rows(self, slot: ParameterSlot) -> Iterator[tuple[int, torch.Tensor]]:
        position = slot.offset
        for first, stop in row_spans(slot):
            rows = self.source.read_rows(slot.names[0], first, stop)
            yield position, rows
            position += rows.numel() * slot.span // slot.numel
            del rows

    def _whole(
        self, slot: ParameterSlot, values: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        name = slot.names[0]
        whole = self._cut.pop(name) if name in self._cut else next(values)[1]
        if slot.experts is not None and slot.experts[1] < slot.all_experts:
            self._cut[name] = whole
        yield slot.offset, slot.taken_from(whole)


def _fill_compressed(plane: DataPlane, reader: _ParameterReader, record: Record, buffer: int) -> None:
    """Write this rank's part of a record that is kept in the checkpoint's own bytes.

    Memory: as :func:`fill_store`.
    """
    payload = torch.from_numpy(
        plane.buffers.host_parameters(record.kind, buffer, record.parameter_nbytes)
    ).zero_()
    with _encoded_record(plane, record, payload) as encoded:
        for slot, stored in record.stored_parameters(encoded):
            if slot.compressed is not None:
                slot.compressed.encode(
                    reader.source.read_compressed(slot.names[0], slot.compressed.parts), stored
                )
                continue
            plain = stored.view(record.precision.dtype)
            for start, value in reader.read(record, [slot]):
                plain[start - slot.offset :][: value.numel()].copy_(value.reshape(-1))


@contextmanager
def _encoded_record(plane: DataPlane, record: Record, payload: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield room for a whole encoded record, this rank's part of which goes to ``payload``: that, if it is alone."""
    if record.share.ranks_per_node == 1:
        yield payload
        return
    if plane.buffers.device.shares_host_memory:
        encoded = plane.buffers.parameters[record.kind].bytes(0, record.device_nbytes).zero_()
    else:
        encoded = torch.zeros(record.device_nbytes, dtype=torch.uint8)
    yield encoded
    payload.copy_(encoded[record.first_byte : record.first_byte + record.parameter_nbytes])


def _room_for(plane: DataPlane, record: Record) -> torch.Tensor:
    """Return zeros in host memory for a whole record that is to be encoded: where it will be decoded, if possible."""
    if plane.buffers.device.shares_host_memory:
        return plane.buffers.decoded.values(0, record.numel, record.precision.dtype).zero_()
    return torch.zeros(record.numel, dtype=record.precision.dtype)


def _copy_range(target: torch.Tensor, start: int, values: torch.Tensor, first: int) -> None:
    """Copy to ``target``, the elements from ``start`` on, what it holds of ``values``, the elements from ``first``."""
    begin = max(first, start)
    end = min(first + values.numel(), start + target.numel())
    if begin < end:
        target[begin - start : end - start] = values[begin - first : end - first]
