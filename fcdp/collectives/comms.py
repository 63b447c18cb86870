"""The collectives as FSDP2 takes them: ``set_custom_all_gather`` and ``set_custom_reduce_scatter``.

For one parameter group whose mesh is the N nodes by M ranks of two :class:`RankLevel`, numbered node by node. What
caches (``fcdp.all_gather``) or accumulates over micro-batches (``fcdp.reduce_scatter``) takes the levels or the ring
themselves.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from common.quantisation import Bits
from fcdp.all_gather import PendingGather
from fcdp.collectives.ho_ring import HoRing
from fcdp.collectives.quantised import QuantisedGather, QuantisedLevel
from fcdp.rank_level import RankLevel, Wait
from fcdp.reduce_scatter import is_average
from fcdp.strategy import Format, Ring

BITS: dict[Format, Bits] = {"int8": 8, "int4": 4}


class ShapedAllGather:
    """A group's all-gather as a strategy shapes it.

    Args:
        inside, across: the two levels; one of them may have one rank.
        ring: ``ho``, or else level by level: one hop where one level has all ranks.
        precision: what travels.
    """

    def __init__(self, inside: RankLevel, across: RankLevel, ring: Ring = "hierarchical", precision: Format = "bf16"):
        self._inside, self._across = inside, across
        both = HoRing(inside, across)
        self._gather: Callable[[torch.Tensor], Wait] = both.gather if ring == "ho" else self._level_by_level
        bits = BITS.get(precision)
        self._quantised = None if bits is None else QuantisedGather(both.own, self._gather, bits)

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for the output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill ``output_tensor`` ``[W * c]``, of which ``input_tensor`` ``[c]`` is this rank's part."""
        cells = output_tensor.view(self._across.size, self._inside.size, -1)
        quantised = self._quantised if cells.is_floating_point() else None
        wait = (quantised or self._gather)(cells)
        if cells.is_cuda:
            wait()
            return None
        pending = PendingGather(wait)
        if not async_op:
            pending.wait()
            return None
        return pending

    def _level_by_level(self, cells: torch.Tensor) -> Wait:
        """Across nodes, then inside: what a rank receives from afar it shares at once."""
        arrived = self._across.gather(cells[:, self._inside.index].unsqueeze(0))

        def rest() -> None:
            arrived()
            self._inside.gather(cells)()

        return rest


class ShapedReduceScatter:
    """A group's reduce-scatter as a strategy shapes it.

    With a precision below bf16, ``hierarchical`` is one hop inside and one across (ZeRO++), each quantised; give one
    level of all ranks for a single hop. ``ho`` is not quantised: its second level adds up what its first has summed.
    """

    def __init__(self, inside: RankLevel, across: RankLevel, ring: Ring = "hierarchical", precision: Format = "bf16"):
        bits = BITS.get(precision)
        self._ho = HoRing(inside, across) if ring == "ho" and bits is None else None
        self._inside = inside if bits is None else QuantisedLevel(inside, bits)
        self._across = across if bits is None else QuantisedLevel(across, bits)

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for the input, then for the output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce ``input_tensor`` ``[W * c]`` to this rank's ``output_tensor`` ``[c]``."""
        average = is_average(op)
        nodes, ranks = self._across.size, self._inside.size
        cells = input_tensor.view(nodes, ranks, -1)
        if self._ho is not None:
            self._ho.reduce_scatter(cells, output_tensor, average=average)
            return
        in_node = torch.empty((nodes, cells.size(2)), dtype=cells.dtype, device=cells.device)
        self._inside.reduce_scatter(cells, in_node)
        if average:
            in_node.div_(ranks)
        self._across.reduce_scatter(in_node.unsqueeze(0), output_tensor.unsqueeze(0))
        if average:
            output_tensor.div_(nodes)
