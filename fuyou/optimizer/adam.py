"""An optimizer's hyper-parameters, and what a step's update is, as it is sent to the optimizer process."""

import math
from dataclasses import dataclass

from common.errors import UserError


@dataclass(frozen=True)
class AdamConfig:
    """Hyper-parameters of AdamW (Loshchilov and Hutter, 2019), and of the other optimizers as far as they have them."""

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
    """Refuse a learning rate that makes every weight NaN, or that increases the loss.

    Raises:
        UserError: it is NaN, infinite or negative.
    """
    if not (math.isfinite(lr) and lr >= 0):
        raise UserError(f"lr must be a finite number of at least 0, not {lr}.")


def check_max_grad_norm(norm: float | None) -> None:
    """Refuse a limit of the gradient norm that is not a positive number.

    Raises:
        UserError: it is NaN, infinite or not above 0.
    """
    if norm is not None and not (math.isfinite(norm) and norm > 0):
        raise UserError(f"max_grad_norm must be a finite number above 0, or None for no limit, not {norm}.")


@dataclass(frozen=True)
class Update:
    """The parameters of one step's update, which are sent to the optimizer process with the gradients."""

    step: int  # Number of this step, from 1: bias correction depends on it
    adam: AdamConfig  # Hyper-parameters of this step
    gradient_scale: float = 1.0  # Clipping coefficient, by which every gradient is multiplied
    seed: int = 0  # Seed of the stochastic rounding of bf16 moments
    skipped: int = 0  # Number of earlier steps that were skipped: bias correction does not count them
    skip: bool = False  # Whether the step changes nothing, because its gradient is not finite


@dataclass(frozen=True)
class UpdateRange:
    """Elements ``[start, stop)`` that are updated, all of which have had equally many updates before."""

    start: int
    stop: int
    missed: int  # Number of steps in which these parameters had no gradient: bias correction does not count them
