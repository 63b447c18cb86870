"""Quantization in blocks: int8 and int4 for what travels, int8 and nf4 for frozen weights.

Rounding of int8, and of two int4 to a byte, is symmetric and to nearest, with one fp32 scale for every :data:`BLOCK`
elements: a scale maps the largest magnitude of a block to 127 (int8) or 7 (int4), so the error is at most half a scale:
|x - dequantized| <= max|block| / 254, or / 14. A scale for each block keeps the damage of an outlier inside its block
(Dettmers et al., arXiv:2110.02861, section 2.1; used by ZeRO++ and ZeRO-topo). nf4 has 16 values that are not evenly
spaced, in blocks of 64.

A row of c elements becomes one row of bytes: the scales of its blocks, then their values. Rows are independent, so each
can be sent alone. Bytes per element: 1 + 4/256 and 0.5 + 4/256, in nf4 0.5625, against 2 in bf16.
On CUDA, PyTorch compiles chains of elementwise operators as one kernel at the first call (not run on a GPU).
"""

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch

from common.hardware import kernels_of

Bits = Literal[8, 4]

BLOCK = 256  # Number of elements that share a scale
LARGEST = {8: 127.0, 4: 7.0}  # Value that a block's largest magnitude becomes, by bits
SMALLEST = 1e-36  # Largest magnitude of a block, up to which it becomes zeros: it has no reciprocal in fp32
SCALE_BYTES = 4


