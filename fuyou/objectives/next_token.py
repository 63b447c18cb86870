"""The next token's cross entropy with what people add to it: label smoothing, and the z-loss."""

from fuyou.objectives.objective import BatchNumbers, Learned, Mean, Objective


class NextTokenObjective(Objective):
    """Cross entropy of N tokens with smoothed labels, plus the z-loss.

    Args:
        label_smoothing: part of the probability that is spread over the vocabulary (Szegedy et al. 2016,
            arXiv:1512.00567, section 7), as ``transformers.Trainer`` has it.
        z_loss: weight of the squared logarithm of the sum of exponentials (Chowdhery et al. 2022, arXiv:2204.02311,
            section 5), which keeps logits from growing.
    """

    watches = ("cross_entropy", "z_loss")

    def __init__(self, label_smoothing: float = 0.0, z_loss: float = 0.0):
        self._smoothing, self._z_loss = label_smoothing, z_loss
        wanted = {"log_probs": True, "mean_log_probs": label_smoothing > 0, "log_z": z_loss > 0}
        self.outputs = tuple(name for name, is_wanted in wanted.items() if is_wanted)

    def learn(self, batch: BatchNumbers) -> Learned:
        """Return the mean loss of all tokens that have a label, and what is watched: ``cross_entropy``, and ``z_loss``
        without its weight."""
        out = batch.out
        mask = out.mask
        tokens = int(mask.sum())
        (total,) = batch.sum_over_ranks([tokens])
        own = -out["log_probs"].sum()
        loss, watched = own, {"cross_entropy": Mean(float(own.detach()), tokens)}
        if self._smoothing:
            loss = (1 - self._smoothing) * own - self._smoothing * (out["mean_log_probs"] * mask).sum()
        if self._z_loss:
            squares = (out["log_z"] ** 2 * mask).sum()
            loss = loss + self._z_loss * squares
            watched["z_loss"] = Mean(float(squares.detach()), tokens)
        return Learned(loss / total, tokens, watched)
