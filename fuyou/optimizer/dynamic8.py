"""Moments in 8 bits: block-wise dynamic quantisation (Dettmers et al., "8-bit Optimizers via Block-wise Quantization",
arXiv 2110.02861, section 2).

Each block of 128 values is divided by its largest magnitude, in fp32, and each quotient is rounded to the nearest of
256 values whose resolution follows their magnitude over seven decades. Codes are counted from that of 0: memory full of
zeros holds zeros.

One thing is different from the paper. A variance above 0 never becomes 0: the update that divides by its root would
grow by as much as it lost. So quotients below the smallest value above 0 are rounded up to it.
"""

import numpy as np
import torch

from fuyou.layout.optimizer_state import BLOCK_ELEMENTS

# Upper 16 bits of 2**-24, below which all numbers are rounded as it is, and of 1, the largest quotient.
LEAST, MOST = 0x3380, 0x3F80
SIGNS = MOST - LEAST + 1  # Where in a table by magnitudes those of negative numbers begin
_DECADES = 7  # Powers of ten that the values span; the last has 64 values of each sign, the one before it 32, and so on


def dynamic_values(signed: bool) -> np.ndarray:
    """Return the 256 values that a code can stand for, fp32, ascending: 0, 1 and 254 between -1 and 1, or 0 and 1."""
    values = [0.0, 1.0]
    for decade in range(_DECADES):
        count = 1 << decade if signed else 2 << decade
        edges = np.linspace(0.1, 1, count + 1)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - _DECADES + 1)
        values += [*middles, *(-middles if signed else ())]
    return np.sort(np.array(values)).astype(np.float32)


class DynamicCode:
    """A set of 256 values, and the tables with which numbers from -1 to 1 are rounded to the nearest of them.

    Args:
        signed: whether there are negative values; if not, no number above 0 is rounded to 0.

    Attributes:
        values: ``[256]`` fp32, by code.
        thresholds: ``[256]`` fp32: a number is rounded beyond the n-th value if it is greater than the n-th threshold.
        bases: ``[2 * SIGNS]`` int32: by the upper 16 bits of a number's magnitude, from :data:`LEAST` to :data:`MOST`,
            how many thresholds are below all numbers that have them; first of positive numbers, then of negative ones.
            No 16 bits have more than one threshold among their numbers, so one comparison does the rest.
        zero: place of 0 among the ascending values.
    """

    def __init__(self, signed: bool):
        ascending = dynamic_values(signed)
        self.zero = int(np.searchsorted(ascending, np.float32(0)))
        self.values = np.ascontiguousarray(np.roll(ascending, -self.zero))
        middles = ((ascending[:-1].astype(np.float64) + ascending[1:]) / 2).astype(np.float32)
        if not signed:
            middles[0] = 0
        self.thresholds = np.append(middles, np.float32(np.inf))
        upper = np.arange(LEAST, MOST + 1, dtype=np.uint32) << 16
        smallest = np.where(upper == LEAST << 16, 0, upper).astype(np.uint32).view(np.float32)
        largest = -(upper | 0xFFFF).view(np.float32)
        self.bases = np.searchsorted(middles, np.append(smallest, largest), side="left").astype(np.int32)

    def encode(self, wide: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """Round fp32 ``wide`` ``[n]`` to ``codes`` uint8 ``[n]`` and ``scales`` fp32 ``[n / 128]``; ``n`` is a multiple
        of 128."""
        blocks = wide.view(-1, BLOCK_ELEMENTS)
        torch.amax(blocks.abs(), 1, out=scales)
        quotients = (blocks / torch.where(scales > 0, scales, 1.0).unsqueeze(1)).view(-1).numpy()
        upper = np.clip((quotients.view(np.int32) >> 16) & 0x7FFF, LEAST, MOST)
        upper += np.signbit(quotients) * np.int32(SIGNS) - np.int32(LEAST)
        places = np.take(self.bases, upper)
        places += quotients > np.take(self.thresholds, places)
        codes.numpy()[:] = (places - self.zero).astype(np.uint8)

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, wide: torch.Tensor) -> None:
        """Undo :meth:`encode` as far as rounding allows, into ``wide``."""
        np.take(self.values, codes.numpy(), out=wide.numpy(), mode="clip")
        wide.view(-1, BLOCK_ELEMENTS).mul_(scales.unsqueeze(1))


SIGNED, UNSIGNED = DynamicCode(signed=True), DynamicCode(signed=False)
MOMENT_CODES = (SIGNED, UNSIGNED)  # The codes of mean and variance
