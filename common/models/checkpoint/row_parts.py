"""Rows of a parameter that a checkpoint has in parts: experts that are stored one by one and fused in the model."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from common.models.checkpoint.compressed import Placements
from common.models.checkpoint.conversion import Conversion
from common.models.checkpoint.shards import StoredTensor


@dataclass(frozen=True)
class RowParts:
    """Tensors on disk that are put side by side into a parameter, none of them into two of its rows."""

    names: tuple[str, ...]
    """Names on disk."""
    part_shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...]
    """Strides of each tensor's numbers in the flat parameter."""
    offsets: tuple[int, ...]
    """Place of each tensor's first number in the flat parameter."""
    shape: tuple[int, ...]
    """Shape of the parameter."""

    @classmethod
    def of(
        cls, conversion: Conversion, tensors: Sequence[StoredTensor], placements: Placements, shape: tuple[int, ...]
    ) -> "RowParts | None":
        """Return the parts of a parameter of this shape.

        Args:
            conversion: what makes it.
            tensors: those that it is made of.
            placements: the places where the model's conversions put them.
            shape: shape of the parameter.

        Returns:
            None if they are not all alike, not put side by side, or one is in several rows.
        """
        kinds = {(stored.shape, stored.dtype) for stored in tensors}
        part_shape, dtype = kinds.pop()
        places = None if kinds else placements.place(conversion, part_shape, shape)
        if places is None:
            return None
        width, each, (strides, offsets) = math.prod(shape[1:]), math.prod(part_shape), places
        begun = Counter(offset // width for offset in offsets)
        if any(begun[row] * each != width for row in range(shape[0])):
            return None
        return cls(tuple(name for _, name in conversion.parts), part_shape, dtype, strides, offsets, shape)

    def read(self, first: int, stop: int, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Return rows ``[first, stop)``. Memory: that of the result, and of one part."""
        width = math.prod(self.shape[1:])
        flat = torch.empty((stop - first) * width, dtype=self.dtype)
        for name, offset in zip(self.names, self.offsets, strict=True):
            if first * width <= offset < stop * width:
                flat.as_strided(self.part_shape, self.strides, offset - first * width).copy_(read(name))
        return flat.view(stop - first, *self.shape[1:])
