"""The reduction of a group's gradients: axis after axis, inside G's scope by every micro-batch, beyond it once a step.

FSDP2 hands over the unsharded gradients of a group as one cell for each rank of OS's scope. The closer ranks are, the
earlier they exchange, while there is most to reduce:

1. *reduce*: along the axes inside G's scope, scattering. If nothing is left to do, FSDP2 adds up micro-batches in
   ``.grad``; otherwise they are added up here, in fp32, and FSDP2 receives zeros before the last one.
2. *finish*: along the axes from G's scope to OS's, scattering: the rank's own cell.
3. *replicate*: over OS's replicas, by a reduction along the axes between them and a gather back.

So what is beyond G's scope is crossed once per step (PaRO 3.3). Along an axis ranks are added in their order: sums
depend neither on place in memory nor on timing; only flat rings have their own orders. Where OS is not sharded, FSDP2
calls :meth:`StagedReduction.add_up` instead."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from common.errors import FinetuneError
from common.mixed_sum import add_to_wider
from fcdp import fsdp2
from fcdp.comms.rank_level import CommLevel
from fcdp.grouping import ParameterGroup


@dataclass
class MicroBatches:
    """Where in a step the backward pass is; shared by the reductions of all groups."""

    is_last: bool = True  # whether the next backward pass is the step's last, after which ``.grad`` is valid


@dataclass(frozen=True)
class ReduceLevels:
    """The axes of a reduction, fastest first."""

    reduce: Sequence[CommLevel]  # axes inside G's scope
    finish: Sequence[CommLevel]  # axes from G's scope to OS's
    replicate: Sequence[CommLevel]  # axes between the replicas of OS's shards
    # The axes of ``replicate``, slowest first, with process groups for gathers
    gather_back: Sequence[CommLevel]


class StagedReduction:
    """FSDP2's reduce-scatter for one parameter group, and all that follows until the gradient is final.

    ``replica`` is this rank's number among those that hold the same shard."""

    def __init__(
        self, group: ParameterGroup, levels: ReduceLevels, replica: int, micro_batches: MicroBatches
    ):
        self._group = group
        self._levels = levels
        self._replica = replica
        self._micro_batches = micro_batches
        self.partial: torch.Tensor | None = None  # sums ``[cells, c]`` in fp32 of earlier micro-batches

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return memory for the input, then for the output. It is never reused: the output becomes ``.grad``."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce ``input_tensor`` ``[ranks * c]`` to this rank's ``output_tensor`` ``[c]``, in current-stream order."""
        average = op == dist.ReduceOp.AVG
        if not average and op not in (dist.ReduceOp.SUM, dist.ReduceOp.PREMUL_SUM):
            raise FinetuneError(
                f"Gradients are reduced with {op}, but what is installed here sums and averages only."
            )
        if op == dist.ReduceOp.PREMUL_SUM:
            # NCCL's, by ``set_gradient_divide_factor``; only pickling shows its factor
            input_tensor.mul_(float(op.__getstate__()[1]))
        cells = input_tensor.view(-1, output_tensor.numel())
        total = self._accumulate(scatter(cells, self._levels.reduce, average))
        if total is None:
            output_tensor.zero_()
            return
        total = scatter(total, self._levels.finish, average)
        output_tensor.copy_(self._over_replicas(total.view(-1)))

    def add_up(self, gradient: torch.Tensor) -> None:
        """Make ``gradient`` the mean over all ranks: FSDP2's hook after a reduction, where OS is not sharded."""
        if gradient.is_cuda:  # allocated on one stream of FSDP2's, and freed while this one may still use it
            gradient.record_stream(torch.cuda.current_stream())
        is_kept = not self._micro_batches.is_last and self.partial is None and gradient.dtype == torch.float32
        total = self._accumulate((gradient.clone() if is_kept else gradient).view(1, -1))
        if total is None:
            gradient.zero_()
        else:
            gradient.copy_(self._over_replicas(total.view(-1)))

    def _accumulate(self, cells: torch.Tensor) -> torch.Tensor | None:
        """Add the gradients of earlier micro-batches. Return None if more micro-batches will come."""
        if not (self._levels.finish or self._levels.replicate):
            return cells
        dtype = cells.dtype
        if self.partial is not None:
            if self.partial.shape != cells.shape:
                raise FinetuneError(
                    f"Micro-batches of one step gave gradients of different sizes for '{self._group.name}' "
                    f"({self.partial.numel():,} and {cells.numel():,} elements per rank). Which parameters "
                    "require gradients must not change between the micro-batches of a step."
                )
            add_to_wider(self.partial, cells)
            cells = self.partial
        if self._micro_batches.is_last:
            self.partial = None
            return cells.to(dtype)
        if cells.is_cuda:  # FSDP2's input, if G is not sharded: allocated on another stream than this one
            cells.record_stream(torch.cuda.current_stream())
        self.partial = cells.float()  # a sum of many in bf16 would lose small values
        return None

    def _over_replicas(self, total: torch.Tensor) -> torch.Tensor:
        """Return the mean of ``total`` ``[c]`` over replicas; their sum if the user chose FSDP2's divisor."""
        levels = self._levels
        if not levels.replicate:
            return total
        replicas = math.prod(level.size for level in levels.replicate)
        padding = -total.numel() % replicas
        cells = torch.nn.functional.pad(total, (0, padding)).view(replicas, -1)
        summed = scatter(cells, levels.replicate, fsdp2.divide_factor(self._group) is None)
        gathered = torch.empty_like(cells)
        gathered[self._replica] = summed[0]
        inner = replicas
        for level in levels.gather_back:
            inner //= level.size
            rows = gathered.view(-1, level.size, inner, gathered.size(1))[:, :, self._replica % inner]
            level.gather(rows)()
        return gathered.view(-1)[: total.numel()]


def scatter(cells: torch.Tensor, levels: Sequence[CommLevel], average: bool) -> torch.Tensor:
    """Reduce ``cells`` ``[n, c]`` along ``levels``, fastest first, and return this rank's cells of the result."""
    for level in levels:
        rows = cells.view(-1, level.size, cells.size(1))
        cells = torch.empty((rows.size(0), rows.size(2)), dtype=rows.dtype, device=rows.device)
        level.reduce_scatter(rows, cells)
        if average:
            cells.div_(level.size)
    return cells
