"""Steps whose loss or gradient is NaN or infinite: stop training, or skip them."""

import math

from common.errors import FinetuneError, UserError, did_you_mean

POLICIES = ("stop", "skip")

MOST_IN_A_ROW = 10  # Stop after this many skipped steps in a row: the weights have diverged, or all data are broken


class NonFiniteLoss(FinetuneError):
    """The loss or the gradient is NaN or infinite. The step is not committed.

    Attributes:
        step: the step that failed.
        committed: the step that ``resume`` continues from.
    """

    def __init__(self, message: str, step: int, committed: int):
        super().__init__(
            f"{message} Training stops; step {committed} is committed. A lower --lr, --max-grad-norm or a look at the "
            "data of that step usually helps; if the next step fails too, the weights had diverged before, and only a "
            "new run helps."
        )
        self.step, self.committed = step, committed


class NonFinitePolicy:
    """Decides for every step whether it is skipped, and counts skipped steps.

    A skipped step leaves weights and moments unchanged and is not counted by Adam's bias correction; its number, batch,
    and learning rate are used up.

    Args:
        name: ``stop`` or ``skip``.
        skipped: steps that the run has skipped before.

    Raises:
        UserError: if the name is unknown.
    """

    def __init__(self, name: str, skipped: int = 0):
        if name not in POLICIES:
            raise UserError(f"on_nonfinite is stop or skip, not {name!r}.{did_you_mean(name, POLICIES)}")
        self.skips = name == "skip"
        self.skipped = skipped  # Skipped steps of the whole run
        self._in_a_row = 0

    def should_skip_step(self, step: int, loss: float, norm: float, committed: int) -> bool:
        """Return whether ``step``, with the loss and gradient norm of its whole batch, changes nothing.

        Args:
            committed: the step that ``resume`` continues from.

        Raises:
            NonFiniteLoss: if they are not finite and such steps are not skipped, or there are too many.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            self._in_a_row = 0
            return False
        what = (
            f"loss of step {step} is {loss}" if not math.isfinite(loss) else f"gradient norm of step {step} is {norm}"
        )
        if not self.skips:
            raise NonFiniteLoss(f"The {what}.", step, committed)
        if self._in_a_row == MOST_IN_A_ROW:
            raise NonFiniteLoss(f"The {what}, after {MOST_IN_A_ROW} steps in a row that were skipped.", step, committed)
        self._in_a_row += 1
        self.skipped += 1
        return True
