"""Block-quantised tensors: int8, or two int4 to a byte, with one fp32 scale for every :data:`BLOCK` elements.

Symmetric and round-to-nearest: a block's scale maps its largest magnitude to 127 (int8) or 7 (int4), so that no element
is off by more than half a scale: |x - dequantised| <= max|block| / 254, or / 14. Scales of their own keep an outlier's
damage inside its block (Dettmers et al., arXiv:2110.02861, section 2.1; used by ZeRO++ and ZeRO-topo).

Bytes per element: 1 + 4/256 and 0.5 + 4/256, against 2 in bf16.
"""

from dataclasses import dataclass
from typing import Literal

import torch

Bits = Literal[8, 4]

BLOCK = 256
"""Elements that share a scale."""

_LARGEST = {8: 127.0, 4: 7.0}


@dataclass(frozen=True)
class Quantised:
    """What travels instead of a flat tensor. Blocks do not know of each other, so parts of whole blocks may travel."""

    values: torch.Tensor
    """int8 ``[blocks * BLOCK]``; with 4 bits uint8 ``[blocks * BLOCK / 2]``, the even element in the low half."""
    scales: torch.Tensor
    """fp32 ``[blocks]``."""
    bits: Bits
    count: int
    """Elements of the tensor; the last block may be padded with zeros."""

    @property
    def nbytes(self) -> int:
        """Of values and scales."""
        return self.values.nbytes + self.scales.nbytes


def quantised_nbytes(count: int, bits: Bits) -> int:
    """Bytes that ``count`` elements take, padding included."""
    blocks = -(-count // BLOCK)
    return blocks * (BLOCK * bits // 8 + 4)


def quantise(tensor: torch.Tensor, bits: Bits) -> Quantised:
    """``tensor`` (any shape, floating point) in blocks of its flat order.

    A block with a NaN or an infinity comes back as NaN throughout: training should see that, not a clipped value.
    """
    flat = tensor.detach().reshape(-1)
    count = flat.numel()
    blocks = -(-count // BLOCK)
    padded = flat if count == blocks * BLOCK else torch.nn.functional.pad(flat, (0, blocks * BLOCK - count))
    rows = padded.view(blocks, BLOCK).float()
    scales = rows.abs().amax(dim=1) / _LARGEST[bits]
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    # A block of zeros, or of numbers so small that their scale rounds to zero, has no use for its scale.
    divisors = torch.where(scales > 0, scales, 1.0)
    # fp32 division may round past the end by one where the scale is denormal.
    values = (rows / divisors[:, None]).round_().nan_to_num_(0.0).clamp_(-_LARGEST[bits], _LARGEST[bits]).to(torch.int8)
    if bits == 8:
        return Quantised(values.view(-1), scales, bits, count)
    nibbles = (values.view(-1, 2) & 0xF).to(torch.uint8)
    return Quantised(nibbles[:, 0] | (nibbles[:, 1] << 4), scales, bits, count)


def dequantise(quantised: Quantised, *, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The flat tensor ``[count]`` in ``dtype``."""
    values = quantised.values
    if quantised.bits == 4:
        low = (values << 4).view(torch.int8) >> 4  # arithmetic shifts bring the sign back
        high = values.view(torch.int8) >> 4
        values = torch.stack((low, high), dim=1).view(-1)
    rows = values.view(-1, BLOCK).float() * quantised.scales[:, None]
    return rows.view(-1)[: quantised.count].to(dtype)