def quantized_nbytes(count: int, bits: Bits) -> int:
    """Return the bytes that a row of ``count`` elements takes; its last block is padded with zeros."""
    return blocks_of(count) * (SCALE_BYTES + BLOCK * bits // 8)


def blocks_of(count: int, block: int = BLOCK) -> int:
    """Return the blocks of a row of ``count`` elements."""
    return -(-count // block)


def parts_of(payload: torch.Tensor, blocks: int, block_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of scales, ``fp32 [..., blocks]``, and values, ``uint8 [..., blocks, block_bytes]``."""
    border = blocks * SCALE_BYTES
    return payload[..., :border].view(torch.float32), payload[..., border:].unflatten(
        -1, (blocks, block_bytes)
    )


_failures: list[str] = []  # Why PyTorch could not compile a function; after that all run eagerly


def run_fused(function: Callable[..., None], device: torch.device, *arguments: Any) -> None:
    """Run ``function``: on CUDA compiled, unless compiling has failed, which is reported once."""
    if not try_fused(function, device, *arguments):
        function(*arguments)


def try_fused(function: Callable[..., None], device: torch.device, *arguments: Any) -> bool:
    """Run ``function`` compiled; False: PyTorch cannot compile, and nothing was written."""
    if kernels_of(device) != "cuda" or _failures:
        return False
    try:
        _compiled(function, *_specialized(arguments))(*arguments)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Dynamo, Inductor, Triton, or a missing compiler
        _failures.append(f"{type(error).__name__}: {error}")
        fuses.cache_clear()  # from now on, large matrices are decoded in parts
        warnings.warn(f"Quantization runs uncompiled: torch.compile failed ({_failures[0]}).", stacklevel=4)
        return False
    return True


@functools.cache
def fuses(device: torch.device) -> bool:
    """Return whether PyTorch compiles for ``device``, after trying a small function: if so, no chain needs memory."""
    if kernels_of(device) == "cuda":
        run_fused(_try, device, torch.zeros(8, device=device))
        return not _failures
    return False


def _try(values: torch.Tensor) -> None:
    values.add_(1.0).mul_(2.0)


def _specialized(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what PyTorch compiles a function for: of tensors dtype, rank, sizes below 2, and whether they are
    contiguous, and all other arguments. Square matrices are compiled again."""
    return tuple(
        (each.dtype, each.is_contiguous(), *(min(size, 2) for size in each.shape))
        if isinstance(each, torch.Tensor)
        else each
        for each in arguments
    )


_ONE_KERNEL: dict[str, Any] = {"realize_reads_threshold": 1 << 30, "realize_opcount_threshold": 1 << 30}
"""Inductor's options for no limits on the length of a kernel. By default all numbers of some GGUF types (Q4_1, Q4_K)
are written in fp32 by a first kernel, to memory that no plan counts."""


@functools.cache
def _compiled(function: Callable[..., None], *specialized: Any) -> Callable[..., None]:
    """Return ``function`` compiled for arguments of one kind (:func:`_specialized`).

    PyTorch counts the versions of a code object and gives up at the ninth, and a GGUF file alone may have 13 types of
    blocks. So each kind gets a copy of the code object.
    """
    copy = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    # fullgraph: compiling fails as a whole, before anything has been written or added.
    return torch.compile(copy, fullgraph=True, dynamic=True, options=_ONE_KERNEL)


def quantize_rows(rows: torch.Tensor, bits: Bits, out: torch.Tensor) -> None:

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
        low, high = whole_steps.to(torch.int8).split(BLOCK // 2, dim=-1)
        values.view(torch.int8).copy_((low & 0xF) | (high << 4))


def dequantize_rows(
    scales: torch.Tensor, values: torch.Tensor, bits: Bits, out: torch.Tensor, add: bool
) -> None:
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


def quantize(rows: torch.Tensor, bits: Bits, out: torch.Tensor | None = None) -> torch.Tensor:
    """Quantize ``rows`` ``[..., c]``, floating point, each in separate blocks.

    A block with a NaN or an infinity comes back as NaN throughout: training should see that, not a clipped value.
    A block whose largest magnitude has no reciprocal in fp32 (below 1e-36) comes back as zeros.

    Args:
        out: where the bytes go, ``uint8 [..., quantized_nbytes(c)]`` with contiguous rows; None: a new tensor.
    """
    rows = rows.detach()
    if out is None:
        out = rows.new_empty((*rows.shape[:-1], quantized_nbytes(rows.size(-1), bits)), dtype=torch.uint8)
    run_fused(quantize_rows, rows.device, rows, bits, out)
    return out


def dequantize(
    payload: torch.Tensor, count: int, bits: Bits, out: torch.Tensor | None = None, *, add: bool = False
) -> torch.Tensor:
    """Return the rows ``[..., count]`` of ``payload`` ``uint8 [..., quantized_nbytes(count)]``.

    Args:
        out: where they go, floating point; None: a new tensor in fp32.
        add: whether they are added to ``out``, which is fp32 then.
    """
    if out is None:
        out = payload.new_empty((*payload.shape[:-1], count), dtype=torch.float32)
    parts = parts_of(payload, blocks_of(out.size(-1)), BLOCK * bits // 8)
    run_fused(dequantize_rows, payload.device, *parts, bits, out, add)
    return out


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


def quantize_nf4(rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Quantize ``rows`` ``[..., c]`` to nf4: the nearest of 16 values that suit weights, which are about normal.

    Compared with :func:`quantize` in 4 bits, blocks are smaller, and most values lie where most weights are. NaN and
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


def dequantize_nf4(payload: torch.Tensor, out: torch.Tensor) -> None:
    """Write to ``out`` ``[..., c]``, floating point, the rows of ``payload`` ``uint8 [..., nf4_nbytes(c)]``."""
    parts = parts_of(payload, blocks_of(out.shape[-1], NF4_BLOCK), NF4_BLOCK // 2)
    run_fused(_dequantize_nf4, payload.device, *parts, _nf4_levels(payload.device), out)


def _dequantize_nf4(
    scales: torch.Tensor, values: torch.Tensor, levels: torch.Tensor, out: torch.Tensor
) -> None:
    shifts = torch.arange(0, 8, 4, dtype=torch.uint8, device=values.device).unsqueeze(-1)
    codes = (values.unsqueeze(-2) >> shifts & 0xF).flatten(-2)  # concatenating would take a kernel more
    out.copy_((levels[codes.int()] * scales.unsqueeze(-1)).flatten(-2)[..., : out.shape[-1]])


@functools.cache
def _nf4_levels(device: torch.device) -> torch.Tensor:
    """Return :data:`NF4_VALUES` on a device, to which they are copied once: a GPU would be waited for each time."""
    return torch.tensor(NF4_VALUES, device=device)
