"""Rows of chosen experts that are trained (:mod:`common.models.chosen_experts`), range by range.

A range of experts has the rows of those of its experts that are chosen, if any: where it is computed, they take their
places, and only there gradients of weights are computed.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace

import torch
from torch import nn

from common.models.chosen_experts import INDEX, chosen_numbers, row_names


@dataclass(frozen=True)
class ChosenRows:
    """The rows of chosen experts of one parameter, in the place of :class:`fuyou.pieces.expert_adapters.Factors`."""

    name: str
    """The whole parameter's name in its module."""
    rows: torch.Tensor
    """``[K, ...]``, fp32."""
    index: torch.Tensor
    """Place of each row, int64 ``[K]``, ascending."""
    numbers: tuple[int, ...]
    """Their numbers among all experts."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What gradients are wanted of."""
        return (self.rows,)

    def place(self, first: int, last: int) -> slice:
        """Return which of the rows are those of experts ``[first, last)``."""
        return slice(bisect_left(self.numbers, first), bisect_left(self.numbers, last))

    def of(self, first: int, last: int) -> "ChosenRows":
        """Return the rows of experts ``[first, last)`` as a leaf, which wants gradients if all rows do."""
        place = self.place(first, last)
        rows = self.rows.detach()[place]
        rows.requires_grad_(len(rows) > 0 and self.rows.requires_grad and torch.is_grad_enabled())
        return replace(self, rows=rows, index=self.index[place] - first, numbers=self.numbers[place])

    def added_to(self, weights: torch.Tensor) -> torch.Tensor:
        """Return weights ``[E, ...]`` with the rows in their places."""
        return weights.index_copy(0, self.index, self.rows.to(weights.dtype)) if self.numbers else weights

    def gradients(self, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the rows' gradient for that of :meth:`added_to`'s result."""
        return (gradient.index_select(0, self.index).to(self.rows.dtype),)


def rows_of(module: nn.Module) -> list[ChosenRows]:
    """Return the rows that a module of experts has now; none if it computes without them."""
    names = {} if module.__dict__.get("_disable_adapters", False) else row_names(module)
    return [
        ChosenRows(name, module.get_parameter(row), module.get_buffer(INDEX), chosen_numbers(module))
        for name, row in names.items()
    ]
