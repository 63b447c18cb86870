"""Quantised gathers and reductions (ZeRO++; ZeRO-topo III-C, V): less to send, in blocks with a scale each.

* Gather (int8): every rank quantises its cell, what travels is bytes, and every rank, the owner included, dequantises
  all cells: all compute with the same weights. Nothing is quantised twice on its way, whatever ring carries it.
* Reduce-scatter (int4): all-to-all in one hop. A ring would quantise anew at every step, adding an error each time;
  here each cell is quantised once, sent straight to the rank that adds it, and added there in fp32, in the order of
  ranks. A rank's own cell is added as it is.

Cells travel in pieces: one is quantised while those before it are on their way, and dequantised while those after it
are. On CUDA the communicator's stream and the current stream overlap the same way.

Only floating-point data is quantised. FSDP2 gathers groups whose parameters differ in dtype as plain bytes (uint8);
these go as they are.
"""

from collections.abc import Callable, Iterator

import torch

from common.quantisation import BLOCK, Bits, dequantise, quantise, quantised_nbytes
from fcdp.collectives.beside import Beside
from fcdp.rank_level import RankLevel, Wait

PIECES = 4
"""Most pieces of a cell: all but one of them overlap, and each costs a message to every peer."""
SMALLEST_PIECE = 1 << 14
"""Elements below which a cell is not cut further."""


class QuantisedGather:
    """Any gather, of bytes instead of numbers.

    Args:
        own: the view of this rank's cells in a tensor ``[..., c]`` of all cells, whatever c.
        gather: fills such a tensor (``uint8``) from all ranks.
    """

    def __init__(self, own: Callable[[torch.Tensor], torch.Tensor], gather: Callable[[torch.Tensor], Wait], bits: Bits):
        self._own = own
        self._gather = gather
        self._bits: Bits = bits
        self._beside = Beside()

    def __call__(self, cells: torch.Tensor) -> Wait:
        """Fill ``cells`` ``[..., c]``, floating point, with what all ranks' cells are worth after quantisation.

        Returns:
            What to call before reading ``cells``.
        """
        data, bits = self._own(cells), self._bits
        beside = self._beside.start(cells)
        on_their_way = []
        for start, stop in pieces(cells.size(-1)):
            nbytes = quantised_nbytes(stop - start, bits)
            payload = torch.empty((*cells.shape[:-1], nbytes), dtype=torch.uint8, device=cells.device)
            quantise(data[..., start:stop], bits, out=self._own(payload))
            beside.follow()
            with beside:
                on_their_way.append((start, stop, payload, self._gather(payload), beside.mark()))

        def wait() -> None:
            for start, stop, payload, arrived, gathered in on_their_way:
                arrived()
                beside.join(until=gathered)
                cells[..., start:stop] = dequantise(payload, stop - start, bits)
            on_their_way.clear()

        return wait


class QuantisedLevel:
    """Stands for ``level`` wherever rows are gathered or reduced, and sends ``bits`` per element.

    The bytes that it counts are those that travel, scales included.
    """

    def __init__(self, level: RankLevel, bits: Bits):
        self._level = level
        self._bits: Bits = bits
        self.size = level.size
        self.index = level.index
        self._gather = QuantisedGather(lambda rows: rows[:, level.index], level.gather, bits)

    def gather(self, rows: torch.Tensor) -> Wait:
        """:meth:`RankLevel.gather`; this rank's cells come out quantised, too."""
        if self.size == 1 or not rows.is_floating_point() or not rows.numel():
            return self._level.gather(rows)
        return self._gather(rows)

    def reduce_scatter(self, rows: torch.Tensor, output: torch.Tensor) -> None:
        """:meth:`RankLevel.reduce_scatter`; sums are taken in fp32."""
        if self.size == 1 or not rows.is_floating_point() or not rows.numel():
            return self._level.reduce_scatter(rows, output)
        on_their_way = []
        for start, stop in pieces(rows.size(2)):
            sent = quantise(rows[..., start:stop], self._bits)
            received = sent.new_empty((sent.size(0), self.size - 1, sent.size(2)))
            # What is sent has to stay until it is: hence it is kept here, too.
            on_their_way.append((start, stop, sent, received, self._level.all_to_all(sent, received)))
        for start, stop, _, received, arrived in on_their_way:
            arrived()
            places = [dequantise(cells, stop - start, self._bits) for cells in received.unbind(1)]
            places.insert(self.index, rows[:, self.index, start:stop].float())
            total = places[0] if self.index else places[0].clone()
            for place in places[1:]:
                total += place
            output[:, start:stop] = total


def pieces(count: int) -> Iterator[tuple[int, int]]:
    """Start and stop of the pieces in which ``count`` elements travel: whole blocks, but for the last."""
    width = max(-(-count // PIECES), SMALLEST_PIECE)
    width = -(-width // BLOCK) * BLOCK
    for start in range(0, count, width):
        yield start, min(start + width, count)
