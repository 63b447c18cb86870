"""Quantised gathers and reductions (ZeRO++; ZeRO-topo III-C, V): less to send, in blocks with a scale each.

* Gather (int8): every rank quantises its cells, sends bytes, and dequantises what arrives; its own cells stay exact.
* Reduce-scatter (int4): all-to-all in one hop. A ring would quantise at every step, adding an error each time; here
  each cell is quantised once and added at its target in fp32, in the order of ranks, the target's own cell exactly.

Cells travel in pieces, so that one is quantised or dequantised while others travel. Groups that FSDP2 gathers as plain
bytes (mixed dtypes) are not quantised."""

from collections.abc import Iterator

import torch

from common.communication import Wait
from common.quantisation import BLOCK, Bits, dequantise, quantise, quantised_nbytes
from fcdp.comms.rank_level import CommLevel, RankLevel, nothing
from fcdp.comms.side_stream import SideStream

PIECES = 4  # most pieces that a cell is cut into: all but one of them overlap, and each costs a message to every peer
SMALLEST_PIECE = 1 << 14  # fewest elements of a piece, unless the cell is smaller


class QuantisedLevel:
    """A :class:`CommLevel` that gathers and reduces along ``level`` and sends ``bits`` per element.

    It counts the bytes that travel, scales included. For reductions ``level`` is a :class:`RankLevel`."""

    def __init__(self, level: CommLevel, bits: Bits):
        self._level = level
        self._bits: Bits = bits
        self.axis = level.axis
        self.size = level.size
        self.index = level.index
        self._others = [others for others in (slice(self.index), slice(self.index + 1, self.size)) if _length(others)]
        self._side_stream = SideStream()

    def gather(self, rows: torch.Tensor) -> Wait:
        if not rows.is_floating_point() or not rows.numel():
            return self._level.gather(rows)
        own, bits = rows[:, self.index], self._bits
        side = self._side_stream.start(rows)
        in_transit = []
        for start, stop in pieces(rows.size(2)):
            nbytes = quantised_nbytes(stop - start, bits)
            payload = torch.empty((*rows.shape[:2], nbytes), dtype=torch.uint8, device=rows.device)
            quantise(own[:, start:stop], bits, out=payload[:, self.index])
            side.follow()
            with side:
                in_transit.append((start, stop, payload, self._level.gather(payload), side.mark()))

        def wait() -> None:
            for start, stop, payload, arrived, gathered in in_transit:
                arrived()
                side.join(until=gathered)
                for others in self._others:
                    dequantise(payload[:, others], stop - start, bits, rows[:, others, start:stop])
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
            nbytes = quantised_nbytes(stop - start, self._bits)
            sent = torch.empty((*rows.shape[:2], nbytes), dtype=torch.uint8, device=rows.device)
            for others in self._others:
                quantise(rows[:, others, start:stop], self._bits, out=sent[:, others])
            received = sent.new_empty((sent.size(0), self.size - 1, sent.size(2)))
            # What is sent has to stay until it is: hence it is kept here, too.
            in_transit.append((start, stop, sent, received, level.all_to_all(sent, received)))
        for start, stop, _, received, arrived in in_transit:
            arrived()
            own, places = rows[:, self.index, start:stop], received.unbind(1)
            total = torch.zeros(own.shape, dtype=torch.float32, device=own.device)
            for number in range(self.size):
                if number == self.index:
                    total += own
                else:
                    cells = places[number - (number > self.index)]
                    dequantise(cells, stop - start, self._bits, total, add=True)
            output[:, start:stop] = total


def _length(part: slice) -> int:
    return int(part.stop) - int(part.start or 0)


def pieces(count: int) -> Iterator[tuple[int, int]]:
    """Yield start and stop of the pieces in which ``count`` elements travel: whole blocks, but for the last."""
    width = max(-(-count // PIECES), SMALLEST_PIECE)
    width = -(-width // BLOCK) * BLOCK
    for start in range(0, count, width):
        yield start, min(start + width, count)
