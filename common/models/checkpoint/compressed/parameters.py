"""A parameter of the model as a checkpoint has it: one compressed tensor, or several equal ones (experts)."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from common.models.checkpoint.compressed.placement import Placements
from common.models.checkpoint.compressed.shards import CompressedShards
from common.models.checkpoint.compressed.tensors import CompressedTensor
from common.models.checkpoint.conversion import Conversion

ALIGN = 128
"""Bytes: every component starts on a multiple of these, so that it can be viewed as numbers on any device."""


@dataclass(frozen=True)
class CompressedParameter:
    """Tensors written alike, each with its place in the parameter."""

    tensor: CompressedTensor
    """How each of them is written."""
    strides: tuple[int, ...]
    """Of each one's numbers in the flat parameter."""
    offsets: tuple[int, ...]
    """Where each one's first number is in it."""

    @classmethod
    def of(
        cls, conversion: Conversion, shards: CompressedShards, placements: Placements, shape: tuple[int, ...]
    ) -> "CompressedParameter | None":
        """What a conversion makes of a checkpoint's tensors, a parameter of this shape.

        None if these are not compressed, not all in one way, or put together in another way than side by side.
        """
        found = [shards.compressed.get(name) for _, name in conversion.parts]
        tensors = {None if one is None else one.tensor for one in found}
        tensor = tensors.pop()
        if tensor is None or tensors:
            return None
        places = placements.place(conversion, tensor.model_shape, shape)
        if places is None:
            return None
        strides, offsets = places
        if tensor.transposed:
            strides = (*strides[:-2], strides[-1], strides[-2])
        return cls(tensor, strides, offsets)

    @property
    def nbytes(self) -> int:
        """What all components take, side by side."""
        return len(self.offsets) * self._part_nbytes

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return len(self.offsets) * self.tensor.numel

    def encode(self, parts: Iterable[Mapping[str, torch.Tensor]], payload: torch.Tensor) -> None:
        """Copy the components of all parts, as the files have them, to ``payload`` ``uint8 [nbytes]``."""
        for components, views in zip(parts, self._views(payload), strict=True):
            for role, view in views.items():
                view.copy_(components[role].reshape(-1).view(torch.uint8))

    def decode(self, payload: torch.Tensor, flat: torch.Tensor) -> None:
        """Write the parameter's numbers to ``flat`` ``[numel]``, on the same device. Memory: see
        :meth:`CompressedTensor.decode`."""
        for index, views in enumerate(self._views(payload)):
            components = {one.role: views[one.role].view(one.dtype).view(one.shape) for one in self.tensor.components}
            self.tensor.decode(components, self._place(flat, index))

    def assemble(self, parts: Iterable[Mapping[str, torch.Tensor]]) -> torch.Tensor:
        """Return the numbers ``[numel]``, given the components of all parts, each of which is needed only once."""
        flat = torch.empty(self.numel, dtype=self.tensor.dtype)
        for index, components in enumerate(parts):
            self.tensor.decode(components, self._place(flat, index))
        return flat

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {"tensor": self.tensor.to_dict(), "strides": list(self.strides), "offsets": list(self.offsets)}

    @property
    def _part_nbytes(self) -> int:
        return sum(_aligned(one.nbytes) for one in self.tensor.components)

    def _place(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        return flat.as_strided(self.tensor.shape, self.strides, flat.storage_offset() + self.offsets[index])

    def _views(self, payload: torch.Tensor) -> Iterator[dict[str, torch.Tensor]]:
        """The bytes of each part's components."""
        position = 0
        for _ in self.offsets:
            views = {}
            for one in self.tensor.components:
                views[one.role] = payload[position : position + one.nbytes]
                position += _aligned(one.nbytes)
            yield views


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
