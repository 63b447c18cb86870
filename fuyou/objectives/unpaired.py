"""A loss of single answers, each of which is known to be desirable or not: KTO.

Ethayarajh et al. 2024 (arXiv:2402.01306), in the form that TRL 1.16 gives it.
"""

from dataclasses import dataclass

import torch

from common.errors import UserError
from fuyou.objectives.objective import BatchNumbers, Learned, Mean, Objective, row_sums

DESIRABLE = "desirable"
"""Name of a batch's marks: which answers are desirable, bool ``[N]``."""


@dataclass(frozen=True)
class UnpairedConfig:
    """Hyper-parameters, by the names that TRL gives them.

    Raises:
        UserError: one has a value that it cannot have.
    """

    beta: float = 0.1
    """Strength of the preference against the reference."""
    desirable_weight: float = 1.0
    """Weight of desirable answers' losses."""
    undesirable_weight: float = 1.0
    """Weight of the others'."""

    def __post_init__(self) -> None:
        if self.beta <= 0:
            raise UserError(f"beta must be above 0, not {self.beta:g}.")
        for name in ("desirable_weight", "undesirable_weight"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} must not be negative: {getattr(self, name):g}.")


class UnpairedObjective(Objective):
    """The loss of N answers: equation 7 of the paper.

    Rows 2 i and 2 i + 1 of a batch are the prompt of answer i with that answer, and with another prompt's: from the
    latter the distance to the reference is estimated, which carries no gradient.

    Args:
        config: hyper-parameters.
    """

    watches = ("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "kl")
    needs_reference = True
    extras = (DESIRABLE,)

    def __init__(self, config: UnpairedConfig):
        self._config = config

    def learn(self, batch: BatchNumbers) -> Learned:
        """Return the mean loss of all answers, and what is watched: ``rewards/chosen``, ``rewards/rejected``,
        ``logps/chosen``, ``logps/rejected`` (of desirable answers, and of the others), and ``kl``, the distance."""
        out = batch.out
        assert batch.reference is not None
        config, desirable = self._config, batch.extras[DESIRABLE].bool()
        log_probs = row_sums(out["log_probs"], out.mask)
        ratios = log_probs - row_sums(batch.reference, out.mask)
        matched, others = ratios[0::2], ratios[1::2].detach()
        distance, answers = batch.sum_over_ranks([float(others.sum()), len(others)])
        distance = max(0.0, distance / answers)
        sign = torch.where(desirable, 1.0, -1.0)
        weight = torch.where(desirable, config.desirable_weight, config.undesirable_weight)
        losses = weight * (1 - torch.sigmoid(config.beta * sign * (matched - distance)))
        watched = {"kl": Mean(distance * len(others), len(others))}
        for name, some in (("chosen", desirable), ("rejected", ~desirable)):
            if some.any():
                watched[f"rewards/{name}"] = Mean.of(config.beta * matched[some])
                watched[f"logps/{name}"] = Mean.of(log_probs[0::2][some])
        return Learned(losses.sum() / answers, len(others), watched)
