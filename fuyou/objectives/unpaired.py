"""A loss of single answers, each of which is known to be desirable or not: KTO.

Ethayarajh et al. 2024 (arXiv:2402.01306), in the form that TRL 1.16 gives it.
"""

import torch

from common.errors import UserError
from fuyou.objectives.objective import BatchNumbers, Learned, Mean, Objective, row_sums

DESIRABLE = "desirable"  # Name of a batch's marks: which answers are desirable, bool `[N]`


class UnpairedObjective(Objective):
    """The loss of N answers: equation 7 of the paper.

    Rows 2 i and 2 i + 1 of a batch are the prompt of answer i with that answer, and with another prompt's: from the
    latter the distance to the reference is estimated, which carries no gradient.

    Args:
        beta: strength of the preference against the reference.

    Raises:
        UserError: if ``beta`` is not above 0.
    """

    watches = ("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "kl")
    extras = (DESIRABLE,)

    def __init__(self, beta: float = 0.1):
        if beta <= 0:
            raise UserError(f"beta must be above 0, not {beta:g}.")
        self._beta = beta

    def learn(self, batch: BatchNumbers) -> Learned:
        """Return the mean loss of all answers, and what is watched: ``rewards/chosen``, ``rewards/rejected``,
        ``logps/chosen``, ``logps/rejected`` (of desirable answers, and of the others), and ``kl``, the distance."""
        out = batch.out
        assert batch.reference is not None
        desirable = batch.extras[DESIRABLE].bool()
        log_probs = row_sums(out["log_probs"], out.mask)
        ratios = log_probs - row_sums(batch.reference, out.mask)
        matched, others = ratios[0::2], ratios[1::2].detach()
        distance, answers = batch.sum_over_ranks([float(others.sum()), len(others)])
        distance = max(0.0, distance / answers)
        sign = torch.where(desirable, 1.0, -1.0)
        losses = 1 - torch.sigmoid(self._beta * sign * (matched - distance))
        watched = {"kl": Mean(distance * len(others), len(others))}
        for name, some in (("chosen", desirable), ("rejected", ~desirable)):
            if some.any():
                watched[f"rewards/{name}"] = Mean.of(self._beta * matched[some])
                watched[f"logps/{name}"] = Mean.of(log_probs[0::2][some])
        return Learned(losses.sum() / answers, len(others), watched)
