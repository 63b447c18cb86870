"""Quantise frozen weights to nf4: 16 values that are not evenly spaced, in blocks of 64, 0.5625 bytes each."""

from functools import cache

import torch

from common.quantisation.fused import run_fused
from common.quantisation.layout import SCALE_BYTES, blocks_of, parts_of

NF4_BLOCK = 64  # Number of elements that share a scale in nf4, as in bitsandbytes

NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The 16 values of nf4, relative to a block's largest magnitude: quantiles of a normal distribution, with an exact zero
(Dettmers et al., arXiv:2305.14314, appendix E)."""


def nf4_nbytes(count: int) -> int:
    """Return the bytes that a row of ``count`` elements takes in nf4: 0.5625 each, and padding."""
    return blocks_of(count, NF4_BLOCK) * (SCALE_BYTES + NF4_BLOCK // 2)


def quantise_nf4(rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Quantise ``rows`` ``[..., c]`` to nf4: the nearest of 16 values that suit weights, which are about normal.

    Compared with :func:`quantise` in 4 bits, blocks are smaller, and most values lie where most weights are. NaN and
    infinities come back as NaN.

    Args:
        out: where the bytes go, ``uint8 [..., nf4_nbytes(c)]`` with contiguous rows; None: a new tensor.
    """
    *leading, count = rows.shape
    blocks = blocks_of(count, NF4_BLOCK)
    if out is None:
        out = torch.empty((*leading, nf4_nbytes(count)), dtype=torch.uint8, device=rows.device)
    whole = torch.nn.functional.pad(rows.detach(), (0, blocks * NF4_BLOCK - count))
    elements = whole.float().reshape(*leading, blocks, NF4_BLOCK)
    largest = torch.linalg.vector_norm(elements, ord=float("inf"), dim=-1)
    scales, values = parts_of(out, blocks, NF4_BLOCK // 2)
    scales.copy_(torch.where(largest.isfinite(), largest, torch.nan))
    levels = _nf4_levels(rows.device)
    relative = (elements / torch.where(largest > 0, largest, 1.0).unsqueeze(-1)).contiguous()
    codes = torch.bucketize(relative, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8)
    half = NF4_BLOCK // 2
    torch.bitwise_or(codes[..., :half], codes[..., half:] << 4, out=values)
    return out


def dequantise_nf4(payload: torch.Tensor, out: torch.Tensor) -> None:
    """Write to ``out`` ``[..., c]``, floating point, the rows of ``payload`` ``uint8 [..., nf4_nbytes(c)]``."""
    parts = parts_of(payload, blocks_of(out.shape[-1], NF4_BLOCK), NF4_BLOCK // 2)
    run_fused(_dequantise, payload.device, *parts, _nf4_levels(payload.device), out)


def _dequantise(scales: torch.Tensor, values: torch.Tensor, levels: torch.Tensor, out: torch.Tensor) -> None:
    if torch.compiler.is_compiling():  # where concatenating would take a kernel more
        shifts = torch.arange(0, 8, 4, dtype=torch.uint8, device=values.device).unsqueeze(-1)
        codes = (values.unsqueeze(-2) >> shifts & 0xF).flatten(-2)
    else:
        codes = torch.cat((values & 0xF, values >> 4), dim=-1)
    out.copy_((levels[codes.int()] * scales.unsqueeze(-1)).flatten(-2)[..., : out.shape[-1]])


@cache
def _nf4_levels(device: torch.device) -> torch.Tensor:
    """Return :data:`NF4_VALUES` on a device, to which they are copied once: a GPU would be waited for each time."""
    return torch.tensor(NF4_VALUES, device=device)
