"""Decode tensors that are written as codes of a few bits with a scale for each block of them.

GGUF types have their scales between the codes (:mod:`common.models.checkpoint.compressed.gguf_blocks`). One rule
covers all other formats: a number is (code - zero point) x (scale / global scale), computed in fp32 and rounded to
:attr:`CompressedTensor.dtype`. The result is, bit for bit, that of the formats' own libraries:

* FP8 by blocks: ``inference/kernel.py`` of DeepSeek-V3, and ``Fp8Dequantize`` of transformers;
* MXFP4: OCP Microscaling Formats 1.0, and ``convert_moe_packed_tensors`` of transformers. Products with a power of two
  are exact, in bf16 as well;
* nf4, fp4 and int8 of bitsandbytes: ``dequantize_4bit``, whose scales may be quantized themselves (*nested*), and
  ``int8_vectorwise_dequant``;
* INT4, INT8, FP8 and NVFP4 of compressed-tensors: ``BaseCompressor.decompress``, which computes in the scales' dtype.
  Codes have so few bits that their products with bf16 scales are exact in fp32.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from common.hardware import kernels_of
from common.models.checkpoint.compressed.gguf_blocks import BLOCKS
from common.models.checkpoint.shards import DTYPES
from common.quantization import NF4_VALUES, fuses, try_fused

CHUNK_ELEMENTS = 1 << 20
"""Number of elements that a CPU decodes at once: temporary memory is below 20 bytes for each of these."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Positive numbers of four bits with two of exponent and one of mantissa; the highest bit is the sign."""

FP4 = tuple(sign * number for sign in (1, -1) for number in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))
"""Numbers of bitsandbytes' fp4, before they are divided by the largest."""

NESTED = ("nested_scale", "nested_map", "nested_offset")
"""Of scales that are codes, 256 at a time: factors, the number of each code, and what is added to the products."""
NESTED_BLOCK = 256

ROLES = ("codes", "scale", "zero_point", "global_scale", *NESTED)


def _nibble_table(numbers: Sequence[float], high_first: bool = False) -> torch.Tensor:
    """Return the two numbers of every byte, by default the one in its low half first."""
    table = torch.tensor([[numbers[byte & 15], numbers[byte >> 4]] for byte in range(256)])
    return table.flip(1) if high_first else table


