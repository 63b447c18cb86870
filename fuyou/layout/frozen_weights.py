"""Formats of frozen weights on SSD: the compute dtype, fewer bits, or a compressed checkpoint's bytes.

In an int8 or nf4 record, the matrices (:func:`fuyou.layout.record_parts.is_matrix`) are rows of quantized blocks; the
rest follows in the compute dtype. The device decodes a record into the compute dtype once per visit.
"""

import sys
from collections.abc import Iterator
from enum import Enum

import torch

from common.errors import UserError
from common.hardware import kernels_of
from common.quantization import (
    dequantize,
    dequantize_nf4,
    fuses,
    nf4_nbytes,
    quantize,
    quantize_nf4,
    quantized_nbytes,
)

ROW_ELEMENTS = 1 << 20  # Elements of a row. A CPU decodes row by row, to use little memory.
# Rows that an accelerator decodes at once where PyTorch cannot compile, to launch fewer kernels. Compiled, one kernel
# decodes all rows, and needs no other memory.
ROWS_ON_ACCELERATORS = 8


class FrozenDtype(Enum):
    """Format of the blocks' frozen matrices; embeddings and head stay in the compute dtype, unless a compressed
    checkpoint has them in fewer bytes."""

    PLAIN = "plain"  # The dtype that blocks compute in
    INT8 = "int8"  # 1.016 bytes per weight; errors are at most 1/254 of the largest in each 256 weights
    NF4 = "nf4"  # 0.5625 bytes per weight: one of 16 values, relative to the largest in each 64 weights
    # The bytes of a compressed checkpoint (:mod:`common.models.checkpoint.compressed`); nothing is rounded. How many
    # they are depends on the parameter: see :meth:`fuyou.layout.record.Record.decode`.
    CHECKPOINT = "checkpoint"

    @classmethod
    def named(cls, name: str | None) -> "FrozenDtype | None":
        """Return the format with this value; None leaves the choice to the checkpoint.

        Raises:
            UserError: if there is no such dtype.
        """
        names = [dtype.value for dtype in cls]
        if name is not None and name not in names:
            raise UserError(
                f"frozen_dtype must be {' or '.join(names)}, or None for what suits the checkpoint, not {name!r}."
            )
        return None if name is None else cls(name)

    def used_nbytes(self, matrices: int, rest: int, dtype: torch.dtype) -> int:
        """Return the bytes of a record with these elements in matrices (whole blocks) and elsewhere."""
        return self._row_nbytes(matrices, dtype) + rest * dtype.itemsize

    def encode(self, flat: torch.Tensor, matrices: int, payload: torch.Tensor) -> None:
        """Write ``flat`` ``[n]``, which begins with ``matrices`` elements of matrices, to ``uint8`` ``payload``."""
        for part, row in self._rows(flat, matrices, payload):
            if self is FrozenDtype.INT8:
                quantize(part, 8, row)
            elif self is FrozenDtype.NF4:
                quantize_nf4(part, row)
            else:
                row.view(flat.dtype).copy_(part)
        self._rest(flat, matrices, payload).copy_(flat[matrices:])

    def decode(self, payload: torch.Tensor, matrices: int, flat: torch.Tensor) -> None:
        """Undo :meth:`encode`, up to rounding."""
        for part, row in self._rows(flat, matrices, payload):
            if self is FrozenDtype.INT8:
                dequantize(row, part.shape[-1], 8, part)
            elif self is FrozenDtype.NF4:
                dequantize_nf4(row, part)
            else:
                part.copy_(row.view(flat.dtype))
        flat[matrices:].copy_(self._rest(flat, matrices, payload))

    def _rows(
        self, flat: torch.Tensor, matrices: int, payload: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the matrices' elements ``[r, n]`` and the bytes for them ``[r, bytes]``, a few rows at a time."""
        start = 0
        position = 0
        while start < matrices:
            elements = min(ROW_ELEMENTS, matrices - start)
            most = _rows_at_once(flat.device)
            if not start:  # few: if PyTorch cannot compile what decodes them, that is known before the rest
                most = min(most, ROWS_ON_ACCELERATORS)
            rows = min(most, (matrices - start) // elements)
            nbytes = self._row_nbytes(elements, flat.dtype)
            part = flat[start : start + rows * elements]
            row = payload[position : position + rows * nbytes]
            yield part.view(rows, elements), row.view(rows, nbytes)
            start = start + rows * elements
            position = position + rows * nbytes

    def _rest(self, flat: torch.Tensor, matrices: int, payload: torch.Tensor) -> torch.Tensor:
        start = self._row_nbytes(matrices, flat.dtype)
        return payload[start : start + flat[matrices:].nbytes].view(flat.dtype)

    def _row_nbytes(self, elements: int, dtype: torch.dtype) -> int:
        if self is FrozenDtype.INT8:
            return quantized_nbytes(elements, 8)
        return nf4_nbytes(elements) if self is FrozenDtype.NF4 else elements * dtype.itemsize


def _rows_at_once(device: torch.device) -> int:
    if kernels_of(device) == "cpu":
        return 1
    return sys.maxsize if fuses(device) else ROWS_ON_ACCELERATORS
