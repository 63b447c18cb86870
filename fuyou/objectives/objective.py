"""What a training loop asks of an objective: a loss of the numbers that the head gives for each token."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

# Function that adds numbers up over all ranks, each with those of the same place; all ranks call it alike.
SumOverRanks = Callable[[Sequence[float]], list[float]]


def alone(values: Sequence[float]) -> list[float]:
    """Return the sums over all ranks where there is one: the values themselves."""
    return list(values)


class TokenNumbers(Protocol):
    """What the objectives read of :class:`fuyou.engine.token_outputs.TokenOutput`."""

    mask: torch.Tensor

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return an output by name."""
        ...


class Mean(NamedTuple):
    """A mean in two parts, so that those of ranks and batches can be joined."""

    total: float
    number: float

    @staticmethod
    def of(values: torch.Tensor) -> "Mean":
        """Return the mean of all elements."""
        return Mean(float(values.detach().sum()), values.numel())


@dataclass(frozen=True)
class Learned:
    """The loss of a batch, and what people watch beside it."""

    loss: torch.Tensor  # This rank's share of the mean loss, an fp32 scalar with a graph
    items: float  # Number of what that mean is over (pairs, answers, rows, tokens) on this rank
    # What people watch, by the names that TRL gives it; what has no value in this batch is not there.
    watched: dict[str, Mean] = field(default_factory=dict)


@dataclass(frozen=True)
class BatchNumbers:
    """What a loss is made of: the numbers of a batch."""

    out: TokenNumbers  # Numbers for each token, of this rank's rows
    # Log-probability of each row's targets under the reference, fp32 `[R]`; or of each target, `[R, S]`.
    reference: torch.Tensor | None = None
    # What the batch has under :attr:`Objective.extras`.
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)
    sum_over_ranks: SumOverRanks = alone  # Adds up numbers of all ranks


class Objective(ABC):
    """An objective: which numbers it wants for each token, and the loss that it makes of them."""

    outputs: tuple[str, ...] = ("log_probs",)  # Outputs of :meth:`fuyou.Engine.tokens`
    # Names of what people watch beside the loss, in this order; some may be missing in a batch.
    watches: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()  # Names of what a batch has for the loss alone, one entry for each item

    @abstractmethod
    def learn(self, batch: BatchNumbers) -> Learned:
        """Return the loss of a batch."""


def row_sums(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return ``values`` ``[R, S]`` summed over the positions of each row that ``mask`` marks, ``[R]``; what has one
    value for each row is returned as it is."""
    return values if values.dim() == 1 else (values * mask).sum(1)
