"""One pass over the data on a CUDA device, in Triton, with the bits of :mod:`.reference` on the CPU.

Not run on a GPU yet: tests run it in Triton's interpreter. A program takes some blocks of one row, each as its two
halves, which is how int4 packs them. Rows have up to two leading dimensions of any stride.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from common.quantisation.layout import BLOCK, LARGEST, SMALLEST, Bits, blocks_of, parts_of

_TILE = 8
"""Blocks of a program."""
_OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
"""Without fused multiply-add: products are rounded before they are added to."""


@triton.jit
def _places(rows_inner, row_strides, value_strides, scale_strides, blocks, TILE: tl.constexpr, HALF: tl.constexpr):
    """Return this program's blocks, and where their first halves, values and scales are, in elements."""
    row = tl.program_id(1).to(tl.int64)
    outer, inner = row // rows_inner, row % rows_inner
    block = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    half = tl.arange(0, HALF)
    element = block[:, None] * (2 * HALF) + half[None, :]
    first = outer * row_strides[0] + inner * row_strides[1] + element
    values = outer * value_strides[0] + inner * value_strides[1] + block[:, None] * value_strides[2] + half[None, :]
    scales = outer * scale_strides[0] + inner * scale_strides[1] + block
    return block < blocks, element, first, values, scales


@triton.jit
def _as_steps(elements, steps):
    """Round to the nearest whole number, to the even one of two, by adding and taking away 1.5 * 2^23."""
    return ((elements * steps[:, None] + 12582912.0) - 12582912.0).to(tl.int32)


