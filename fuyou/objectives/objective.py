"""What a training loop asks of an objective: a loss of the numbers that the head gives for each token."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

SumOverRanks = Callable[[Sequence[float]], list[float]]  # Adds each number up over all ranks; collective


def alone(values: Sequence[float]) -> list[float]:
    return list(values)


class TokenNumbers(Protocol):
    """What the objectives read of :class:`fuyou.engine.token_outputs.TokenOutput`."""

    mask: torch.Tensor

    def __getitem__(self, name: str) -> torch.Tensor: ...

    def keys(self) -> Iterable[str]:
        """Return the names of all outputs."""
        ...


class Mean(NamedTuple):
    """A mean in two parts, so that those of ranks and batches can be joined."""

    total: float
    number: float

    @staticmethod
    def of(values: torch.Tensor) -> "Mean":
        return Mean(float(values.detach().sum()), values.numel())


@dataclass(frozen=True)
class Learned:
    """The loss of a batch, and other metrics."""

    loss: torch.Tensor  # This rank's share of the mean loss, an fp32 scalar with a graph
    items: float  # Number of what that mean is over (pairs, answers, rows, tokens) on this rank
    watched: dict[str, Mean] = field(default_factory=dict)  # Metrics of this batch, by TRL's names


@dataclass(frozen=True)
class BatchNumbers:
    """What a loss is made of: the numbers of a batch."""

    out: TokenNumbers  # Numbers for each token, of this rank's rows
    reference: torch.Tensor | None = None  # Log-probability under the reference, fp32 `[R]` or `[R, S]`
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)  # The batch's :attr:`Objective.extras`
    sum_over_ranks: SumOverRanks = alone  # Adds up numbers of all ranks


class Objective(ABC):
    """An objective: which numbers it wants for each token, and the loss that it makes of them."""

    outputs: tuple[str, ...] = ("log_probs",)  # Outputs of :meth:`fuyou.Engine.tokens`
    watches: tuple[str, ...] = ()  # Names of the metrics, in order; some may be missing in a batch
    extras: tuple[str, ...] = ()  # Names of what a batch has for the loss alone, one entry for each item

    @abstractmethod
    def learn(self, batch: BatchNumbers) -> Learned:
        """Return the loss of a batch."""


def row_sums(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return ``values`` ``[R, S]`` summed over the positions of each row that ``mask`` marks, ``[R]``; what has one
    value for each row is returned as it is."""
    return values if values.dim() == 1 else (values * mask).sum(1)
