"""The loss as the caller sees it: a tensor whose ``backward()`` streams the blocks in reverse."""

from collections.abc import Callable
from typing import Any

import torch

from common.errors import FinetuneError


def loss_tensor(loss: float, backward: Callable[[], None]) -> torch.Tensor:
    """Return the loss as an fp32 scalar on the CPU, so that ``backward`` runs in the caller's thread on any device."""
    return _StreamingBackward.apply(torch.ones((), requires_grad=True), torch.tensor(loss), backward)


class _StreamingBackward(torch.autograd.Function):
    """An autograd function that calls ``backward`` when autograd comes to the loss."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, loss: torch.Tensor, backward: Callable[[], None]) -> torch.Tensor:
        ctx.streamed = backward
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if float(gradients[0]) != 1.0:
            raise FinetuneError(
                f"The loss was multiplied by {float(gradients[0]):g} before backward(): call backward() on the loss "
                "itself. It is the mean over all labels of the batch, in however many micro-batches that is computed, "
                "so nothing is to be divided by their number: pass the whole batch to engine() at once. A loss of any "
                "other kind, or scale, is made of what engine.tokens() returns."
            )
        ctx.streamed()
        return None, None, None
