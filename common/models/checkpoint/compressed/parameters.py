"""Find where the tensors of a checkpoint go when transformers puts several of them together into one parameter.

Its conversions stack, concatenate and transpose. Applying them to real tensors would need all of these as plain numbers
at once. So a conversion is applied to as many tiny tensors, whose numbers tell where they come from. Its result says
where whole tensors go, if it is alike for two different sizes.
"""

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from transformers import PreTrainedModel

from common.models.checkpoint.compressed.formats import CompressedShards
from common.models.checkpoint.compressed.tensors import CompressedTensor
from common.models.checkpoint.shards import Conversion
from common.quantization import fuses

_SIZES = ((2, 3, 5), (3, 4, 7))  # Sizes of the tiny tensors; no two dimensions are alike


class Placements:
    """The places to which a model's conversions put their parts."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._known: dict[tuple[object, ...], _Spots | None] = {}
        self._known_rules: list[object] = []  # kept alive, so that no other rule gets the identity of one

    def place(
        self, conversion: Conversion, part: Sequence[int], shape: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return every part's strides in the flat parameter and their offsets; None if it is cut, or they do not fill
        it."""
        if math.prod(part) * len(conversion.parts) != math.prod(shape):
            return None
        if conversion.rule is None:
            return _strides(shape), (0,)
        spots = self._spots(conversion, len(part))
        if spots is None:
            return None
        whole, (axes, origins) = _strides(shape), spots
        units = [
            part[axes.index(axis)] * stride if axis in axes else stride for axis, stride in enumerate(whole)
        ]
        offsets = tuple(sum(map(operator.mul, origin, units)) for origin in origins)
        return tuple(whole[axis] for axis in axes), offsets

    def _spots(self, conversion: Conversion, dims: int) -> "_Spots | None":
        """Return the places of all parts; found once for conversions that layers share."""
        key = (id(conversion.rule), tuple(pattern for pattern, _ in conversion.parts), dims)
        if key not in self._known:
            spots, again = (_tiny_spots(self._model, conversion, size[:dims]) for size in _SIZES)
            self._known[key] = spots if spots == again else None
            self._known_rules.append(conversion.rule)
        return self._known[key]


# The dimension of the result along which each of a part's dimensions lies; and for each part the index of its first
# element in the result, in units of the part's size where it lies along a dimension.
_Spots = tuple[tuple[int, ...], list[list[int]]]


def _tiny_spots(model: PreTrainedModel, conversion: Conversion, size: Sequence[int]) -> _Spots | None:
    count = len(conversion.parts)
    numel = math.prod(size)
    numbers = torch.arange(count * numel, dtype=torch.float64).view(count, *size)
    tiny = {name: numbers[index] for index, (_, name) in enumerate(conversion.parts)}
    try:
        converted = conversion.convert(model, tiny.__getitem__)
    except Exception:  # any error of an operation about sizes that are not the model's
        return None
    if len(converted) != 1:
        return None
    (result,) = converted.values()
    order = result.flatten().argsort()
    if not torch.equal(result.flatten()[order], numbers.flatten()):
        return None
    # where each number is in the flat result
    places = order.view(count, *size)
    whole = _strides(result.shape)
    corners = order[::numel]
    steps = [int(order[stride] - order[0]) for stride in _strides(size)]
    inside = torch.stack(torch.meshgrid(*map(torch.arange, size), indexing="ij"), dim=-1) @ torch.tensor(
        steps
    )
    if not torch.equal(places, corners.view(-1, *[1] * len(size)) + inside) or not set(steps) <= set(whole):
        return None
    axes = tuple(map(whole.index, steps))
    units = torch.tensor([size[axes.index(axis)] if axis in axes else 1 for axis in range(result.dim())])
    origins = torch.stack(torch.unravel_index(corners, result.shape), dim=-1)
    return None if (origins % units).any() else (axes, (origins // units).tolist())


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


# Parts of a compressed tensor's components: role, first byte in the component, and values
Components = Iterable[tuple[str, int, torch.Tensor]]
# Bytes of a multiple of which every component starts, so that it can be viewed as numbers on any device
ALIGN = 128


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
        """Return the parameter of this shape that a conversion makes; None if its tensors are not compressed, not all
        in one format, or not put together side by side."""
        entries = [shards.compressed.get(name) for _, name in conversion.parts]
        tensors = {None if entry is None else entry.tensor for entry in entries}
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

    def is_smaller_than(self, dtype: torch.dtype) -> bool:
        """Return whether its bytes are fewer than those of its numbers in ``dtype``."""
        return self.tensor.nbytes < self.tensor.numel * dtype.itemsize

    @property
    def nbytes(self) -> int:
        return len(self.offsets) * sum(_aligned(component.nbytes) for component in self.tensor.components)

    @property
    def numel(self) -> int:
        return len(self.offsets) * self.tensor.numel

    def encode(self, parts: Iterable[Components], payload: torch.Tensor) -> None:
        """Copy the components of all parts, as they are in the files, to ``payload`` ``uint8 [nbytes]``."""
        for components, views in zip(parts, self._views(payload), strict=True):
            for role, start, values in components:
                stored = values.reshape(-1).view(torch.uint8)
                views[role][start : start + stored.numel()].copy_(stored)

    def decode(self, payload: torch.Tensor, flat: torch.Tensor) -> None:
        """Write the parameter's numbers to ``flat`` ``[numel]``; see :meth:`CompressedTensor.decode`."""
        if self._together(payload, flat):
            return
        for index, views in enumerate(self._views(payload)):
            components = {
                component.role: views[component.role].view(component.dtype).view(component.shape)
                for component in self.tensor.components
            }
            self.tensor.decode(components, self._place(flat, index))

    def _together(self, payload: torch.Tensor, flat: torch.Tensor) -> bool:
        """Decode all parts as one tensor of one more dimension, if they lie at equal distances: experts, on a GPU."""
        count = len(self.offsets)
        gaps = {later - earlier for earlier, later in pairwise(self.offsets)}
        roles = [component.role for component in self.tensor.components]
        if len(gaps) != 1 or min(gaps) <= 0 or "global_scale" in roles or not fuses(flat.device):
            return False
        components = {}
        rows = payload[: self.nbytes].view(count, -1)
        position = 0
        for component in self.tensor.components:
            components[component.role] = (
                rows[:, position : position + component.nbytes]
                .view(component.dtype)
                .unflatten(1, component.shape)
            )
            position += _aligned(component.nbytes)
        shape = (count, *self.tensor.shape)
        strides = (gaps.pop(), *self.strides)
        view = flat.as_strided(shape, strides, flat.storage_offset() + self.offsets[0])
        replace(self.tensor, shape=shape).decode(components, view)
        return True

    def to_dict(self) -> dict[str, Any]:
        parts = {} if self.parts is None else {"parts": list(self.parts)}
        return {
            "tensor": self.tensor.to_dict(),
            "strides": list(self.strides),
            "offsets": list(self.offsets),
            **parts,
        }

    def _place(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        return flat.as_strided(self.tensor.shape, self.strides, flat.storage_offset() + self.offsets[index])

    def _views(self, payload: torch.Tensor) -> Iterator[dict[str, torch.Tensor]]:
        position = 0
        for _ in self.offsets:
            views = {}
            for component in self.tensor.components:
                views[component.role] = payload[position : position + component.nbytes]
                position += _aligned(component.nbytes)
            yield views


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
