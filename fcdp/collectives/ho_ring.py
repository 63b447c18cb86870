"""HO-Ring (PaRO 3.4): all-gather and reduce-scatter in which links inside nodes and between nodes work together.

Data is seen as cells ``[N, M, c]``, one for every (node, place in the node). A hierarchical ring gathers across nodes
first, while links inside are idle, and inside then, while links between nodes are. Here the ring across nodes hands on
one *block* at a time, the cells ``[n, :]`` of one node, and the block that has arrived goes round inside its new node
while the next one is on its way:

    across   | node n-1  | node n-2  | node n-3  |
    inside   | own node  | node n-1  | node n-2  | node n-3 |

The paper's figure 4 has the own node's block beside the ring across and all others after it; this is that schedule
with every block moved to where its data first exists, so only one block is left to go round by itself. A reduce-scatter
is the mirror image: a block is summed inside while the one before it crosses nodes.

What a rank sends is what it sends in the hierarchical ring: (N-1)/N of its M-th across nodes, (M-1)/M inside.
"""

import torch

from fcdp.collectives.beside import Beside
from fcdp.rank_level import RankLevel, Wait


class HoRing:
    """Both levels of the cluster at once.

    Args:
        inside, across: process groups of their own, so that on NCCL neither waits for the other.
    """

    def __init__(self, inside: RankLevel, across: RankLevel):
        self.inside = inside
        self.across = across
        self._beside = Beside()

    def own(self, cells: torch.Tensor) -> torch.Tensor:
        """This rank's cell ``[c]``, a view."""
        return cells[self.across.index, self.inside.index]

    def gather(self, cells: torch.Tensor) -> Wait:
        """Fill ``cells`` ``[N, M, c]`` from the ranks they belong to; :meth:`own` holds this rank's data.

        Returns:
            What to call before reading. On CUDA everything is in order on the current stream when this returns; on the
            CPU the first step is under way and the others are done by that call.
        """
        nodes, node, place = self.across.size, self.across.index, self.inside.index
        after, before = (node + 1) % nodes, (node - 1) % nodes

        def hand_on(block: int) -> Wait:
            return self.across.shift(cells[block, place], after, cells[(block - 1) % nodes, place], before)

        side = self._beside.start(cells)
        arriving = hand_on(node) if nodes > 1 else None
        with side:
            filled = [self.inside.gather(cells[node : node + 1])]

        def rest() -> None:
            nonlocal arriving
            for step in range(1, nodes):
                block = (node - step) % nodes
                assert arriving is not None
                arriving()
                side.follow()
                arriving = hand_on(block) if step < nodes - 1 else None
                with side:
                    filled.append(self.inside.gather(cells[block : block + 1]))
            with side:
                for wait in filled:
                    wait()
            side.join()

        if not cells.is_cuda:
            return rest
        rest()
        return _nothing

    def reduce_scatter(self, cells: torch.Tensor, output: torch.Tensor, *, average: bool = False) -> None:
        """``output`` ``[c]`` = sum over all ranks of their :meth:`own` cell's counterpart in ``cells``.

        Sums are those of the two-level reduction, bit for bit: inside each node in the order of ranks, then in the
        order of nodes. So that they can be, a node's sum goes to the node it is for in one hop instead of being added
        to on its way. In every step all nodes send to the one at the same distance, which loads links as a ring does.

        Args:
            cells: ``[N, M, c]``, left as they are.
            average: divide by ranks after the first level and by nodes after the second.
        """
        nodes, node = self.across.size, self.across.index
        mine, sums = torch.empty((2, nodes, cells.size(2)), dtype=cells.dtype, device=cells.device)
        side = self._beside.start(cells)
        arriving = []
        for step in range(1, nodes + 1):
            block, source = (node + step) % nodes, (node - step) % nodes
            with side:
                self.inside.reduce_scatter(cells[block : block + 1], mine[block : block + 1])
                if average:
                    mine[block].div_(self.inside.size)
            if block != node:
                side.join()
                arriving.append(self.across.shift(mine[block], block, sums[source], source))
        side.join()
        for wait in arriving:
            wait()
        sums[node] = mine[node]
        output.copy_(sums[0])
        for other in sums[1:]:
            output.add_(other)
        if average:
            output.div_(nodes)


def _nothing() -> None:
    """In order on the current stream."""
