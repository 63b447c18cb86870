"""The parameters that a compute task finds on the device, and the sums that their gradients are added to."""

from collections.abc import Iterator

import torch

from fuyou.layout.record import Kind, Record
from fuyou.model.streamed_model import StreamedModel
from fuyou.optimizer.gradient_sum import GradientSum, round_in_place, sum_of_squares
from fuyou.runtime.data_plane.buffers import Buffers
from fuyou.schedule.tasks import ComputeTask


class TaskParameters:
    """Parameters and gradients of one step's tasks."""

    def __init__(self, stack: StreamedModel, buffers: Buffers):
        self._stack = stack
        self._buffers = buffers
        self._sums: dict[int, GradientSum] = {}
        self._squares: list[torch.Tensor] = []

    def gradient_norm(self) -> float:
        """Return the norm of the whole gradient as the optimizer sees it (in the compute dtype), for a single rank."""
        return float(torch.stack(self._squares).sum().sqrt())

    def add(self, record: int, name: str, gradient: torch.Tensor) -> None:
        """Add to the gradient of a record's parameter, whose sum is open."""
        self._sums[record].add(name, gradient)

    def real(self, task: ComputeTask, kind: Kind | None = None) -> dict[str, torch.Tensor]:
        """Return the parameters of the task's records (of this kind) on the device, by all of their names, in the
        model's dtypes."""
        return {
            name: torch.nn.Parameter(views[slot.name].to(self._stack.dtype_of(name)), requires_grad=False)
            for record, views in self.views(task, kind)
            for slot in record.parameters
            for name in slot.names
        }

    def leaves(self, task: ComputeTask, kind: Kind | None = None) -> dict[str, torch.Tensor]:
        """Return :meth:`real` with leaves for what is trained, whose gradients go to their record's sum.

        Tied names share a leaf.
        """
        leaves: dict[str, torch.Tensor] = {}
        for record, views in self.views(task, kind):
            trained = record.trained_names
            parameters = {
                name: torch.nn.Parameter(view, requires_grad=name in trained) for name, view in views.items()
            }
            if trained:
                if record.index in task.first and record.index not in self._sums:
                    self._open_sum(record, task)
                self._sums[record.index].attach({name: parameters[name] for name in trained})
            for slot in record.parameters:
                leaf = parameters[slot.name].to(self._stack.dtype_of(slot.name))
                leaves.update(dict.fromkeys(slot.names, leaf))
        return leaves

    def open_sums(self, task: ComputeTask) -> None:
        """Begin the gradients that ``task`` is the first to add to."""
        for index in task.first:
            self._open_sum(self._buffers.layout.records[index], task)

    def _open_sum(self, record: Record, task: ComputeTask) -> None:
        buffer = self._sum_buffer(record, task.gradients[record.index])
        self._sums[record.index] = GradientSum(record, buffer)

    def views(
        self, task: ComputeTask, kind: Kind | None = None
    ) -> Iterator[tuple[Record, dict[str, torch.Tensor]]]:
        """Yield the task's records (of this kind), and their parameters in the device buffers by name."""
        for index, buffer in task.places.items():
            record = self._buffers.layout.records[index]
            if kind is not None and record.kind is not kind:
                continue
            flat = self._flat(record, buffer, decoded=not task.begins)
            # Each apart: some adapters swap a weight in place, which must not look like a change of its neighbours.
            yield record, {name: apart(view) for name, view in record.views(flat).items()}

    def _flat(self, record: Record, buffer: int, decoded: bool) -> torch.Tensor:
        """Return a record's parameters on the device.

        ``decoded`` says that an earlier micro-batch has brought them back into the compute dtype.
        """
        buffers = self._buffers.parameters[record.kind]
        if not record.decoded_nbytes:
            return buffers.values(buffer, record.numel, record.precision.dtype)
        flat = self._buffers.decoded.values(0, record.numel, record.precision.dtype)
        if not decoded:
            record.decode(buffers.bytes(buffer, record.device_nbytes), flat)
        return flat

    def _sum_buffer(self, record: Record, buffer: int) -> torch.Tensor:
        wide = self._buffers.wide.get(record.kind)
        if wide is not None and record.precision.split:
            return wide.values(0, record.numel, torch.float32)
        return self._buffers.gradients[record.kind].values(buffer, record.numel, record.precision.dtype)

    def finish_gradients(self, task: ComputeTask) -> None:
        """Round and square the gradients that are complete: of a tied embedding, the head's is not."""
        for index in task.visit.completes:
            self._finish_gradient(self._buffers.layout.records[index], task.gradients[index])

    def _finish_gradient(self, record: Record, buffer: int) -> None:
        total = self._sums.pop(record.index)
        total.finish()
        gradients = self._buffers.gradients[record.kind]
        rounded = gradients.values(buffer, record.numel, record.precision.dtype)
        if rounded.data_ptr() != total.flat.data_ptr():
            rounded.copy_(total.flat)
        elif rounded.dtype != total.flat.dtype:
            round_in_place(total.flat, rounded)
        self._buffers.absence_marks(record).mark(rounded, total.seen)
        if self._buffers.layout.share.world_size == 1:  # else it is a part of a sum
            self._squares.append(sum_of_squares(rounded))


def apart(buffer: torch.Tensor) -> torch.Tensor:
    """Return the same memory with a separate version counter.

    All buffers of a ring are views of one allocation and would share its counter: copies into *other* buffers, which
    lanes make while a block computes, would look to autograd as if what it has saved had been overwritten. That nothing
    is overwritten too early is the schedule's business.
    """
    return buffer.data
