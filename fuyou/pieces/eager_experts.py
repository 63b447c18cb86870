"""Experts as a module's own loop over them computes them (transformers' ``eager``), range by range.

The loop takes one expert's matrix at a time. Each is a separate handle here, so that no gradient of all experts is
ever made; those of a range are put together, and handed on when the pass continues with the next range. Experts are
differentiated in the reverse order of the loop, which adds their gradients up as in the ordinary model: the last range
comes first.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from fuyou.layout.record_parts import PiecePart
from fuyou.pieces.expert_adapters import ExpertParts, Factors, tensors_of
from fuyou.pieces.handle import Handle, Origin, chosen_expert, hand_on
from fuyou.pieces.run import Use, Weights, current_supply


class EagerExperts:
    """Takes the place of a module's own loop over experts.

    Args:
        device: where handles pretend to be.
    """

    def __init__(self, mixture: ExpertParts, device: torch.device):
        self._mixture, self._device = mixture, device
        self.module_forward: Callable[..., torch.Tensor] | None = None
        """The module's way to compute before it was replaced."""

    def __call__(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the chosen experts' outputs, as :meth:`GroupedExperts.__call__` does."""
        if not current_supply().computes:
            result: torch.Tensor = _OnMeta.apply(self._mixture, hidden, weights, *self._mixture.leaves())
            return result
        factors = self._mixture.factors()
        call = _Call(self._mixture, factors, self._device)
        if torch.is_grad_enabled() and (self._mixture.trained or factors):
            anchor = torch.zeros((), device=hidden.device, requires_grad=True)
            hidden = _Enter.apply(call, hidden, anchor, *tensors_of(factors))
        token = chosen_expert.set(call.expert)
        try:
            assert self.module_forward is not None
            return self.module_forward(hidden, index, weights)
        finally:
            chosen_expert.reset(token)


class _Call:
    """One run of the loop, and the gradients that are on their way from it."""

    def __init__(self, mixture: ExpertParts, factors: Sequence[Factors], device: torch.device):
        self._mixture, self._device = mixture, device
        self._factors = {factor.name: factor for factor in factors}
        self._of_factors = {
            factor.name: [torch.zeros_like(each) if each.requires_grad else None for each in tensors_of([factor])]
            for factor in factors
        }
        self._handles: dict[tuple[str, int], Handle] = {}
        self._sums: dict[PiecePart, torch.Tensor] = {}
        self._open = len(mixture.ranges)  # ranges whose gradients have not been handed on

    def expert(self, name: str, expert: int) -> torch.Tensor:
        if (name, expert) not in self._handles:
            number = self._mixture.range_of(expert)
            (part,) = (part for part in self._mixture.parts(number) if part.name == name)
            inside = name.rpartition(".")[2]
            whole = self._mixture.module._parameters[inside]
            shape, first = whole.shape[1:], self._mixture.ranges[number][0]
            geometry = torch.empty(shape, dtype=whole.dtype, device="meta")
            factors = self._factors.get(inside)
            if factors is None:
                origin = Origin(self, name, (part,), (expert - first) * shape.numel())
            else:
                add = _adding(factors.of(expert, expert + 1), expert - first)
                origin = Origin(self, name, (part,), make=add)
            handle = Handle.make(geometry, origin, self._device)
            if torch.is_grad_enabled() and (name in self._mixture.trained or factors is not None):
                handle.requires_grad_()
                hand_on(handle, lambda gradient: self._take(name, number, expert, gradient))
            self._handles[name, expert] = handle
        return self._handles[name, expert]

    def fetch(self, parts: Collection[PiecePart], use: Use | None = None) -> Weights:
        """Return parameters, after the gradients of later ranges: :meth:`fuyou.pieces.handle.Parts.fetch`."""
        if torch._C._current_graph_task_id() != -1:
            for part in parts:
                assert part.experts is not None
                self._finish(self._mixture.range_of(part.experts[0]) + 1)
        return self._mixture.source.fetch(parts, use)

    def take_gradient(self, part: PiecePart, gradient: torch.Tensor) -> None:
        self._mixture.source.take_gradient(part, gradient)

    def finish(self) -> list[torch.Tensor | None]:
        """Hand on what is left, when all experts have been differentiated; return the gradients of factors."""
        self._finish(0)
        return [each for both in self._of_factors.values() for each in both]

    def _take(self, name: str, number: int, expert: int, gradient: torch.Tensor) -> None:
        inside, first = name.rpartition(".")[2], self._mixture.ranges[number][0]
        factors = self._factors.get(inside)
        if factors is not None:
            gradients = factors.of(expert, expert + 1).gradients(gradient.contiguous().unsqueeze(0))
            for target, each in zip(self._of_factors[inside], gradients, strict=True):
                if target is not None:
                    target[expert : expert + 1] = each
        if name in self._mixture.trained:
            self._add(number, self._mixture.trained_parts(number)[inside], expert - first, gradient)

    def _add(self, number: int, part: PiecePart, expert: int, gradient: torch.Tensor) -> None:
        self._finish(number + 1)
        if part not in self._sums:
            assert part.experts is not None
            self._sums[part] = gradient.new_zeros(part.experts[1] - part.experts[0], *gradient.shape)
        self._sums[part][expert] = gradient

    def _finish(self, first: int) -> None:
        while self._open > first:
            self._open -= 1
            for part in self._mixture.trained_parts(self._open).values():
                total = self._sums.pop(part, None)
                if total is None:
                    total = torch.zeros_like(self._mixture.source.fetch((part,), Use.GRADIENT)[part])
                self._mixture.source.take_gradient(part, total)


def _adding(factors: Factors, position: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what adds one expert's ``factors`` to its weights, which are at this place of its range."""
    return lambda weights: factors.added_to(weights[position : position + 1])[0]


class _Enter(torch.autograd.Function):
    """Passes hidden states on; in the backward pass, all experts have been differentiated when it runs."""

    @staticmethod
    def forward(
        ctx: Any, call: _Call, hidden: torch.Tensor, anchor: torch.Tensor, *factors: torch.Tensor
    ) -> torch.Tensor:
        ctx.call = call
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return None, gradient, None, *ctx.call.finish()


class _OnMeta(torch.autograd.Function):
    """Asks for all ranges in order, and computes nothing."""

    @staticmethod
    def forward(
        ctx: Any, mixture: ExpertParts, hidden: torch.Tensor, weights: torch.Tensor, *leaves: torch.Tensor
    ) -> torch.Tensor:
        ctx.mixture, ctx.leaves = mixture, len(leaves)
        ctx.save_for_backward(hidden, weights)
        mixture.note_forward()
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.mixture.note_backward(recomputes=False)
        return None, *(torch.empty_like(value) for value in ctx.saved_tensors), *(None for _ in range(ctx.leaves))
