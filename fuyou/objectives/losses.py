"""Losses of preferences (DPO), rewards, and classes, and what a training loop asks of each."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch.nn import functional

from common.errors import UserError

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


class PairObjective(Objective):
    """The DPO loss of P pairs: Rafailov et al. 2023 (arXiv:2305.18290), equation 7, as TRL 1.16 computes it.

    Rows 2 i and 2 i + 1 of a batch are the preferred and the rejected answer of pair i. Metrics are means over this
    rank's pairs; accuracies say how often the preferred answer has the larger reward, or is the likelier.

    Args:
        beta: strength of the preference against the reference.

    Raises:
        UserError: if ``beta`` is not above 0.
    """

    watches = (
        "rewards/chosen",
        "rewards/rejected",
        "rewards/accuracies",
        "rewards/margins",
        "logps/chosen",
        "logps/rejected",
        "logps/accuracies",
    )

    def __init__(self, beta: float = 0.1):
        if beta <= 0:
            raise UserError(f"beta must be above 0, not {beta:g}.")
        self._beta = beta

    def learn(self, batch: BatchNumbers) -> Learned:
        """Return the mean loss of all pairs."""
        out = batch.out
        assert batch.reference is not None
        log_probs = row_sums(out["log_probs"], out.mask)
        rewards = self._beta * (log_probs - row_sums(batch.reference, out.mask))
        chosen, rejected = rewards[0::2], rewards[1::2]
        (pairs,) = batch.sum_over_ranks([len(chosen)])
        loss = -functional.logsigmoid(chosen - rejected).sum() / pairs
        log_probs_chosen, log_probs_rejected = log_probs[0::2], log_probs[1::2]
        watched = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/accuracies": (chosen > rejected).float(),
            "rewards/margins": chosen - rejected,
            "logps/chosen": log_probs_chosen,
            "logps/rejected": log_probs_rejected,
            "logps/accuracies": (log_probs_chosen > log_probs_rejected).float(),
        }
        return Learned(loss, len(chosen), {name: Mean.of(value) for name, value in watched.items()})


MARGINS = "margins"  # Name of a batch's margins: by how much the preferred answer is better, fp32 `[P]`


class RewardObjective(Objective):
    """The loss of P pairs under the model of Bradley and Terry (1952), as in Ouyang et al. 2022 (arXiv:2203.02155),
    equation 1; with margins, as in Llama 2 (arXiv:2307.09288), equation 2.

    Rows 2 i and 2 i + 1 of a batch are the preferred and the rejected answer of pair i.
    """

    outputs = ("logits",)
    watches = ("accuracy", "margin", "mean_reward")
    extras = (MARGINS,)

    def learn(self, batch: BatchNumbers) -> Learned:
        """Return the mean loss of all pairs."""
        rewards = batch.out["logits"].flatten()
        chosen, rejected = rewards[0::2], rewards[1::2]
        differences = chosen - rejected
        asked = differences if MARGINS not in batch.extras else differences - batch.extras[MARGINS]
        losses = -functional.logsigmoid(asked)
        (pairs,) = batch.sum_over_ranks([len(chosen)])
        watched = {
            "accuracy": Mean.of((differences > 0).float()),
            "margin": Mean.of(differences),
            "mean_reward": Mean.of(rewards),
        }
        return Learned(losses.sum() / pairs, len(chosen), watched)


class ClassObjective(Objective):
    """The cross entropy of R rows, each with a class."""

    outputs = ("log_probs", "logits")
    watches = ("accuracy",)
    extras = ("labels",)

    def learn(self, batch: BatchNumbers) -> Learned:
        """Return the mean loss of all rows."""
        out = batch.out
        rows = len(batch.extras["labels"])
        (total,) = batch.sum_over_ranks([rows])
        right = out["logits"].detach().flatten(0, -2).argmax(-1) == batch.extras["labels"]
        return Learned(-out["log_probs"].sum() / total, rows, {"accuracy": Mean.of(right.float())})
