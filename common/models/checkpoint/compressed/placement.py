"""Find where the tensors of a checkpoint go when transformers puts several of them together into one parameter.

Its conversions stack, concatenate and transpose. Applying them to real tensors would need all of these as plain numbers
at once. So a conversion is applied to as many tiny tensors, whose numbers tell where they come from. Its result says
where whole tensors go, if it is alike for two different sizes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from common.models.checkpoint.shards import Conversion

_SIZES = ((2, 3, 5), (3, 4, 7))  # Sizes of the tiny tensors; no two dimensions are alike


@dataclass(frozen=True)
class _Spot:
    """The place of a part in the result of a conversion."""

    axes: tuple[int, ...]  # Dimension of the result along which each of the part's dimensions lies
    origin: tuple[int, ...]  # Index of its first element, along `axes` in units of the part's size


class Placements:
    """The places to which a model's conversions put their parts."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._known: dict[tuple[object, ...], list[_Spot] | None] = {}
        self._known_rules: list[object] = []  # kept alive, so that no other rule gets the identity of one

    def place(
        self, conversion: Conversion, part: Sequence[int], shape: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return the strides of every part in the flat parameter, and each one's offset.

        Returns:
            None where a part is not in one piece there, or the parts do not fill the parameter.
        """
        if math.prod(part) * len(conversion.parts) != math.prod(shape):
            return None
        if conversion.rule is None:
            return _strides(shape), (0,)
        spots = self._spots(conversion, len(part))
        if spots is None:
            return None
        whole, axes = _strides(shape), spots[0].axes
        units = [part[axes.index(axis)] if axis in axes else 1 for axis in range(len(shape))]
        offsets = tuple(
            sum(place * unit * stride for place, unit, stride in zip(spot.origin, units, whole, strict=True))
            for spot in spots
        )
        return tuple(whole[axis] for axis in axes), offsets

    def _spots(self, conversion: Conversion, dims: int) -> list[_Spot] | None:
        """Return the places of all parts, if they have equal axes; found once for conversions that layers share."""
        key = (id(conversion.rule), tuple(pattern for pattern, _ in conversion.parts), dims)
        if key not in self._known:
            spots, again = (_tiny_spots(self._model, conversion, size[:dims]) for size in _SIZES)
            alike = spots is not None and spots == again and len({spot.axes for spot in spots}) == 1
            self._known[key] = spots if alike else None
            self._known_rules.append(conversion.rule)
        return self._known[key]


def _tiny_spots(model: PreTrainedModel, conversion: Conversion, size: Sequence[int]) -> list[_Spot] | None:
    count, numel = len(conversion.parts), math.prod(size)
    numbers = torch.arange(count * numel, dtype=torch.float64).view(count, *size)
    tiny = {name: numbers[index] for index, (_, name) in enumerate(conversion.parts)}
    try:
        converted = conversion.convert(model, tiny.__getitem__)
    except Exception:  # any error of an operation about sizes that are not the model's
        return None
    if len(converted) != 1:
        return None
    (result,) = converted.values()
    flat = result.flatten().long()
    if result.numel() != numbers.numel() or not torch.equal(flat.sort().values, numbers.flatten().long()):
        return None
    where = torch.empty_like(flat)
    where[flat] = torch.arange(flat.numel())
    places = torch.stack(torch.unravel_index(where, result.shape), dim=-1).view(count, *size, result.dim())
    spots = [_spot(places[index], size) for index in range(count)]
    return None if None in spots else [spot for spot in spots if spot is not None]


def _spot(places: torch.Tensor, size: Sequence[int]) -> _Spot | None:
    """Find the place of a part from the index of each of its elements in the result, ``[*size, dimensions]``."""
    corner = places[(0,) * len(size)]
    expected, axes = corner.clone().expand(*size, -1).clone(), []
    for dim, length in enumerate(size):
        step = places[tuple(int(dim == other) for other in range(len(size)))] - corner
        axes.append(int(step.argmax()))
        along = torch.arange(length).view([-1 if dim == other else 1 for other in range(len(size))] + [1])
        expected += along * torch.nn.functional.one_hot(torch.tensor(axes[-1]), places.shape[-1])
    if not torch.equal(expected, places) or len(set(axes)) != len(axes):
        return None
    origin = corner.tolist()
    for axis, length in zip(axes, size, strict=True):
        if origin[axis] % length:
            return None
        origin[axis] //= length
    return _Spot(tuple(axes), tuple(origin))


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
