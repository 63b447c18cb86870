"""Define the arithmetic of quantisation in blocks."""

import torch

from common.quantisation.layout import BLOCK, LARGEST, SMALLEST, Bits, blocks_of, parts_of

_HALF = BLOCK // 2


def quantise(rows: torch.Tensor, bits: Bits, out: torch.Tensor) -> None:
    """Quantise ``rows`` ``[..., c]`` into ``out`` ``uint8 [..., bytes]``."""
    *leading, count = rows.shape
    blocks = blocks_of(count)
    whole = torch.nn.functional.pad(rows, (0, blocks * BLOCK - count)) if count % BLOCK else rows
    elements = whole.float().reshape(*leading, blocks, BLOCK)
    # Two passes, and yet many times as fast as a norm or as aminmax, whose inner loops are not vectorised.
    # The same numbers must give the same bytes: of zeros, either pass may win with its own sign.
    largest = torch.maximum(elements.amax(dim=-1), elements.amin(dim=-1).neg_()).abs_()
    scales, values = parts_of(out, blocks, BLOCK * bits // 8)
    scales.copy_(torch.where(largest.isfinite(), largest / LARGEST[bits], torch.nan))
    steps = torch.where(largest > SMALLEST, LARGEST[bits] / largest, 0.0)
    # Where the scale is NaN, the integer that a NaN becomes does not matter.
    whole_steps = (elements * steps.unsqueeze(-1)).round_()
    if bits == 8:
        values.view(torch.int8).copy_(whole_steps)
    else:  # the first half of a block in the low halves of its bytes
        low, high = whole_steps.to(torch.int8).split(_HALF, dim=-1)
        values.view(torch.int8).copy_((low & 0xF) | (high << 4))


def dequantise(scales: torch.Tensor, values: torch.Tensor, bits: Bits, out: torch.Tensor, add: bool) -> None:
    """Write to ``out`` ``[..., c]`` the rows of these scales and values (:func:`parts_of`), or add them."""
    signed = values.view(torch.int8)
    if bits == 4:
        # Arithmetic shifts bring the sign back.
        signed = torch.cat(((signed << 4) >> 4, signed >> 4), dim=-1)
    elements = (signed * scales.unsqueeze(-1)).flatten(-2)[..., : out.size(-1)]
    if add:
        out.add_(elements)
    else:
        out.copy_(elements)
