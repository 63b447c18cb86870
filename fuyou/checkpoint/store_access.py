"""Whole parameters into the store and out of it, in the memory of one record or one parameter."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from common.models.checkpoint.sources import WeightSource
from common.store import Store
from fuyou.layout.frozen_weights import FrozenDtype
from fuyou.layout.model_layout import ModelLayout
from fuyou.layout.record import ParameterSlot, Record, RecordExtents
from fuyou.optimizer.adam import PASS_ELEMENTS
from fuyou.optimizer.split_weights import join, split
from fuyou.runtime.data_plane import DataPlane


def fill_store(plane: DataPlane, source: WeightSource, target: int) -> None:
    """Write this rank's part of every record's first state: weights from ``source``; what is trained to slot
    ``target``, with zero moments.

    Host parameter buffer 0 takes a record's ``hi`` halves and gradient buffer 0 its ``lo`` halves, so this needs no
    memory beyond the plan but one parameter.
    """
    for record in plane.buffers.shape.records:
        if record.frozen is FrozenDtype.CHECKPOINT:
            _fill_compressed(plane, source, record, target)
            continue
        encodes = bool(record.decoded_nbytes)  # as a whole, of which this rank then keeps its slice
        stored = Window(record.share.stored_start(record.numel), record.share.stored(record.numel))
        stored = Window(0, record.numel) if encodes else stored
        owned = Window(record.share.owned_start(record.numel), record.owned)
        parameters = plane.buffers.host_parameters(record.kind, 0, record.parameter_nbytes)
        payload = torch.from_numpy(parameters)
        dtype = record.precision.dtype
        values = _room_for(plane, record) if encodes else payload.view(dtype).zero_()
        low = None
        if record.trainable and record.precision.split:
            low = torch.from_numpy(plane.buffers.host_gradients(record.kind, 0, owned.count * 2)).view(torch.int16)
            low.zero_()
        slots = {slot.name: slot for slot in record.parameters if stored.meets(slot.offset, slot.numel)}
        for name, tensor in source.read(list(slots)):
            start = slots[name].offset
            flat = tensor.reshape(-1)
            for first in range(0, flat.numel(), PASS_ELEMENTS):
                part = flat[first : first + PASS_ELEMENTS]
                if low is not None:
                    hi, lo = torch.empty_like(part, dtype=values.dtype), torch.empty_like(part, dtype=low.dtype)
                    split(part.to(torch.float32, copy=True), hi, lo)
                    owned.copy(low, lo, start + first)
                    part = hi
                stored.copy(values, part, start + first)  # rounded to nearest, as transformers does, if not split
            del tensor, flat
        if encodes:
            encoded = payload if record.share.ranks_per_node == 1 else _room_for_encoded(plane, record)
            record.frozen.encode(values, record.decayed, encoded)
            _keep_own(record, encoded, payload)
        plane.create(record, target)
        if low is not None:
            # An emulated device never writes a gradient. Halves read as one are full of denormal numbers, which make
            # Adam five times slower than it is.
            low.zero_()
        plane.heap.tidy()


def _fill_compressed(plane: DataPlane, source: WeightSource, record: Record, target: int) -> None:
    """Write this rank's part of a record that is kept in the checkpoint's own bytes. Memory: as :func:`fill_store`, and
    one tensor of the files instead of one parameter where that is compressed."""
    payload = torch.from_numpy(plane.buffers.host_parameters(record.kind, 0, record.parameter_nbytes))
    encoded = payload.zero_() if record.share.ranks_per_node == 1 else _room_for_encoded(plane, record)
    plain = source.read([slot.name for slot in record.parameters if slot.compressed is None])
    for slot, kept in record.kept(encoded):
        if slot.compressed is None:
            _, value = next(plain)
            kept.view(record.precision.dtype).copy_(value.reshape(-1))
        else:
            slot.compressed.encode(source.read_compressed(slot.name), kept)
    _keep_own(record, encoded, payload)
    plane.create(record, target)
    plane.heap.tidy()


def _keep_own(record: Record, encoded: torch.Tensor, payload: torch.Tensor) -> None:
    """Copy what this rank keeps of an encoded record, unless it is alone and has it in place."""
    if encoded is not payload:
        payload.copy_(encoded[record.first_byte : record.first_byte + record.parameter_nbytes])


def _room_for(plane: DataPlane, record: Record) -> torch.Tensor:
    """Zeros in host memory for a whole record that is to be encoded: where it will be decoded, if that is there."""
    if plane.buffers.device.shares_host_memory:
        return plane.buffers.decoded.values(0, record.numel, record.precision.dtype).zero_()
    return torch.zeros(record.numel, dtype=record.precision.dtype)


def _room_for_encoded(plane: DataPlane, record: Record) -> torch.Tensor:
    """Zeros in host memory for all of an encoded record: where it comes to the device, if that is there."""
    if plane.buffers.device.shares_host_memory:
        return plane.buffers.parameters[record.kind].bytes(0, record.device_nbytes).zero_()
    return torch.zeros(record.device_nbytes, dtype=torch.uint8)


@dataclass(frozen=True)
class Window:
    """The elements ``[start, start + count)`` of a record."""

    start: int
    count: int

    def meets(self, first: int, count: int) -> bool:
        """Whether any of the ``count`` elements from ``first`` on is among them."""
        return first < self.start + self.count and self.start < first + count

    def copy(self, target: torch.Tensor, values: torch.Tensor, first: int) -> None:
        """Copy to ``target`` ``[count]`` what is among them of ``values``, which begin at the record's ``first``."""
        begin, end = max(first, self.start), min(first + values.numel(), self.start + self.count)
        if begin < end:
            target[begin - self.start : end - self.start] = values[begin - first : end - first]


