"""Experts that a family's own code computes one by one, each from its rows of parameters (LongCat-Flash).

That code runs unchanged: a row of a parameter in pieces is in one range of experts, which is waited for. Where there
are no values it cannot run, as it asks which experts are chosen; then all ranges are needed in order.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fuyou.layout.record_parts import PiecePart
from fuyou.pieces.expert_adapters import replaced_forward
from fuyou.pieces.run import PieceSource, Use, current_supply


class LoopedExperts:
    """Replaces the computation of a module of experts where it has no values.

    Args:
        parts: for the first name of each parameter, its ranges in order.
    """

    def __init__(self, module: nn.Module, source: PieceSource, parts: Mapping[str, Sequence[PiecePart]]):
        self._module = module
        self._forward = module.forward
        self._source = source
        self._ranges = [list(of_range) for of_range in zip(*parts.values(), strict=False)]

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Let the module compute with pieces while the context is open."""
        with replaced_forward(self._module, self):
            yield

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> Any:
        """Return the weighted sum of the chosen experts' outputs ``[T, H]``."""
        if current_supply().computes:
            return self._forward(hidden_states, top_k_index, top_k_weights)
        return _Needed.apply(self, hidden_states, top_k_weights)

    def need(self, use: Use) -> None:
        """Ask for all ranges, in the order in which a pass asks for them."""
        for parts in self._ranges if use is Use.FORWARD else reversed(self._ranges):
            self._source.fetch(parts, use)


class _Needed(torch.autograd.Function):
    """:class:`LoopedExperts` without values, for autograd."""

    @staticmethod
    def forward(
        ctx: Any, experts: LoopedExperts, hidden: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.experts = experts
        ctx.inputs = (hidden, weights)
        experts.need(Use.FORWARD)
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        ctx.experts.need(Use.BACKWARD)
        return None, *map(torch.empty_like, ctx.inputs)
