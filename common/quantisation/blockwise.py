"""Quantise tensors in blocks: int8, or two int4 to a byte, with one fp32 scale for every :data:`BLOCK` elements.

Rounding is symmetric and to nearest: a block's scale maps its largest magnitude to 127 (int8) or 7 (int4), so the error
is at most half a scale: |x - dequantised| <= max|block| / 254, or / 14. A scale for each block keeps an outlier's
damage inside its block (Dettmers et al., arXiv:2110.02861, section 2.1; used by ZeRO++ and ZeRO-topo).

A row of c elements becomes one row of bytes: the scales of its blocks, then their values. Rows are independent, so each
can be sent by itself. Bytes per element: 1 + 4/256 and 0.5 + 4/256, against 2 in bf16.

PyTorch does it in a dozen kernels with fp32 temporaries. Where it can, one pass does it without any: compiled C++ on
the CPU, Triton on CUDA. Each is tried when it is first used, and taken if it gives the very bits that PyTorch gives on
the CPU.
"""

import functools
from typing import Protocol

import torch

from common.quantisation import reference
from common.quantisation.cpu_kernels import compiled_kernels
from common.quantisation.layout import BLOCK, Bits, quantised_nbytes


class FusedKernels(Protocol):
    """Both directions in one pass each."""

    def takes(self, rows: torch.Tensor, payload: torch.Tensor) -> bool:
        """Return whether these can be read and written."""
        ...

    def quantise(self, rows: torch.Tensor, bits: Bits, out: torch.Tensor) -> None:
        """See :func:`common.quantisation.reference.quantise`."""
        ...

    def dequantise(self, payload: torch.Tensor, bits: Bits, out: torch.Tensor, add: bool) -> None:
        """See :func:`common.quantisation.reference.dequantise`."""
        ...


def quantise(rows: torch.Tensor, bits: Bits, out: torch.Tensor | None = None) -> torch.Tensor:
    """Quantise ``rows`` ``[..., c]``, floating point, each in blocks of its own.

    A block with a NaN or an infinity comes back as NaN throughout: training should see that, not a clipped value.
    A block whose largest magnitude has no reciprocal in fp32 (below 1e-36) comes back as zeros.

    Args:
        out: where the bytes go, ``uint8 [..., quantised_nbytes(c)]`` with contiguous rows; None: a new tensor.
    """
    rows = rows.detach()
    if out is None:
        out = rows.new_empty((*rows.shape[:-1], quantised_nbytes(rows.size(-1), bits)), dtype=torch.uint8)
    fused = fused_kernels(rows.device)
    if fused is not None and rows.numel() and fused.takes(rows, out):
        fused.quantise(rows, bits, out)
    else:
        reference.quantise(rows, bits, out)
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
    fused = fused_kernels(payload.device)
    if fused is not None and out.numel() and fused.takes(out, payload):
        fused.dequantise(payload, bits, out, add)
    else:
        reference.dequantise(payload, bits, out, add)
    return out


@functools.cache
def fused_kernels(device: torch.device) -> FusedKernels | None:
    """Return what does it in one pass on ``device``, if it gives PyTorch's bits there; None otherwise."""
    kernels: FusedKernels | None = None
    if device.type == "cpu":
        kernels = compiled_kernels()
    elif device.type == "cuda":
        try:
            from common.quantisation.triton_kernels import TritonKernels
        except ImportError:
            return None
        kernels = TritonKernels()
    return kernels if kernels is not None and gives_the_same_bits(kernels, device) else None


def gives_the_same_bits(kernels: FusedKernels, device: torch.device) -> bool:
    """Return whether ``kernels`` on ``device`` give what :mod:`.reference` gives on the CPU.

    Its division by a number is a multiplication on CUDA: it gives other bits there.
    """
    random = torch.Generator().manual_seed(1)
    for dtype in (torch.float32, torch.bfloat16):
        rows = torch.randn((3, 5 * BLOCK + 7), generator=random) * 10.0 ** torch.arange(-3, 0).unsqueeze(-1)
        rows[0, :BLOCK], rows[1, 3], rows[2, BLOCK + 1] = 0.0, torch.inf, torch.nan
        rows[2, 2 * BLOCK : 3 * BLOCK] *= 1e-38
        rows = rows.to(dtype)
        for bits in (8, 4):
            if not _same_bits(kernels, rows, bits, device):
                return False
    return True


def _same_bits(kernels: FusedKernels, rows: torch.Tensor, bits: Bits, device: torch.device) -> bool:
    payload = torch.empty((rows.size(0), quantised_nbytes(rows.size(1), bits)), dtype=torch.uint8)
    expected, found = torch.empty_like(rows), torch.empty_like(rows, device=device)
    sums, found_sums = (rows.to(device, torch.float32, copy=True) for device in (torch.device("cpu"), device))
    reference.quantise(rows, bits, payload)
    reference.dequantise(payload, bits, expected, False)
    reference.dequantise(payload, bits, sums, True)
    given = torch.empty_like(payload, device=device)
    kernels.quantise(rows.to(device), bits, given)
    kernels.dequantise(given, bits, found, False)
    kernels.dequantise(given, bits, found_sums, True)
    pairs = (expected, found), (sums, found_sums)
    same = all(torch.allclose(one, two.cpu(), rtol=0, atol=0, equal_nan=True) for one, two in pairs)
    return same and torch.equal(payload, given.cpu())