class StoreReader:
    """Reads parameters of a store at rest, in the state of one slot.

    Args:
        store: open.
        shape: the model's records.
        extents: their places.
        chunk_elements: how states are cut into chunks.
        slot: that holds the newest state of what is trained.
    """

    def __init__(
        self,
        store: Store,
        shape: ModelLayout,
        extents: Sequence[RecordExtents],
        chunk_elements: int,
        slot: int,
    ):
        self._store, self._shape, self._extents = store, shape, extents
        self._chunk_elements, self._newest = chunk_elements, slot

    def compute_weights(self, record: Record) -> dict[str, torch.Tensor]:
        """All of a record's parameters by first name, in the record's dtype, as views of one buffer."""
        return record.views(self._parameters(record))

    def masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter's name and fp32 master (or frozen value, in the dtype it is kept in), one at a time."""
        for record in self._shape.records:
            if record.decoded_nbytes:
                yield from self.compute_weights(record).items()
                continue
            for slot in record.parameters:
                yield slot.name, self._master(record, slot)

    def _parameters(self, record: Record) -> torch.Tensor:
        """In the record's dtype, ``[numel]``."""
        kept = self._kept(record)
        if not record.decoded_nbytes:
            return kept.view(record.precision.dtype)
        values = torch.empty(record.numel, dtype=record.precision.dtype)
        record.decode(kept, values)
        return values

    def _kept(self, record: Record) -> torch.Tensor:
        """All of a record's parameters as they are kept, ``uint8``."""
        kept = torch.empty(record.device_nbytes, dtype=torch.uint8)
        own = kept[record.first_byte : record.first_byte + record.parameter_nbytes]
        self._store.read_now(self._extents[record.index].parameters[self._slot(record)], own.numpy())
        return kept

    def _slot(self, record: Record) -> int:
        return self._newest if record.trainable else 0

    def _master(self, record: Record, slot: ParameterSlot) -> torch.Tensor:
        places = self._extents[record.index]
        file = self._slot(record)
        width = record.precision.parameter_bytes
        values = torch.empty(slot.numel, dtype=record.precision.dtype)
        raw = values.view(torch.uint8).numpy()
        self._store.read_now(places.parameters[file], raw, slot.offset * width, raw.nbytes)
        if not record.trainable or not record.precision.split:
            return values.view(slot.shape)
        low = np.empty(slot.numel, dtype=np.int16)
        state_bytes = record.precision.state_bytes
        stop = slot.offset + slot.numel
        for chunk in record.chunks(self._chunk_elements):
            first, last = max(chunk.start, slot.offset), min(chunk.stop, stop)
            if first < last:  # lo comes first in its chunk
                part = low[first - slot.offset : last - slot.offset].view(np.uint8)
                at = chunk.start * state_bytes + 2 * (first - chunk.start)
                self._store.read_now(places.states[file], part, at, part.nbytes)
        master = torch.empty(slot.numel, dtype=torch.float32)
        join(values, torch.from_numpy(low), master)
        return master.view(slot.shape)
