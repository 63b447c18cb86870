"""Handlers of the tasks that move bytes between ranks."""

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from fuyou.optimizer.gradient_sum import sum_of_squares
from fuyou.runtime.data_plane.buffers import Buffers
from fuyou.runtime.executor import Handler
from fuyou.runtime.ranks import ClusterTopology, gather, reduce_scatter
from fuyou.schedule.memory_plan import REDUCTION_BYTES
from fuyou.schedule.tasks import Op, Task, known


class RankHandlers:
    """The handlers of tasks between ranks, one for each kind.

    Each kind has its own process group and its own lane (on NCCL, one lane for all that launch there), and
    every rank's list has the same tasks in the same order, so no two ranks ever wait for each other crosswise.
    """

    def __init__(self, buffers: Buffers, topology: ClusterTopology):
        self._buffers = buffers
        # Here, and not in the lanes' threads: the ranks may have to make them together.
        self._gather_groups = topology.gather_groups
        self._reduce_groups = topology.reduce_groups
        self._squares: dict[int, list[torch.Tensor]] = {}
        self._checksums: dict[int, int] = {}

    def handlers(self) -> dict[Op, Handler]:
        return {
            Op.PARAMETER_GATHER: self._gather,
            Op.GRADIENT_REDUCE: self._reduce,
            Op.GRADIENT_EXCHANGE: self._exchange,
            Op.PARAMETER_SPREAD: self._spread,
        }

    def take_squares(self, step: int) -> torch.Tensor:
        """Return the sum of squares of what this rank owns of the gradient of ``step``, whose reductions are done."""
        return torch.stack(self._squares.pop(step)).sum()

    def take_checksum(self, step: int) -> int:
        """Return the checksum of all parameters that this rank stores, as ``step`` has left them.

        It is equal on all nodes, or something is broken; 0 for a single node, whose parameters nobody else has.
        """
        checksum = self._checksums.pop(step, 0)
        for older in [other for other in list(self._checksums) if other < step]:
            # The lane adds to it meanwhile
            del self._checksums[older]
        return checksum

    def _gather(self, task: Task) -> None:
        record = self._buffers.layout.records[known(task.record)]
        flat = self._buffers.parameters[record.kind].bytes(known(task.target), record.device_nbytes)
        filled = [count * record.unit_bytes for count in record.filled_slices]
        self._run(
            task,
            self._gather_groups.intra_node,
            lambda group: gather(flat.view(group.size(), -1), group, filled),
        )

    def _reduce(self, task: Task) -> None:
        flat, filled = self._gradient(task), self._buffers.layout.records[known(task.record)].filled_slices

        def work(group: dist.ProcessGroup) -> None:
            reduce_scatter(flat.view(group.size(), -1), group, filled, REDUCTION_BYTES)
            if self._buffers.layout.share.nodes == 1:
                self._square(task, flat)

        self._run(task, self._reduce_groups.intra_node, work)

    def _exchange(self, task: Task) -> None:
        flat = self._gradient(task)
        share = self._buffers.layout.share
        start = share.stored_start(flat.numel())
        stored = flat[start : start + share.stored(flat.numel())]
        filled = self._buffers.layout.records[known(task.record)].filled_parts

        def work(group: dist.ProcessGroup) -> None:
            reduce_scatter(stored.view(group.size(), -1), group, filled, REDUCTION_BYTES)
            self._square(task, flat)

        self._run(task, self._reduce_groups.inter_node, work)

    def _spread(self, task: Task) -> None:
        record = self._buffers.layout.records[known(task.record)]
        stored = torch.from_numpy(
            self._buffers.host_parameters(record.kind, known(task.source), record.parameter_nbytes)
        )
        filled = [count * record.precision.parameter_bytes for count in record.filled_parts]

        def work(group: dist.ProcessGroup) -> None:
            gather(stored.view(group.size(), -1), group, filled)
            # Cheap, and enough to notice what no protocol does: words are added up, each record's times an odd number.
            words = int(stored.numpy().view(np.uint64).sum(dtype=np.uint64))
            words *= 2 * record.index + 1
            self._checksums[task.step] = (self._checksums.get(task.step, 0) + words) % (1 << 64)

        self._run(task, self._gather_groups.inter_node, work)

    def _gradient(self, task: Task) -> torch.Tensor:
        record = self._buffers.layout.records[known(task.record)]
        return self._buffers.gradients[record.kind].values(
            known(task.source), record.numel, record.precision.dtype
        )

    def _square(self, task: Task, flat: torch.Tensor) -> None:
        """Add what this rank owns of a gradient to its sum of squares: the norm is that of the sum over all ranks."""
        share = self._buffers.layout.share
        start = share.owned_start(flat.numel())
        squares = sum_of_squares(flat[start : start + share.owned(flat.numel())])
        self._squares.setdefault(task.step, []).append(squares)

    def _run(
        self, task: Task, group: dist.ProcessGroup | None, work: Callable[[dist.ProcessGroup], None]
    ) -> None:
        assert group is not None
        self._buffers.device.exchange(task, lambda: work(group))
