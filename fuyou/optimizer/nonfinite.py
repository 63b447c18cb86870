"""A step whose loss or gradient is NaN or infinite stops training."""

import math

from common.errors import FinetuneError


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
        self.step = step
        self.committed = committed


def check_finite(step: int, loss: float, norm: float, committed: int) -> None:
    """Check the loss and the gradient norm of a step's whole batch.

    Args:
        committed: the step that ``resume`` continues from.

    Raises:
        NonFiniteLoss: if they are not finite.
    """
    if not math.isfinite(loss):
        raise NonFiniteLoss(f"The loss of step {step} is {loss}.", step, committed)
    if not math.isfinite(norm):
        raise NonFiniteLoss(f"The gradient norm of step {step} is {norm}.", step, committed)