@triton.jit
def _load(rows, at, mask, NARROW: tl.constexpr):
    """Load elements as fp32; those of bf16 are its upper halves."""
    if NARROW:
        return (tl.load(rows + at, mask=mask, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return tl.load(rows + at, mask=mask, other=0.0)


@triton.jit
def _store(rows, at, elements, mask, NARROW: tl.constexpr):
    """Store elements, in bf16 those nearest to them, the even one of two."""
    if NARROW:
        bits = elements.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        tl.store(rows + at, tl.where(is_nan, 0x7FC0, nearest).to(tl.int16), mask=mask)
    else:
        tl.store(rows + at, elements, mask=mask)


@triton.jit
def _quantise(
    rows, values, scales, count, blocks, rows_inner, row_strides, value_strides, scale_strides, largest_value, smallest,
    BITS: tl.constexpr, NARROW: tl.constexpr, TILE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    is_there, element, first, value_at, scale_at = _places(
        rows_inner, row_strides, value_strides, scale_strides, blocks, TILE, HALF
    )
    low = _load(rows, first, is_there[:, None] & (element < count), NARROW)
    high = _load(rows, first + HALF, is_there[:, None] & (element + HALF < count), NARROW)
    # Of magnitudes as integers the largest is the largest number, and a NaN's is larger than any.
    most = tl.maximum(
        tl.max(low.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1),
        tl.max(high.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1),
    )
    is_finite = most < 0x7F800000
    largest = tl.where(is_finite, most, 0).to(tl.float32, bitcast=True)
    divisor = tl.zeros_like(largest) + largest_value
    scale = tl.where(is_finite, tl.div_rn(largest, divisor), float("nan"))
    has_steps = largest > smallest
    reciprocal = tl.div_rn(tl.zeros_like(largest) + 1.0, tl.where(has_steps, largest, 1.0))
    steps = tl.where(has_steps, reciprocal * largest_value, 0.0)
    tl.store(scales + scale_at, scale, mask=is_there)
    low = tl.where(is_finite[:, None], low, 0.0)
    high = tl.where(is_finite[:, None], high, 0.0)
    low_steps, high_steps = _as_steps(low, steps), _as_steps(high, steps)
    if BITS == 8:
        tl.store(values + value_at, low_steps.to(tl.int8), mask=is_there[:, None])
        tl.store(values + value_at + HALF, high_steps.to(tl.int8), mask=is_there[:, None])
    else:
        tl.store(values + value_at, ((low_steps & 0xF) | (high_steps << 4)).to(tl.int8), mask=is_there[:, None])


@triton.jit
def _dequantise(
    rows, values, scales, count, blocks, rows_inner, row_strides, value_strides, scale_strides,
    BITS: tl.constexpr, ADD: tl.constexpr, NARROW: tl.constexpr, TILE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    is_there, element, first, value_at, scale_at = _places(
        rows_inner, row_strides, value_strides, scale_strides, blocks, TILE, HALF
    )
    scale = tl.load(scales + scale_at, mask=is_there, other=0.0)[:, None]
    low = tl.load(values + value_at, mask=is_there[:, None], other=0).to(tl.int32)
    if BITS == 8:
        high = tl.load(values + value_at + HALF, mask=is_there[:, None], other=0).to(tl.int32)
    else:  # arithmetic shifts bring the sign back
        high = low >> 4
        low = (low << 28) >> 28
    low_there, high_there = is_there[:, None] & (element < count), is_there[:, None] & (element + HALF < count)
    low_part, high_part = low.to(tl.float32) * scale, high.to(tl.float32) * scale
    if ADD:
        low_part = _load(rows, first, low_there, NARROW) + low_part
        high_part = _load(rows, first + HALF, high_there, NARROW) + high_part
    _store(rows, first, low_part, low_there, NARROW)
    _store(rows, first + HALF, high_part, high_there, NARROW)


class TritonKernels:
    """The passes on CUDA, enqueued on the current stream."""

    def takes(self, rows: torch.Tensor, payload: torch.Tensor) -> bool:
        """Return whether these can be read and written: elements of a row side by side, in at most three dimensions."""
        known = rows.dtype in (torch.float32, torch.bfloat16)
        return known and rows.dim() <= 3 and rows.stride(-1) == payload.stride(-1) == 1

    def quantise(self, rows: torch.Tensor, bits: Bits, out: torch.Tensor) -> None:
        """See :func:`common.quantisation.reference.quantise`."""
        rows, out = _with_two_leading(rows), _with_two_leading(out)
        blocks, scales, values = _parts(rows, out, bits)
        _quantise[_grid(rows, blocks)](
            _integers(rows), values, scales, rows.size(-1), blocks, rows.size(1),
            rows.stride()[:2], values.stride()[:3], scales.stride()[:2], LARGEST[bits], SMALLEST,
            BITS=bits, NARROW=rows.dtype == torch.bfloat16, TILE=_TILE, HALF=BLOCK // 2, **_OPTIONS,
        )  # fmt: skip

    def dequantise(self, payload: torch.Tensor, bits: Bits, out: torch.Tensor, add: bool) -> None:
        """See :func:`common.quantisation.reference.dequantise`; only fp32 is added to."""
        rows, payload = _with_two_leading(out), _with_two_leading(payload)
        blocks, scales, values = _parts(rows, payload, bits)
        _dequantise[_grid(rows, blocks)](
            _integers(rows), values, scales, rows.size(-1), blocks, rows.size(1),
            rows.stride()[:2], values.stride()[:3], scales.stride()[:2],
            BITS=bits, ADD=add, NARROW=rows.dtype == torch.bfloat16, TILE=_TILE, HALF=BLOCK // 2, **_OPTIONS,
        )  # fmt: skip


def _with_two_leading(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[(None,) * (3 - tensor.dim())]


def _integers(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(torch.int16) if rows.dtype == torch.bfloat16 else rows


def _parts(rows: torch.Tensor, payload: torch.Tensor, bits: Bits) -> tuple[int, torch.Tensor, torch.Tensor]:
    blocks = blocks_of(rows.size(-1))
    scales, values = parts_of(payload, blocks, BLOCK * bits // 8)
    return blocks, scales, values.view(torch.int8)


def _grid(rows: torch.Tensor, blocks: int) -> tuple[int, int]:
    return -(-blocks // _TILE), rows.size(0) * rows.size(1)
