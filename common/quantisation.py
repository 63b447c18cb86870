"""Quantise tensors in blocks: int8, or two int4 to a byte, with one fp32 scale for every :data:`BLOCK` elements.

Rounding is symmetric and to nearest: a block's scale maps its largest magnitude to 127 (int8) or 7 (int4), so the error
is at most half a scale: |x - dequantised| <= max|block| / 254, or / 14. A scale for each block keeps an outlier's
damage inside its block (Dettmers et al., arXiv:2110.02861, section 2.1; used by ZeRO++ and ZeRO-topo).

A row of c elements becomes one row of bytes: the scales of its blocks, then their values. Rows are independent, so each
can be sent by itself. Bytes per element: 1 + 4/256 and 0.5 + 4/256, against 2 in bf16.

Frozen weights can also be kept in nf4: 16 values that are not evenly spaced, in blocks of 64, 0.5625 bytes each.
"""

from functools import cache
from typing import Literal

import torch

Bits = Literal[8, 4]

BLOCK = 256
"""Number of elements that share a scale."""

NF4_BLOCK = 64
"""Number of elements that share a scale in nf4, as in bitsandbytes."""

NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The 16 values of nf4, relative to a block's largest magnitude: quantiles of a normal distribution, with an exact zero
(Dettmers et al., arXiv:2305.14314, appendix E)."""

_LARGEST = {8: 127.0, 4: 7.0}
_SCALE_BYTES = 4
_HALF = BLOCK // 2


def quantised_nbytes(count: int, bits: Bits) -> int:
    """Return the bytes that a row of ``count`` elements takes; its last block is padded with zeros."""
    return _blocks(count) * (_SCALE_BYTES + BLOCK * bits // 8)


def quantise(rows: torch.Tensor, bits: Bits, out: torch.Tensor | None = None) -> torch.Tensor:
    """Quantise ``rows`` ``[..., c]``, floating point, each in blocks of its own.

    A block with a NaN or an infinity comes back as NaN throughout: training should see that, not a clipped value.
    A block whose largest magnitude has no reciprocal in fp32 (below 1e-36) comes back as zeros.

    Args:
        out: where the bytes go, ``uint8 [..., quantised_nbytes(c)]`` with contiguous rows; None: a new tensor.
    """
    rows = rows.detach()
    *leading, count = rows.shape
    blocks = _blocks(count)
    if out is None:
        out = torch.empty((*leading, quantised_nbytes(count, bits)), dtype=torch.uint8, device=rows.device)
    whole = torch.nn.functional.pad(rows, (0, blocks * BLOCK - count)) if count % BLOCK else rows
    elements = whole.float().reshape(*leading, blocks, BLOCK)
    # Two passes, and yet many times as fast as a norm or as aminmax, whose inner loops are not vectorised.
    # The same numbers must give the same bytes: of zeros, either pass may win with a sign of its own.
    largest = torch.maximum(elements.amax(dim=-1), elements.amin(dim=-1).neg_()).abs_()
    scales, values = _parts(out, blocks, BLOCK * bits // 8)
    scales.copy_(torch.where(largest.isfinite(), largest / _LARGEST[bits], torch.nan))
    steps = torch.where(largest > 1e-36, _LARGEST[bits] / largest, 0.0)
    # Where the scale is NaN, whatever a NaN becomes as an integer does not matter.
    whole_steps = (elements * steps.unsqueeze(-1)).round_()
    if bits == 8:
        values.view(torch.int8).copy_(whole_steps)
    else:  # the first half of a block in the low halves of its bytes
        low, high = whole_steps.to(torch.int8).split(_HALF, dim=-1)
        torch.bitwise_or(low & 0xF, high << 4, out=values.view(torch.int8))
    return out


def dequantise(payload: torch.Tensor, count: int, bits: Bits) -> torch.Tensor:
    """Return the rows ``fp32 [..., count]`` of ``payload`` ``uint8 [..., quantised_nbytes(count)]``."""
    scales, values = _parts(payload, _blocks(count), BLOCK * bits // 8)
    signed = values.view(torch.int8)
    if bits == 4:
        # Arithmetic shifts bring the sign back.
        signed = torch.cat(((signed << 4) >> 4, signed >> 4), dim=-1)
    elements = signed * scales.unsqueeze(-1)
    return elements.flatten(-2)[..., :count]


def nf4_nbytes(count: int) -> int:
    """Return the bytes that a row of ``count`` elements takes in nf4: 0.5625 each, and padding."""
    return _blocks(count, NF4_BLOCK) * (_SCALE_BYTES + NF4_BLOCK // 2)


def quantise_nf4(rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Quantise ``rows`` ``[..., c]`` to nf4: the nearest of 16 values that suit weights, which are about normal.

    Compared with :func:`quantise` in 4 bits, blocks are smaller, and most values lie where most weights are. NaN and
    infinities come back as NaN.

    Args:
        out: where the bytes go, ``uint8 [..., nf4_nbytes(c)]`` with contiguous rows; None: a new tensor.
    """
    *leading, count = rows.shape
    blocks = _blocks(count, NF4_BLOCK)
    if out is None:
        out = torch.empty((*leading, nf4_nbytes(count)), dtype=torch.uint8, device=rows.device)
    whole = torch.nn.functional.pad(rows.detach(), (0, blocks * NF4_BLOCK - count))
    elements = whole.float().reshape(*leading, blocks, NF4_BLOCK)
    largest = torch.linalg.vector_norm(elements, ord=float("inf"), dim=-1)
    scales, values = _parts(out, blocks, NF4_BLOCK // 2)
    scales.copy_(torch.where(largest.isfinite(), largest, torch.nan))
    levels = _nf4_levels(rows.device)
    relative = (elements / torch.where(largest > 0, largest, 1.0).unsqueeze(-1)).contiguous()
    codes = torch.bucketize(relative, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8)
    half = NF4_BLOCK // 2
    torch.bitwise_or(codes[..., :half], codes[..., half:] << 4, out=values)
    return out


def dequantise_nf4(payload: torch.Tensor, count: int) -> torch.Tensor:
    """Return the rows ``fp32 [..., count]`` of ``payload`` ``uint8 [..., nf4_nbytes(count)]``."""
    scales, values = _parts(payload, _blocks(count, NF4_BLOCK), NF4_BLOCK // 2)
    codes = torch.cat((values & 0xF, values >> 4), dim=-1)
    elements = _nf4_levels(payload.device)[codes.int()] * scales.unsqueeze(-1)
    return elements.flatten(-2)[..., :count]


@cache
def _nf4_levels(device: torch.device) -> torch.Tensor:
    """Return :data:`NF4_VALUES` on a device, to which they are copied once: a GPU would be waited for each time."""
    return torch.tensor(NF4_VALUES, device=device)


def _blocks(count: int, block: int = BLOCK) -> int:
    return -(-count // block)


def _parts(payload: torch.Tensor, blocks: int, block_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of scales, ``fp32 [..., blocks]``, and values, ``uint8 [..., blocks, block_bytes]``."""
    border = blocks * _SCALE_BYTES
    return payload[..., :border].view(torch.float32), payload[..., border:].unflatten(-1, (blocks, block_bytes))
