"""A parameter of the model as a compressed checkpoint has it: one tensor, or several of one format (experts)."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from common.models.checkpoint.compressed.detection import CompressedShards
from common.models.checkpoint.compressed.placement import Placements
from common.models.checkpoint.compressed.tensors import CompressedTensor
from common.models.checkpoint.shards import Conversion
from common.quantisation.fused import fuses

ALIGN = 128  # Bytes of a multiple of which every component starts, so that it can be viewed as numbers on any device


@dataclass(frozen=True)
class CompressedParameter:
    """Compressed tensors of one format, each with its place in the parameter."""

    tensor: CompressedTensor  # Format of each of them
    strides: tuple[int, ...]  # Strides of each tensor's numbers in the flat parameter
    offsets: tuple[int, ...]  # Place of each tensor's first number in the flat parameter
    # Numbers of these tensors among those that the checkpoint's parameter is made of; None: they are all of them.
    parts: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls, conversion: Conversion, shards: CompressedShards, placements: Placements, shape: tuple[int, ...]
    ) -> "CompressedParameter | None":
        """Return what a conversion makes of a checkpoint's tensors: a parameter of this shape.

        Returns:
            None if these are not compressed, not all in one format, or not put together side by side.
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

    def between(self, first: int, stop: int) -> "CompressedParameter | None":
        """Return elements ``[first, stop)`` of the flat parameter as a parameter; None if a tensor would be cut."""
        inside = [index for index, offset in enumerate(self.offsets) if first <= offset < stop]
        if len(inside) * self.tensor.numel != stop - first:
            return None
        offsets = tuple(self.offsets[index] - first for index in inside)
        return replace(
            self, offsets=offsets, parts=tuple(self.parts[index] if self.parts else index for index in inside)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all components, side by side."""
        return len(self.offsets) * self._part_nbytes

    @property
    def numel(self) -> int:
        """Number of elements of the parameter."""
        return len(self.offsets) * self.tensor.numel

    def encode(self, parts: Iterable[Mapping[str, torch.Tensor]], payload: torch.Tensor) -> None:
        """Copy the components of all parts, as they are in the files, to ``payload`` ``uint8 [nbytes]``."""
        for components, views in zip(parts, self._views(payload), strict=True):
            for role, view in views.items():
                view.copy_(components[role].reshape(-1).view(torch.uint8))

    def decode(self, payload: torch.Tensor, flat: torch.Tensor) -> None:
        """Write the parameter's numbers to ``flat`` ``[numel]``, on the same device. Memory: see
        :meth:`CompressedTensor.decode`."""
        if self._together(payload, flat):
            return
        for index, views in enumerate(self._views(payload)):
            components = {one.role: views[one.role].view(one.dtype).view(one.shape) for one in self.tensor.components}
            self.tensor.decode(components, self._place(flat, index))

    def _together(self, payload: torch.Tensor, flat: torch.Tensor) -> bool:
        """Decode all parts as one tensor of one more dimension, if they lie at equal distances: experts, on a GPU."""
        count, gaps = len(self.offsets), {later - earlier for earlier, later in pairwise(self.offsets)}
        roles = [one.role for one in self.tensor.components]
        if len(gaps) != 1 or min(gaps) <= 0 or "global_scale" in roles or not fuses(flat.device):
            return False
        components, rows, position = {}, payload[: self.nbytes].view(count, -1), 0
        for one in self.tensor.components:
            components[one.role] = rows[:, position : position + one.nbytes].view(one.dtype).unflatten(1, one.shape)
            position += _aligned(one.nbytes)
        shape, strides = (count, *self.tensor.shape), (gaps.pop(), *self.strides)
        place = flat.as_strided(shape, strides, flat.storage_offset() + self.offsets[0])
        replace(self.tensor, shape=shape).decode(components, place)
        return True

    def assemble(self, parts: Iterable[Mapping[str, torch.Tensor]]) -> torch.Tensor:
        """Return the numbers ``[numel]``, given the components of all parts, which are read one after the other."""
        flat = torch.empty(self.numel, dtype=self.tensor.dtype)
        for index, components in enumerate(parts):
            self.tensor.decode(components, self._place(flat, index))
        return flat

    def to_dict(self) -> dict[str, Any]:
        parts = {} if self.parts is None else {"parts": list(self.parts)}
        return {"tensor": self.tensor.to_dict(), "strides": list(self.strides), "offsets": list(self.offsets), **parts}

    @property
    def _part_nbytes(self) -> int:
        return sum(_aligned(one.nbytes) for one in self.tensor.components)

    def _place(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        return flat.as_strided(self.tensor.shape, self.strides, flat.storage_offset() + self.offsets[index])

    def _views(self, payload: torch.Tensor) -> Iterator[dict[str, torch.Tensor]]:
        position = 0
        for _ in self.offsets:
            views = {}
            for one in self.tensor.components:
                views[one.role] = payload[position : position + one.nbytes]
                position += _aligned(one.nbytes)
            yield views


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