def _float_table(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(dtype).float().unsqueeze(1)


# By the codes' name, the fp32 numbers in a byte, ``[256, numbers]``
TABLES = {
    "e4m3": _float_table(torch.float8_e4m3fn),
    "e5m2": _float_table(torch.float8_e5m2),
    "int8": _float_table(torch.int8),
    "offset int8": torch.arange(-128.0, 128.0).unsqueeze(1),
    "offset int4": _nibble_table([float(code - 8) for code in range(16)]),
    "int8 of 127": _float_table(torch.int8),
    "nf4": _nibble_table(NF4_VALUES, high_first=True),
    "fp4": _nibble_table(FP4, high_first=True) / max(FP4),
    "e2m1": _nibble_table([*E2M1, *(-number for number in E2M1)]),
}


@dataclass(frozen=True)
class Component:
    """One of the tensors in a file that together are a compressed tensor."""

    role: str  # One of :data:`ROLES`
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class CompressedTensor:
    """The format of a compressed tensor."""

    codes: str  # Kind of the codes, a key of :data:`TABLES` or :data:`BLOCKS`
    shape: tuple[int, ...]  # Shape of the numbers, ``[..., rows, columns]``; codes of a row lie side by side
    block: tuple[int, int]  # Rows and columns that share a scale; blocks at the edges may be smaller
    dtype: torch.dtype  # Dtype of the numbers
    components: tuple[Component, ...]  # Components in the order of their roles
    transposed: bool = False  # Whether the model has the last two dimensions the other way round

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return sum(component.nbytes for component in self.components)

    @property
    def model_shape(self) -> tuple[int, ...]:
        return (*self.shape[:-2], self.shape[-1], self.shape[-2]) if self.transposed else self.shape

    def part(self, first: int, stop: int) -> "CompressedTensor | None":
        """Return the format of matrices ``[first, stop)``, or of rows of a single one; None if a component has them
        elsewhere."""
        if len(self.shape) < 3 and (self.transposed or self.codes not in BLOCKS):
            return None
        components = []
        for component in self.components:
            if component.role != "global_scale":
                if component.shape[:1] != self.shape[:1]:
                    return None
                component = replace(component, shape=(stop - first, *component.shape[1:]))
            components.append(component)
        return replace(self, shape=(stop - first, *self.shape[1:]), components=tuple(components))

    def problem(self) -> str | None:
        """Describe which component does not fit the others; None: all fit."""
        *leading, rows, columns = self.shape
        if self.codes in BLOCKS:
            (stored,) = self.components
            nbytes = BLOCKS[self.codes].row_nbytes(columns)
            return (
                None if stored.shape == (*leading, rows, nbytes) else f"{columns} columns are no whole blocks"
            )
        grid = (-(-rows // self.block[0]), -(-columns // self.block[1]))
        per_byte = TABLES[self.codes].shape[1]
        for component in self.components:
            if component.role == "codes":
                least = -(-columns // per_byte)  # rows may be padded to whole words of four bytes
                packed, odd = divmod(component.nbytes, max(1, math.prod(leading) * rows))
                fits = not odd and least <= packed < least + 4
            elif component.role in ("global_scale", "nested_offset"):
                fits = math.prod(component.shape) == 1
            elif component.role == "nested_map":
                fits = component.shape == (256,)
            elif component.role == "nested_scale":
                fits = math.prod(component.shape) == -(-math.prod(leading) * math.prod(grid) // NESTED_BLOCK)
            elif component.role == "zero_point" and component.dtype == torch.int32:  # packed along the rows
                fits = component.shape[-2:] == (-(-grid[0] // (4 * per_byte)), grid[1])
            else:
                fits = math.prod(component.shape) == math.prod(leading) * math.prod(grid)
            if not fits:
                return (
                    f"its {component.role} of shape {list(component.shape)} are not for {list(self.shape)} in blocks "
                    f"of {self.block[0]} x {self.block[1]}"
                )
        return None

    def decode(self, components: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
        """Write the numbers to ``out`` ``[..., rows, columns]``, of any floating-point dtype and any strides.

        Args:
            components: by their roles, on the device of ``out``.

        Memory: 20 bytes for each of :data:`CHUNK_ELEMENTS` elements, and 8 times as much on an accelerator. Where
        PyTorch compiles, one kernel decodes all, without any.
        """
        *leading, rows, columns = self.shape
        count = math.prod(leading)
        grid_columns = -(-columns // self.block[1])
        codes = components["codes"].reshape(count, rows, -1).view(torch.uint8)
        if self.codes in BLOCKS:
            # both are in the blocks
            scales = codes[..., :0]
            table = codes[..., :0]
        else:
            scales = components["scale"].reshape(count, -1, grid_columns)
            table = _numbers(self.codes, out.device)
        zeros = self._zero_points(components, count, grid_columns)
        divisor = components["global_scale"].float().reshape(()) if "global_scale" in components else None
        settings = self.codes, self.block, self.dtype
        if len(leading) < 2 and fuses(out.device):
            whole = out.view(count, rows, columns)
            nested = self._nested_scales(components, scales, 0, rows)
            if try_fused(_decode, out.device, table, codes, nested, zeros, divisor, 0, *settings, whole):
                return
        step = max(1, CHUNK_ELEMENTS * (1 if kernels_of(out.device) == "cpu" else 8) // columns)
        for index, target in enumerate(_matrices(out)):
            matrix = slice(index, index + 1)
            zero = None if zeros is None else zeros[matrix]
            for start in range(0, rows, step):
                part = target[None, start : start + step]
                some = codes[matrix, start : start + step]
                if NESTED[0] in components:  # of these rows alone
                    nested = self._nested_scales(components, scales, start, start + some.shape[1])
                    _decode(table, some, nested[matrix], zero, divisor, 0, *settings, part)
                else:
                    _decode(table, some, scales[matrix], zero, divisor, start, *settings, part)

    def to_dict(self) -> dict[str, Any]:
        """Return the format for JSON."""
        components = [[part.role, _name(part.dtype), list(part.shape)] for part in self.components]
        first = {"codes": self.codes, "shape": list(self.shape), "block": list(self.block)}
        return {**first, "dtype": _name(self.dtype), "components": components, "transposed": self.transposed}

    @staticmethod
    def _nested_scales(
        components: Mapping[str, torch.Tensor], codes: torch.Tensor, first: int, stop: int
    ) -> torch.Tensor:
        """Return the scales of rows ``[first, stop)``, which are ``codes`` ``[count, rows, columns]``; what is no code
        is returned unchanged.

        Not compiled: a fused multiply-add would round otherwise than bitsandbytes.
        """
        if NESTED[0] not in components:
            return codes
        count, _, columns = codes.shape
        factors, numbers, offset = (components[role].reshape(count, -1) for role in NESTED)
        tables = numbers.shape[1] * torch.arange(count, dtype=torch.int32, device=codes.device).view(-1, 1, 1)
        scales = numbers.flatten()[codes[:, first:stop].int() + tables]
        block = torch.arange(first * columns, stop * columns, device=codes.device) // NESTED_BLOCK
        return scales.mul_(factors[:, block].view_as(scales)).add_(offset.unsqueeze(-1))

    def _zero_points(
        self, components: Mapping[str, torch.Tensor], count: int, columns: int
    ) -> torch.Tensor | None:
        """Return zero points in fp32 ``[count, rows of blocks, columns of blocks]``; None if there are none."""
        packed = components.get("zero_point")
        if packed is None:
            return None
        if packed.dtype != torch.int32:
            return packed.float().reshape(count, -1, columns)
        rows = -(-self.shape[-2] // self.block[0])
        words = packed.reshape(count, -1, columns).transpose(1, 2).contiguous().view(torch.uint8)
        numbers = _numbers(self.codes, packed.device)[words.int()].flatten(-2)
        return numbers[..., :rows].transpose(1, 2)


def _matrices(out: torch.Tensor) -> Iterator[torch.Tensor]:
    if out.dim() == 2:
        yield out
    else:
        for part in out.unbind(0):
            yield from _matrices(part)


def _decode(
    table: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    divisor: torch.Tensor | None,
    first: int,
    kind: str,
    block: tuple[int, int],
    dtype: torch.dtype,
    out: torch.Tensor,
) -> None:
    """Decode rows from ``first`` on of some matrices to ``out`` ``[count, rows, columns]``."""
    _, rows, columns = out.shape
    if kind in BLOCKS:
        blocks = codes.unflatten(-1, (-1, BLOCKS[kind].nbytes))
        out.copy_(BLOCKS[kind].decode(blocks).flatten(-2))
        return
    row = torch.arange(first, first + rows, device=out.device) // block[0]
    column = torch.arange(columns, device=out.device) // block[1]
    numbers = table[codes.int()].flatten(-2)[..., :columns]
    if zeros is not None:
        numbers = numbers - zeros[:, row.unsqueeze(-1), column]
    scale = _as_fp32(scales.index_select(1, row))
    if divisor is not None:
        scale = scale / divisor
    products = numbers * scale[:, :, column]
    if kind == "int8 of 127":  # two roundings, as in bitsandbytes
        products = products * (1 / 127)
    out.copy_(products.to(dtype))


@cache
def _numbers(codes: str, device: torch.device) -> torch.Tensor:
    return TABLES[codes].to(device)


def _as_fp32(scales: torch.Tensor) -> torch.Tensor:
    if scales.dtype == torch.uint8:  # an exponent, as in OCP's E8M0
        return (scales.float() - 127.0).exp2()
    return scales.float()


def _name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    assert dtype in DTYPES.values(), dtype
    return name
