"""Two-level gradient reduction: inside the node first, then across nodes what is left, an M-th of it.

FSDP2 hands over the unsharded gradients of a group as W cells, ``[N, M, c]``: the cell of (n, m) belongs to that rank.

1. Inside the node every rank receives the N cells of its place m and adds them: ``[N, c]``.
2. Across nodes ranks in the same place exchange these; every rank adds the cell that is its own: ``[c]``.

Both steps add in rank order, so a sum depends neither on its place in memory nor on timing: ((g00 + g01) + ..) +
((g10 + g11) + ..) + .. for g of (node, place). It is the order of FSDP2's hybrid sharding for two ranks by two nodes.

With several micro-batches, step 1 is done for each and summed, and step 2 once: (N-1)/N of the gradients cross nodes
per optimizer step, however many micro-batches. The sums take 1/M of the group's gradients in reduce precision, on the
device, until the last micro-batch; before it, FSDP2 is told that the gradient is zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from common.errors import FinetuneError
from fcdp.rank_level import RankLevel


@dataclass
class MicroBatches:
    """Shared by the reductions of all groups."""

    is_last: bool = True
    """Whether the next backward is the step's last: gradients go across nodes, and ``.grad`` is valid after it."""


class TwoLevelReduceScatter:
    """FSDP2's reduce-scatter for one parameter group.

    Args:
        name: the group's, for messages.
        inside, across: the two levels.
        micro_batches: tells which backward is the last.
    """

    def __init__(self, name: str, inside: RankLevel, across: RankLevel, micro_batches: MicroBatches):
        self._name = name
        self._inside = inside
        self._across = across
        self._micro_batches = micro_batches
        self.partial: torch.Tensor | None = None
        """``[N, c]``: summed inside the node over micro-batches, and not yet across nodes."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for the input, then for the output. Never reused: the output becomes ``.grad``."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce ``input_tensor`` ``[W * c]`` to this rank's ``output_tensor`` ``[c]``.

        On return it is done, or in order on the current stream.
        """
        average = is_average(op)
        nodes, ranks = self._across.size, self._inside.size
        cells = input_tensor.view(nodes, ranks, -1)
        in_node = torch.empty((nodes, cells.size(2)), dtype=input_tensor.dtype, device=input_tensor.device)
        self._inside.reduce_scatter(cells, in_node)
        if average:
            in_node.div_(ranks)
        if self.partial is not None:
            if self.partial.shape != in_node.shape:
                raise FinetuneError(
                    f"Micro-batches of one step gave gradients of different sizes for '{self._name}' "
                    f"({self.partial.shape[-1]:,} and {in_node.shape[-1]:,} elements per rank). Which parameters "
                    "require gradients must not change between the micro-batches of a step."
                )
            in_node = self.partial.add_(in_node)
        if not self._micro_batches.is_last:
            self.partial = in_node
            output_tensor.zero_()
            return
        self.partial = None
        self._across.reduce_scatter(in_node.unsqueeze(0), output_tensor.unsqueeze(0))
        if average:
            output_tensor.div_(nodes)


def is_average(op: Any) -> bool:
    """Whether ``op`` divides by the number of ranks.

    Raises:
        FinetuneError: it is neither a sum nor an average.
    """
    if op == dist.ReduceOp.AVG:
        return True
    if op == dist.ReduceOp.SUM:
        return False
    raise FinetuneError(
        f"Gradients are reduced with {op}, which two-level reduction does not know: it sums and averages. Do not call "
        "set_gradient_divide_factor(), or call set_force_sum_reduction_for_comms(True), too."
    )
