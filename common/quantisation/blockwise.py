"""Quantise tensors in blocks: int8, or two int4 to a byte, with one fp32 scale for every :data:`BLOCK` elements.

Rounding is symmetric and to nearest: a block's scale maps its largest magnitude to 127 (int8) or 7 (int4), so the error
is at most half a scale: |x - dequantised| <= max|block| / 254, or / 14. A scale for each block keeps an outlier's
damage inside its block (Dettmers et al., arXiv:2110.02861, section 2.1; used by ZeRO++ and ZeRO-topo).

A row of c elements becomes one row of bytes: the scales of its blocks, then their values. Rows are independent, so each
can be sent alone. Bytes per element: 1 + 4/256 and 0.5 + 4/256, against 2 in bf16.

:mod:`.reference` defines the arithmetic. On CUDA, PyTorch compiles it at the first call (not run on a GPU).
"""

import torch

from common.quantisation import reference
from common.quantisation.fused import run_fused
from common.quantisation.layout import BLOCK, Bits, blocks_of, parts_of, quantised_nbytes


def quantise(rows: torch.Tensor, bits: Bits, out: torch.Tensor | None = None) -> torch.Tensor:
    """Quantise ``rows`` ``[..., c]``, floating point, each in separate blocks.

    A block with a NaN or an infinity comes back as NaN throughout: training should see that, not a clipped value.
    A block whose largest magnitude has no reciprocal in fp32 (below 1e-36) comes back as zeros.

    Args:
        out: where the bytes go, ``uint8 [..., quantised_nbytes(c)]`` with contiguous rows; None: a new tensor.
    """
    rows = rows.detach()
    if out is None:
        out = rows.new_empty((*rows.shape[:-1], quantised_nbytes(rows.size(-1), bits)), dtype=torch.uint8)
    run_fused(reference.quantise, rows.device, rows, bits, out)
    return out


def dequantise(
    payload: torch.Tensor, count: int, bits: Bits, out: torch.Tensor | None = None, *, add: bool = False
) -> torch.Tensor:
    """Return the rows ``[..., count]`` of ``payload`` ``uint8 [..., quantised_nbytes(count)]``.

    Args:
        out: where they go, floating point; None: a new tensor in fp32.
        add: whether they are added to ``out``, which is fp32 then.
    """
    if out is None:
        out = payload.new_empty((*payload.shape[:-1], count), dtype=torch.float32)
    parts = parts_of(payload, blocks_of(out.size(-1)), BLOCK * bits // 8)
    run_fused(reference.dequantise, payload.device, *parts, bits, out, add)
    return out
