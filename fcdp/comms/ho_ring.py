"""HO-Ring (PaRO 3.4): all-gather and reduce-scatter in which links inside nodes and between nodes work together.

A hierarchical ring of N nodes of M ranks gathers between nodes first, while links inside are idle, and then inside,
while links between nodes are. Here the ring between nodes hands on one *block* at a time, the cells of one node, and
the block that has arrived is gathered inside its new node while the next one travels:

    inter-node   | node n-1  | node n-2  | node n-3  |
    intra-node   | own node  | node n-1  | node n-2  | node n-3 |

This is the schedule of the paper's figure 4 with every block moved to where its data first exists. A reduce-scatter is
the mirror image. A rank sends as much as in the hierarchical ring: (N-1)/N of its M-th to other nodes, (M-1)/M inside.
"""

import torch

from common.communication import Wait
from fcdp.comms.rank_level import CommLevel, RankLevel, nothing
from fcdp.comms.side_stream import SideStream
from fcdp.strategy.routes import Axis


class HoRing:
    """A :class:`CommLevel` of two axes, both active at once. With three axes, the faster two are also a HoRing."""

    def __init__(self, intra_node: CommLevel, inter_node: RankLevel):
        self._intra_node = intra_node
        self._inter_node = inter_node
        self.axis = Axis(intra_node.axis.stride, intra_node.size * inter_node.size)
        self.size = self.axis.size
        self.index = inter_node.index * intra_node.size + intra_node.index
        self._side_stream = SideStream()

    def gather(self, rows: torch.Tensor) -> Wait:
        """Fill every cell of ``rows`` ``[R, N * M, c]`` from the rank it belongs to.

        Return a function to call before reading. On CUDA the current stream is in order already."""
        nodes, node = self._inter_node.size, self._inter_node.index
        blocks = rows.unflatten(1, (nodes, -1))
        own = blocks[:, :, self._intra_node.index]
        after, before = (node + 1) % nodes, (node - 1) % nodes

        def hand_on(block: int) -> list[Wait]:
            coming = (block - 1) % nodes
            return [self._inter_node.shift(row[block], after, row[coming], before) for row in own]

        side = self._side_stream.start(rows)
        arriving = hand_on(node)
        with side:
            filled = [self._intra_node.gather(blocks[:, node])]

        def rest() -> None:
            nonlocal arriving
            for step in range(1, nodes):
                block = (node - step) % nodes
                for wait in arriving:
                    wait()
                side.follow()
                arriving = hand_on(block) if step < nodes - 1 else []
                with side:
                    filled.append(self._intra_node.gather(blocks[:, block]))
            with side:
                for wait in filled:
                    wait()
            side.join()

        if not rows.is_cuda:
            return rest
        rest()
        return nothing

    def reduce_scatter(self, rows: torch.Tensor, output: torch.Tensor) -> None:
        """Set ``output`` ``[R, c]`` to the sum over all ranks of their ``rows[:, <this rank>]``.

        Sums equal those of a reduction level by level, bit for bit: a node's sum goes to its target in one hop instead
        of being added to on its way. In every step all nodes send to the one at the same distance, as in a ring."""
        nodes, node = self._inter_node.size, self._inter_node.index
        blocks = rows.unflatten(1, (nodes, -1))
        mine, sums = torch.empty((2, nodes, *output.shape), dtype=rows.dtype, device=rows.device)
        side = self._side_stream.start(rows)
        arrived: Wait = nothing
        for step in range(1, nodes + 1):
            block, source = (node + step) % nodes, (node - step) % nodes
            with side:
                self._intra_node.reduce_scatter(blocks[:, block], mine[block])
            arrived()  # before the next one is sent: two nodes that send to one get in each other's way
            if block != node:
                side.join()
                arrived = self._inter_node.shift(mine[block], block, sums[source], source)
        side.join()
        sums[node] = mine[node]
        torch.add(sums[0], sums[1], out=output)
        for other in sums[2:]:
            output.add_(other)
