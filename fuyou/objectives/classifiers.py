"""Losses of sequence classifiers: rewards from pairs of answers, and classes."""

from torch.nn import functional

from fuyou.objectives.objective import BatchNumbers, Learned, Mean, Objective

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
        """Return the mean loss of all pairs, and what is watched: ``accuracy``, ``margin``, ``mean_reward``."""
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
        """Return the mean loss of all rows, and what is watched: ``accuracy``."""
        out = batch.out
        rows = len(batch.extras["labels"])
        (total,) = batch.sum_over_ranks([rows])
        right = out["logits"].detach().flatten(0, -2).argmax(-1) == batch.extras["labels"]
        return Learned(-out["log_probs"].sum() / total, rows, {"accuracy": Mean.of(right.float())})
