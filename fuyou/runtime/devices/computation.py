"""What the engine needs of a step's computation, whoever does it."""

from typing import Protocol

import torch

from fuyou.model.loss.router_loss import RouterPass
from fuyou.schedule.tasks import StepList


class Computation(Protocol):
    """The compute tasks of one step or of one evaluation. The caller's thread runs them."""

    tasks: StepList
    tokens: int
    """Tokens in the whole batch."""
    start_time: float
    """When the step began, in seconds on :func:`time.monotonic`'s clock."""
    loss: float
    """Loss of the batch, once the forward pass is done."""
    router: RouterPass | None
    """Router loss of this pass, if the model has one."""

    def forward(self) -> torch.Tensor:
        """Run everything up to the head; return the batch's mean loss (this rank's part of it), an fp32 scalar."""
        ...

    def backward(self) -> None:
        """Run the rest."""
        ...

    def abandon(self) -> None:
        """Give the pass up before its head, but let what waits for it go on."""
        ...

    @property
    def complete(self) -> bool:
        """Whether the backward pass has ended."""
        ...

    def gradient_norm(self) -> float:
        """Return the norm of the whole gradient, for a single rank."""
        ...

    @property
    def recomputation_saved(self) -> float:
        """Fraction of the blocks' recomputation that was left out, in FLOPs."""
        ...
