"""One training step of a small model, streamed as by the engine, without drives or an optimizer process.

The schedule, parts, and computation are the engine's; dictionaries replace what would move bytes.
"""

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any, cast

import torch

from fuyou.layout.model_layout import BufferCounts
from fuyou.layout.record import Record
from fuyou.layout.record_parts import ParameterSlot
from fuyou.model.open_model import OpenModel
from fuyou.model.recompute.replay import BlockReplay
from fuyou.model.training_batch import TrainingBatch
from fuyou.optimizer.absent_gradients import marked_absent
from fuyou.runtime.compute.step_computation import StepComputation, StepInputs
from fuyou.runtime.data_plane.data_plane import DataPlane
from fuyou.schedule.batch import Batch, BatchShape
from fuyou.schedule.memory_plan import MemoryPlan
from fuyou.schedule.scheduler import Scheduler
from fuyou.schedule.tasks import Activation, ComputeTask, known


@dataclass
class _Buffers:
    """Buffers that are allocated on first use, with the requested size."""

    by_index: dict[int, torch.Tensor] = field(default_factory=dict)

    def values(self, index: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        return self.bytes(index, count * dtype.itemsize).view(dtype)

    def bytes(self, index: int, count: int) -> torch.Tensor:
        held = self.by_index.get(index)
        if held is None or held.numel() < count:
            held = self.by_index[index] = torch.zeros(count, dtype=torch.uint8)
        return held[:count]


class SmallStep:
    """Streams steps of a model on the CPU, in fp32.

    Args:
        model: opened for the CPU in fp32.
        parameters: values by any of their names.
    """

    def __init__(self, model: OpenModel, parameters: Mapping[str, torch.Tensor]):
        self._model, self._shape = model, model.shape
        self._flat = {record.index: _flat(record, parameters) for record in self._shape.records}
        # As in a run: what a step has learnt about recomputing blocks, the next one makes use of.
        self._recomputations = BlockReplay()
        self._ranges: dict[str, dict[int, torch.Tensor | None]] = {}
        """Gradients of parameters in pieces, by the first of the experts, until all of them have come."""
        self.gradients: dict[str, torch.Tensor | None] = {}
        """Gradients by first name, in the order in which the backward pass has made them; None where nothing flows."""

    def run(self, given: Mapping[str, torch.Tensor], micro_rows: int, chunk: int | None = None) -> float:
        """Run a forward and a backward pass, with rows in chunks of ``chunk`` tokens or whole; return the loss, and
        leave :attr:`gradients`."""
        batch = TrainingBatch.of(self._model, given, own_loss=False)
        rows, length = batch.size
        planned = Batch(rows, length, micro_rows, chunk=chunk)
        room = 4 * planned.micro_batches * (len(self._shape.blocks) + 2)
        enough = {field.name: max(room, len(self._shape.records)) for field in fields(BufferCounts)}
        counts = BufferCounts(**enough)
        plan = MemoryPlan(
            counts,
            planned,
            ring_chunks=2,
            chunk_elements=1,
            activation_bytes=0,
            kept_bytes=0,
            head_columns=length,
            wide_blocks=False,
            wide_non_block=False,
            workspace_bytes=0,
            device_bytes=0,
            host_bytes=0,
        )
        shape = BatchShape(planned.micro_batches, 0, rows * length, chunks=planned.chunks)
        tasks = Scheduler(self._shape, counts).training_step(1, shape)
        plane = self._plane(plan)
        self.gradients = {}
        data_plane = cast(DataPlane, plane)
        cpu = torch.device("cpu")
        if planned.chunks > 1:
            micro = batch.chunks(planned.columns, cpu, self._model.stack)
        else:
            micro = batch.micro_batches(micro_rows, cpu, self._shape.precision.dtype)
        step = StepComputation(
            StepInputs(self._model, data_plane, tasks, batch, micro, self._recomputations, time.monotonic())
        )
        loss = float(step.forward())
        if step.router is not None:
            step.router.combine([step.router.local_sums()])
            loss += float(step.router.share)
        step.backward()
        return loss

    def _plane(self, plan: MemoryPlan) -> SimpleNamespace:
        parameters: dict[Any, _Buffers] = defaultdict(_Buffers)
        gradients: dict[Any, _Buffers] = defaultdict(_Buffers)
        records = self._shape.records

        def start(task: ComputeTask) -> None:
            for index, buffer in task.places.items():
                parameters[records[index].kind].by_index[buffer] = self._flat[index].view(torch.uint8)

        def finish(task: ComputeTask) -> None:
            if task.last and task.gradient is not None and task.visit.completes:
                record = records[known(task.visit.trained)]
                flat = gradients[record.kind].values(task.gradient, record.numel, record.precision.dtype)
                self._take(record, flat.clone())

        nothing = SimpleNamespace(trim=lambda: None)
        device = SimpleNamespace(
            torch_device=torch.device("cpu"), begin_compute=lambda task: None, end_compute=lambda task: None
        )
        buffers = SimpleNamespace(
            shape=self._shape,
            plan=plan,
            wide={},
            device=device,
            parameters=parameters,
            gradients=gradients,
            activations={kind: _Buffers() for kind in Activation},
            key_gradients=_Buffers(),
        )
        executor = SimpleNamespace(start=start, finish=finish)
        return SimpleNamespace(buffers=buffers, heap=nothing, executor=executor)

    def _take(self, record: Record, flat: torch.Tensor) -> None:
        for slot, view in zip(record.parameters, record.views(flat).values(), strict=True):
            value = None if marked_absent(view.reshape(-1)[:1]).any() else view
            if slot.experts is None:
                self.gradients[slot.name] = value
            else:
                self._ranges.setdefault(slot.names[0], {})[slot.experts[0]] = value
                self._join(slot)

    def _join(self, slot: ParameterSlot) -> None:
        name, ranges = slot.names[0], self._ranges[slot.names[0]]
        count = sum(other.names[0] == name for record in self._shape.records for other in record.parameters)
        if len(ranges) == count:
            parts = [ranges[start] for start in sorted(ranges)]
            there = [part for part in parts if part is not None]
            assert len(there) in (0, count), f"some experts of {name} have gradients, and some have none"
            self.gradients[name] = torch.cat(there) if there else None
            del self._ranges[name]


def _flat(record: Record, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
    flat = torch.zeros(record.numel, dtype=record.precision.dtype)
    views = record.views(flat)
    for slot in record.parameters:
        whole = next(parameters[name].detach() for name in slot.names if name in parameters)
        views[slot.name].copy_(slot.taken_from(whole))
    return flat
