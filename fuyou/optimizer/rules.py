"""The arithmetic of each optimizer on whole fp32 tensors: what one step does to master weights and moments."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StepScalars:
    """The numbers of one step, as they apply to one range of parameters."""

    count: int  # Number of this update of these parameters, from 1: bias correction depends on it
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float  # 0 where there is none


# Changes master weights and moments, given a gradient: fp32 `[n]` each.
Rule = Callable[[torch.Tensor, torch.Tensor, Sequence[torch.Tensor], StepScalars], None]


def adamw(master: torch.Tensor, gradient: torch.Tensor, moments: Sequence[torch.Tensor], scalars: StepScalars) -> None:
    """AdamW (Loshchilov and Hutter, 2019), as PyTorch's own kernel has it."""
    torch._fused_adamw_(
        [master],
        [gradient],
        [moments[0]],
        [moments[1]],
        [],
        [torch.tensor(float(scalars.count))],
        amsgrad=False,
        lr=scalars.lr,
        beta1=scalars.betas[0],
        beta2=scalars.betas[1],
        weight_decay=scalars.weight_decay,
        eps=scalars.eps,
        maximize=False,
    )


def lion(master: torch.Tensor, gradient: torch.Tensor, moments: Sequence[torch.Tensor], scalars: StepScalars) -> None:
    """Lion (Chen et al., arXiv 2302.06675, algorithm 2): every weight moves by the learning rate, up or down."""
    (mean,), (beta1, beta2) = moments, scalars.betas
    direction = (mean * beta1).add_(gradient, alpha=1 - beta1).sign_()
    if scalars.weight_decay:
        master.mul_(1 - scalars.lr * scalars.weight_decay)
    master.add_(direction, alpha=-scalars.lr)
    mean.mul_(beta2).add_(gradient, alpha=1 - beta2)


# Arithmetic by the optimizer's name in :data:`fuyou.layout.optimizer_state.OPTIMIZERS`.
RULES: dict[str, Rule] = {"adamw": adamw, "adamw8bit": adamw, "lion": lion}
