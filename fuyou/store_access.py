"""Whole parameters into the store and out of it, in the memory of one record or one parameter."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from common.models.sources import WeightSource
from common.store import Store
from fuyou.adam import PASS_ELEMENTS
from fuyou.data_plane import DataPlane
from fuyou.halves import join, split
from fuyou.records import ParameterSlot, Record, RecordExtents
from fuyou.schedule import StepShape


def fill_store(plane: DataPlane, source: WeightSource, target: int) -> None:
    """Write this rank's part of every record's first state to slot ``target``: weights from ``source``, zero moments.

    Host parameter buffer 0 takes a record's ``hi`` halves and gradient buffer 0 its ``lo`` halves, so this needs no
    memory beyond the plan but one parameter.
    """
    precision, share = plane.shape.precision, plane.shape.share
    for record in plane.shape.records:
        stored = Window(share.stored_start(record.numel), share.stored(record.numel))
        owned = Window(share.owned_start(record.numel), share.owned(record.numel))
        parameters = plane.host_parameters(record.outer, 0, stored.count * precision.parameter_bytes)
        values = torch.from_numpy(parameters).view(precision.dtype)
        values.zero_()
        low = torch.from_numpy(plane.host_gradients(record.outer, 0, owned.count * precision.parameter_bytes))
        low.zero_()
        slots = {slot.name: slot for slot in record.parameters if stored.meets(slot.offset, slot.numel)}
        for name, tensor in source.read(list(slots)):
            start = slots[name].offset
            flat = tensor.reshape(-1)
            for first in range(0, flat.numel(), PASS_ELEMENTS):
                part = flat[first : first + PASS_ELEMENTS].to(torch.float32, copy=True)
                if precision.split:
                    hi, lo = torch.empty_like(part, dtype=precision.dtype), torch.empty_like(part, dtype=torch.int16)
                    split(part, hi, lo)
                    owned.copy(low.view(torch.int16), lo, start + first)
                    part = hi
                stored.copy(values, part, start + first)
            del tensor, flat
        plane.create(record, target)


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
    """Reads parameters of a store at rest, in the state of one slot per record.

    Args:
        store: open.
        shape: the model's records.
        extents: their places.
        chunk_elements: how states are cut into chunks.
        slot_of: the slot of each record's newest state.
    """

    def __init__(
        self,
        store: Store,
        shape: StepShape,
        extents: Sequence[RecordExtents],
        chunk_elements: int,
        slot_of: Sequence[int],
    ):
        self._store, self._shape, self._extents = store, shape, extents
        self._chunk_elements, self._slot_of = chunk_elements, slot_of

    def compute_weights(self, record: Record) -> dict[str, torch.Tensor]:
        """All of a record's parameters by first name, in the compute dtype, as views of one buffer."""
        width = self._shape.precision.parameter_bytes
        buffer = torch.empty(record.numel * width, dtype=torch.uint8)
        self._store.read_now(self._extents[record.index].parameters[self._slot_of[record.index]], buffer.numpy())
        return record.views(buffer.view(self._shape.precision.dtype))

    def masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter's name and fp32 master, one at a time."""
        for record in self._shape.records:
            for slot in record.parameters:
                yield slot.name, self._master(record, slot)

    def _master(self, record: Record, slot: ParameterSlot) -> torch.Tensor:
        places = self._extents[record.index]
        file = self._slot_of[record.index]
        width = self._shape.precision.parameter_bytes
        values = torch.empty(slot.numel, dtype=self._shape.precision.dtype)
        raw = values.view(torch.uint8).numpy()
        self._store.read_now(places.parameters[file], raw, slot.offset * width, raw.nbytes)
        if not self._shape.precision.split:
            return values.view(slot.shape)
        low = np.empty(slot.numel, dtype=np.int16)
        state_bytes = self._shape.precision.state_bytes
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
