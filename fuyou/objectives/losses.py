"""Losses of preferences (DPO), rewards, and classes, and what a training loop asks of each."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from common.errors import UserError
from fuyou.engine.token_outputs import TokenOutput

SumOverRanks = Callable[[Sequence[float]], list[float]]  # Adds each number up over all ranks; collective


def alone(values: Sequence[float]) -> list[float]:
    """Return the sums over a single rank."""
    return list(values)


@dataclass(frozen=True)
class BatchNumbers:
    """What a loss is made of: the numbers of a batch."""

    out: TokenOutput  # Numbers for each token, of this rank's rows
    reference: torch.Tensor | None = None  # Log-probability under the reference, fp32 `[R]` or `[R, S]`
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)  # The batch's :attr:`Objective.extras`
    sum_over_ranks: SumOverRanks = alone  # Adds up numbers of all ranks


@dataclass(frozen=True)
class Learned:
    """The loss of a batch, and other metrics."""

    loss: torch.Tensor  # This rank's share of the mean loss, an fp32 scalar with a graph
    watched: Mapping[str, torch.Tensor]  # Metrics by TRL's names, a number for each item or row of this rank


class Objective(ABC):
    """An objective: which numbers it wants for each token, and the loss that it makes of them."""

    outputs: tuple[str, ...] = ("log_probs",)  # Outputs of :meth:`fuyou.Engine.tokens`
    extras: tuple[str, ...] = ()  # Names of what a batch has for the loss alone, one entry for each item

    @abstractmethod
    def learn(self, batch: BatchNumbers) -> Learned:
        """Return the mean loss of all items."""


class PairObjective(Objective):
    """The DPO loss of P pairs: Rafailov et al. 2023 (arXiv:2305.18290), equation 7, as TRL 1.16 computes it.

    Rows 2 i and 2 i + 1 of a batch are the preferred and the rejected answer of pair i. Accuracies say how often the
    preferred answer has the larger reward, or is the likelier.

    Args:
        beta: strength of the preference against the reference.

    Raises:
        UserError: if ``beta`` is not above 0.
    """

    def __init__(self, beta: float = 0.1):
        if beta <= 0:
            raise UserError(f"beta must be above 0, not {beta:g}.")
        self._beta = beta

    def learn(self, batch: BatchNumbers) -> Learned:
        """Return the mean loss of all pairs."""
        out = batch.out
        reference = batch.reference
        assert reference is not None
        log_probs = (out["log_probs"] * out.mask).sum(1)
        rewards = self._beta * (
            log_probs - (reference if reference.dim() == 1 else (reference * out.mask).sum(1))
        )
        chosen = rewards[0::2]
        rejected = rewards[1::2]
        log_probs_chosen = log_probs[0::2]
        log_probs_rejected = log_probs[1::2]
        (pairs,) = batch.sum_over_ranks([len(chosen)])
        watched = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/accuracies": (chosen > rejected).float(),
            "rewards/margins": chosen - rejected,
            "logps/chosen": log_probs_chosen,
            "logps/rejected": log_probs_rejected,
            "logps/accuracies": (log_probs_chosen > log_probs_rejected).float(),
        }
        return Learned(-functional.logsigmoid(chosen - rejected).sum() / pairs, watched)


MARGINS = "margins"  # Name of a batch's margins: by how much the preferred answer is better, fp32 `[P]`


class RewardObjective(Objective):
    """The loss of P pairs under the model of Bradley and Terry (1952), as in Ouyang et al. 2022 (arXiv:2203.02155),
    equation 1; with margins, as in Llama 2 (arXiv:2307.09288), equation 2.

    Rows 2 i and 2 i + 1 of a batch are the preferred and the rejected answer of pair i.
    """

    outputs = ("logits",)
    extras = (MARGINS,)

    def learn(self, batch: BatchNumbers) -> Learned:
        """Return the mean loss of all pairs."""
        rewards = batch.out["logits"].flatten()
        differences = rewards[0::2] - rewards[1::2]
        asked = differences if MARGINS not in batch.extras else differences - batch.extras[MARGINS]
        (pairs,) = batch.sum_over_ranks([len(differences)])
        watched = {"accuracy": (differences > 0).float(), "margin": differences, "mean_reward": rewards}
        return Learned(-functional.logsigmoid(asked).sum() / pairs, watched)


class ClassObjective(Objective):
    """The cross entropy of R rows, each with a class."""

    outputs = ("log_probs", "logits")
    extras = ("labels",)

    def learn(self, batch: BatchNumbers) -> Learned:
        """Return the mean loss of all rows."""
        out = batch.out
        labels = batch.extras["labels"]
        (rows,) = batch.sum_over_ranks([len(labels)])
        right = out["logits"].detach().flatten(0, -2).argmax(-1) == labels
        return Learned(-out["log_probs"].sum() / rows, {"accuracy": right.float()})
