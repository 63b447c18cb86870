"""Communication levels along a strategy's axes, and HO-Ring (PaRO 3.4), in which links in and between nodes overlap.

A hierarchical ring of N nodes of M ranks gathers between nodes first, while links inside are idle, and then inside,
while links between nodes are. Here the ring between nodes hands on one *block* at a time, the cells of one node, and
the block that has arrived is gathered inside its new node while the next one travels:

    inter-node   | node n-1  | node n-2  | node n-3  |
    intra-node   | own node  | node n-1  | node n-2  | node n-3 |

This is the schedule of the paper's figure 4 with every block moved to where its data first exists. A reduce-scatter is
the mirror image. A rank sends as much as in the hierarchical ring: (N-1)/N of its M-th to other nodes, (M-1)/M inside.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import cast

import torch

from common.communication import Wait
from common.quantization import BLOCK, Bits, dequantize, quantize, quantized_nbytes
from fcdp.comms.rank_level import CommLevel, FlatRing, RankLevel, SideStream, nothing
from fcdp.strategy.strategy import BITS, Axis, Format, Ring
from fcdp.strategy.topology import Purpose, Topology
from fcdp.traffic import Traffic


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
        cells = blocks[:, :, self._intra_node.index]
        after, before = (node + 1) % nodes, (node - 1) % nodes

        def hand_on(block: int) -> list[Wait]:
            coming = (block - 1) % nodes
            return [self._inter_node.shift(row[block], after, row[coming], before) for row in cells]

        side = self._side_stream.start(rows)
        arriving = hand_on(node)
        with side.current():
            filled = [self._intra_node.gather(blocks[:, node])]

        def rest() -> None:
            nonlocal arriving
            for step in range(1, nodes):
                block = (node - step) % nodes
                for wait in arriving:
                    wait()
                side.follow()
                arriving = hand_on(block) if step < nodes - 1 else []
                with side.current():
                    filled.append(self._intra_node.gather(blocks[:, block]))
            with side.current():
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
        nodes = self._inter_node.size
        node = self._inter_node.index
        blocks = rows.unflatten(1, (nodes, -1))
        mine, sums = torch.empty((2, nodes, *output.shape), dtype=rows.dtype, device=rows.device)
        side = self._side_stream.start(rows)
        arrived: Wait = nothing
        for step in range(1, nodes + 1):
            block = (node + step) % nodes
            source = (node - step) % nodes
            with side.current():
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


# Quantized gathers and reductions (ZeRO++; ZeRO-topo III-C, V) send less, in blocks with a scale each:
# * Gather (int8): every rank quantizes its cells, sends bytes, and dequantizes what arrives; its own cells stay exact.
# * Reduce-scatter (int4): all-to-all in one hop. A ring would quantize at every step, adding an error each time; here
#   each cell is quantized once and added at its target in fp32, in the order of ranks, the target's own cell exactly.
# Cells travel in pieces, so that each is quantized or dequantized while others travel. Groups that FSDP2 gathers as
# plain bytes (mixed dtypes) are not quantized.

# Most pieces that a cell is cut into: all but one of them overlap, and each costs a message to every peer
PIECES = 4
SMALLEST_PIECE = 1 << 14  # fewest elements of a piece, unless the cell is smaller


class QuantizedLevel:
    """A :class:`CommLevel` that gathers and reduces along ``level`` and sends ``bits`` per element.

    It counts the bytes that travel, scales included. For reductions ``level`` is a :class:`RankLevel`."""

    def __init__(self, level: CommLevel, bits: Bits):
        self._level = level
        self._bits: Bits = bits
        self.axis = level.axis
        self.size = level.size
        self.index = level.index
        before = slice(0, self.index)
        after = slice(self.index + 1, self.size)
        self._others = [others for others in (before, after) if others.start < others.stop]
        self._side_stream = SideStream()

    def gather(self, rows: torch.Tensor) -> Wait:
        if not rows.is_floating_point() or not rows.numel():
            return self._level.gather(rows)
        mine = rows[:, self.index]
        bits = self._bits
        side = self._side_stream.start(rows)
        in_transit = []
        for start, stop in pieces(rows.size(2)):
            nbytes = quantized_nbytes(stop - start, bits)
            payload = torch.empty((*rows.shape[:2], nbytes), dtype=torch.uint8, device=rows.device)
            quantize(mine[:, start:stop], bits, out=payload[:, self.index])
            side.follow()
            with side.current():
                in_transit.append((start, stop, payload, self._level.gather(payload), side.mark()))

        def wait() -> None:
            for start, stop, payload, arrived, gathered in in_transit:
                arrived()
                side.join(until=gathered)
                for others in self._others:
                    dequantize(payload[:, others], stop - start, bits, rows[:, others, start:stop])
            in_transit.clear()

        if not rows.is_cuda:
            return wait
        wait()
        return nothing

    def reduce_scatter(self, rows: torch.Tensor, output: torch.Tensor) -> None:
        """See :meth:`RankLevel.reduce_scatter`; sums are taken in fp32."""
        level = self._level
        if not rows.is_floating_point() or not rows.numel() or not isinstance(level, RankLevel):
            return level.reduce_scatter(rows, output)
        in_transit = []
        for start, stop in pieces(rows.size(2)):
            nbytes = quantized_nbytes(stop - start, self._bits)
            sent = torch.empty((*rows.shape[:2], nbytes), dtype=torch.uint8, device=rows.device)
            for others in self._others:
                quantize(rows[:, others, start:stop], self._bits, out=sent[:, others])
            received = sent.new_empty((sent.size(0), self.size - 1, sent.size(2)))
            # What is sent has to stay until it is: hence it is kept here, too.
            in_transit.append((start, stop, sent, received, level.all_to_all(sent, received)))
        for start, stop, _, received, arrived in in_transit:
            arrived()
            mine = rows[:, self.index, start:stop]
            places = received.unbind(1)
            total = torch.zeros(mine.shape, dtype=torch.float32, device=mine.device)
            for number in range(self.size):
                if number == self.index:
                    total += mine
                else:
                    cells = places[number - (number > self.index)]
                    dequantize(cells, stop - start, self._bits, total, add=True)
            output[:, start:stop] = total


def pieces(count: int) -> Iterator[tuple[int, int]]:
    """Yield start and stop of the pieces in which ``count`` elements travel: whole blocks, but for the last."""
    width = max(-(-count // PIECES), SMALLEST_PIECE)
    width = -(-width // BLOCK) * BLOCK
    for start in range(0, count, width):
        yield start, min(start + width, count)


def make_levels(
    topology: Topology,
    axes: Sequence[Axis],
    purpose: Purpose,
    traffic: Traffic,
    ring: Ring,
    precision: Format = "bf16",
) -> list[CommLevel]:
    """Make the levels along ``axes``, fastest first; ``ho`` makes one of all. Collective: process groups are made.

    A reduction below bf16 takes one hop along each axis, as partial sums would be quantized at every step of a ring."""
    bits = BITS.get(precision)
    if purpose == "reduce" and bits is not None:
        return [QuantizedLevel(RankLevel(topology, axis, purpose, traffic), bits) for axis in axes]
    ranks = topology.ranks_per_node
    levels = [
        (FlatRing if axis.mixes_levels(ranks) else RankLevel)(topology, axis, purpose, traffic)
        for axis in axes
    ]
    joined: list[CommLevel] = list(levels)
    if ring == "ho" and levels:
        joined = [functools.reduce(HoRing, levels[1:], cast(CommLevel, levels[0]))]
    return joined if bits is None else [QuantizedLevel(level, bits) for level in joined]
