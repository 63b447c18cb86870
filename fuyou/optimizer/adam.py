"""AdamW: its hyperparameters and its arithmetic."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.errors import UserError


@dataclass(frozen=True)
class AdamConfig:
    """Hyperparameters of AdamW (Loshchilov and Hutter, 2019)."""

    lr: float = 1e-5  # Learning rate; a schedule may change it every step
    betas: tuple[float, float] = (0.9, 0.999)  # Decay of the running mean of gradients and of their squares
    eps: float = 1e-8  # Added to the denominator
    weight_decay: float = 0.01  # Decoupled decay, for matrices only: biases and norms are not decayed

    def __post_init__(self) -> None:
        check_learning_rate(self.lr)
        for name, value in (("weight_decay", self.weight_decay), ("eps", self.eps)):
            if not (math.isfinite(value) and value >= 0):
                raise UserError(f"{name} must be a finite number of at least 0, not {value}.")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"betas must be two numbers of at least 0 and less than 1, not {self.betas}.")


def check_learning_rate(lr: float) -> None:
    """Check that a learning rate is finite and not negative.

    Raises:
        UserError: if not.
    """
    if not (math.isfinite(lr) and lr >= 0):
        raise UserError(f"lr must be a finite number of at least 0, not {lr}.")


def check_max_grad_norm(norm: float | None) -> None:
    """Check that a limit of the gradient norm is finite and positive, or None.

    Raises:
        UserError: if not.
    """
    if norm is not None and not (math.isfinite(norm) and norm > 0):
        raise UserError(f"max_grad_norm must be a finite number above 0, or None for no limit, not {norm}.")


@dataclass(frozen=True)
class Update:
    """Parameters of one step's update, sent to the optimizer process with the gradients."""

    step: int  # Number of this step, from 1: bias correction depends on it
    adam: AdamConfig  # Hyper-parameters of this step
    gradient_scale: float = 1.0  # Clipping coefficient, by which every gradient is multiplied


@dataclass(frozen=True)
class UpdateRange:
    """Elements ``[start, stop)`` that are updated and have had the same number of updates before."""

    start: int
    stop: int
    # Number of steps in which these parameters had no gradient: bias correction does not count them
    missed: int


def adamw(
    master: torch.Tensor,
    gradient: torch.Tensor,
    moments: Sequence[torch.Tensor],
    adam: AdamConfig,
    count: int,
) -> None:
    """Update master weights and moments, fp32 ``[n]`` each, by PyTorch's kernel.

    Args:
        count: number of this update of these parameters, from 1: bias correction depends on it.
    """
    torch._fused_adamw_(
        [master],
        [gradient],
        [moments[0]],
        [moments[1]],
        [],
        [torch.tensor(float(count))],
        amsgrad=False,
        lr=adam.lr,
        beta1=adam.betas[0],
        beta2=adam.betas[1],
        weight_decay=adam.weight_decay,
        eps=adam.eps,
        maximize=False,
    )
