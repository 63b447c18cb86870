"""One ring through the ranks of several levels, as NCCL's and gloo's own collectives go (the strategies' ``flat``).

Every rank sends to the next one only, so of all ranks of a node one sends to another node, and (E-1)/E of the buffer
passes each border, E being the ranks of the ring. Exchanging directly, as :class:`RankLevel` does inside one level,
would send it from every rank of the node. NCCL has such rings itself. gloo has one for gathers; its reduce-scatter is
an all-reduce, so that ring is built here from point-to-point messages.
"""

import torch

from common.communication.point_to_point import Wait
from fcdp.comms.rank_level import RankLevel, all_gather, uses_gloo


class FlatRing(RankLevel):
    """A :class:`RankLevel` along an axis on whose lines are ranks of one node and of others."""

    def gather(self, rows: torch.Tensor) -> Wait:
        """See :meth:`RankLevel.gather`."""
        if not uses_gloo(self._group, rows.device) or rows.device.type != "cpu":
            return super().gather(rows)
        self._count(rows)
        if rows.size(0) == 1 and rows.is_contiguous():
            work = all_gather(rows.view(-1), rows[0, self.index], self._group, async_op=True)

            def wait() -> None:
                work.wait()

            return wait
        return lambda: self._pass_on(rows)

    def reduce_scatter(self, rows: torch.Tensor, output: torch.Tensor) -> None:
        """See :meth:`RankLevel.reduce_scatter`; a cell's sum begins at the rank after its own, and ends at its own."""
        if not uses_gloo(self._group, rows.device) or rows.device.type != "cpu":
            super().reduce_scatter(rows, output)
            return
        self._count(rows)
        arrived = torch.empty_like(output)
        carried = rows[:, self.index - 1].contiguous()
        for step in range(1, self.size):
            self._hand_on(carried, arrived)
            cell = (self.index - 1 - step) % self.size
            if step == self.size - 1:
                torch.add(arrived, rows[:, cell], out=output)
            else:
                carried = arrived + rows[:, cell]

    def _pass_on(self, rows: torch.Tensor) -> None:
        """Gather by sending on, in every step, the cell that has arrived last."""
        for step in range(self.size - 1):
            sent, came = (self.index - step) % self.size, (self.index - step - 1) % self.size
            arrived = torch.empty_like(rows[:, came], memory_format=torch.contiguous_format)
            self._hand_on(rows[:, sent].contiguous(), arrived)
            rows[:, came].copy_(arrived)

    def _hand_on(self, sent: torch.Tensor, arrived: torch.Tensor) -> None:
        self._swap(sent, (self.index + 1) % self.size, arrived, (self.index - 1) % self.size)()

    def _count(self, rows: torch.Tensor) -> None:
        """Count what this rank sends, all of which goes to its neighbour."""
        rank, ranks_per_node = self._topology.rank, self._topology.ranks_per_node
        step = self.axis.stride if self.index < self.size - 1 else self.axis.stride * (1 - self.size)
        inter_node = (rank + step) // ranks_per_node != rank // ranks_per_node
        nbytes = rows.numel() // self.size * (self.size - 1) * rows.element_size()
        self._traffic.sent(self._purpose, "inter_node" if inter_node else "intra_node", nbytes)
