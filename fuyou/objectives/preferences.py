"""The loss of pairs of answers to one prompt, of which the first is preferred: DPO.

Rafailov et al. 2023 (arXiv:2305.18290), equation 7, as TRL 1.16 computes it.
"""

from torch.nn import functional

from common.errors import UserError
from fuyou.objectives.objective import BatchNumbers, Learned, Mean, Objective, row_sums


class PairObjective(Objective):
    """The DPO loss of P pairs.

    Rows 2 i and 2 i + 1 of a batch are the preferred and the rejected answer of pair i.

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
        """Return the mean loss of all pairs, and what is watched, a mean over this rank's pairs each:
        ``rewards/chosen``, ``rewards/rejected``, ``rewards/margins``, ``rewards/accuracies`` (how often the preferred
        answer has the larger reward), ``logps/chosen``, ``logps/rejected``, ``logps/accuracies`` (how often it is the
        likelier)."""
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
