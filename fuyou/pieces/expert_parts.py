"""The parameters of one mixture's experts, range by range."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from fuyou.layout.record_parts import PiecePart
from fuyou.pieces.expert_adapters import AdaptedWeights, ExpertAdapters, Factors
from fuyou.pieces.handle import Parts
from fuyou.pieces.run import Use


class ExpertParts:
    """The parameters of a module of experts.

    Args:
        parts: for the first name of each parameter, its ranges in order.
        trained: first names of those that are trained.
        adapters: what is to be added to them.
    """

    def __init__(
        self,
        module: Any,
        source: Parts,
        parts: Mapping[str, Sequence[PiecePart]],
        trained: Collection[str],
        adapters: ExpertAdapters,
    ):
        self.module, self.source, self.trained, self.adapters = module, source, frozenset(trained), adapters
        self._parts = {name: tuple(ranges) for name, ranges in parts.items()}
        first = next(iter(self._parts.values()))
        self.ranges: tuple[tuple[int, int], ...] = tuple(part.experts for part in first if part.experts is not None)
        """First expert and end of each range."""

    def leaves(self) -> list[torch.Tensor]:
        """Return the handles of whole parameters that the module has now."""
        return [value for value in self.module._parameters.values() if value is not None]

    def parts(self, index: int) -> list[PiecePart]:
        """Return the parts of a range."""
        return [ranges[index] for ranges in self._parts.values()]

    def range_of(self, expert: int) -> int:
        """Return the index of the range that an expert is in."""
        return next(index for index, (first, last) in enumerate(self.ranges) if first <= expert < last)

    def factors(self) -> list[Factors]:
        """Return the adapters' factors that the model has now."""
        return self.adapters.factors()

    def fetch(self, index: int, use: Use, factors: Sequence[Factors]) -> AdaptedWeights:
        """Return the parameters of a range, and wait until they are on the device; ``factors`` are all experts'."""
        parts = self.parts(index)
        weights = self.source.fetch(parts, use)
        dtypes = {name: value.dtype for name, value in self.module._parameters.items() if value is not None}
        named = {part.name.rpartition(".")[2]: weights[part] for part in parts}
        return AdaptedWeights(
            {name: value.to(dtypes[name]) for name, value in named.items()},
            [factor.of(*self.ranges[index]) for factor in factors],
        )

    def trained_parts(self, index: int) -> dict[str, PiecePart]:
        """Return the trained parts of a range by their names in the module."""
        return {part.name.rpartition(".")[2]: part for part in self.parts(index) if part.name in self.trained}

    def hand_on_zeros(self, index: int) -> None:
        """Hand on gradients of a range to which no token has come."""
        for part in self.trained_parts(index).values():
            weights = self.source.fetch((part,), Use.GRADIENT)
            self.source.take_gradient(part, torch.zeros_like(weights[part]))

    def note_forward(self) -> None:
        """Ask for all ranges as a forward pass does, without computing (on the meta device)."""
        for index in range(len(self.ranges)):
            self.source.fetch(self.parts(index), Use.FORWARD)

    def note_backward(self, recomputes: bool) -> None:
        """Ask for all ranges as a backward pass does, without computing (on the meta device)."""
        for index in reversed(range(len(self.ranges))):
            if recomputes:
                self.source.fetch(self.parts(index), Use.FORWARD)
            self.source.fetch(self.parts(index), Use.BACKWARD)
            self.hand_on_zeros(index)
