"""AdamW over flat records, in chunks that stay in the processor's cache.

The arithmetic is PyTorch's own ``torch._fused_adamw_``. This file adds the conversions around it: split master weights,
gradients in bf16, moments in fp32 or (with stochastic rounding) in bf16.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from common.errors import UserError
from common.memory.buffers import HostBuffer
from fuyou.optimizer.split_weights import join, split_in_place

PASS_ELEMENTS = 1 << 16
"""Elements per pass and thread. Master and gradient in fp32 take 512 KiB, and what a pass reads and writes about 1 MiB:
together they stay in the second-level cache of a core (1 to 2 MiB)."""


@dataclass(frozen=True)
class AdamConfig:
    """AdamW's hyper-parameters (Loshchilov and Hutter, 2019)."""

    lr: float = 1e-5
    """Learning rate; a schedule may change it every step."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the running mean of gradients and of their squares."""
    eps: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = 0.01
    """Decoupled decay, for matrices only: biases and norms are not decayed."""

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
    """The parameters of one step's AdamW update, which are sent to the optimizer process with the gradients."""

    step: int
    """Number of this step, from 1: bias correction depends on it."""
    adam: AdamConfig
    """Hyper-parameters of this step."""
    gradient_scale: float = 1.0
    """Clipping coefficient, by which every gradient is multiplied."""
    seed: int = 0
    """Seed of the stochastic rounding of bf16 moments."""
    skipped: int = 0
    """Number of earlier steps that were skipped: bias correction does not count them."""
    skip: bool = False
    """Whether the step changes nothing, because its gradient is not finite."""


@dataclass(frozen=True)
class UpdateRange:
    """Elements ``[start, stop)`` that are updated, all of which have had equally many updates before."""

    start: int
    stop: int
    missed: int
    """Number of steps in which these parameters had no gradient: bias correction does not count them."""


class AdamStates(NamedTuple):
    """Parameters and what AdamW keeps of them: flat tensors ``[n]``, which an update changes."""

    parameter: torch.Tensor
    """bf16 part of the split master weights, or the fp32 master weights if ``low`` is None."""
    low: torch.Tensor | None
    """Low 16 bits of the master weights, int16."""
    mean: torch.Tensor
    """First moment, fp32 or bf16."""
    variance: torch.Tensor
    """Second moment, likewise."""

    def part(self, part: slice) -> "AdamStates":
        """Return those of some of the elements."""
        low = None if self.low is None else self.low[part]
        return AdamStates(self.parameter[part], low, self.mean[part], self.variance[part])


class ChunkAdam:
    """AdamW on flat ranges, in place, with scratch memory that is allocated once.

    It uses as many threads as PyTorch does when it is made. Results do not depend on their number.
    """

    def __init__(self) -> None:
        self._elements = PASS_ELEMENTS * torch.get_num_threads()
        self._memory = HostBuffer(8 * self._elements).touch()
        self._master = self._memory.tensor(torch.float32, 0, self._elements)
        self._scratch = self._memory.tensor(torch.int32, 4 * self._elements, self._elements)
        """Holds one after the other: low bits, the gradient in fp32, random bits."""
        self._moments: tuple[torch.Tensor, torch.Tensor] | None = None
        self._step = torch.zeros((), dtype=torch.float32)

    @torch.inference_mode()  # saves the bookkeeping of views and versions: 3% of the time
    def update(
        self,
        states: AdamStates,
        gradient: torch.Tensor,
        update: Update,
        *,
        decay: bool,
        stream: int = 0,
        runs: Sequence[UpdateRange] | None = None,
    ) -> None:
        """Take one AdamW step over ``n`` parameters.

        Args:
            states: parameters and moments, which change.
            gradient: bf16 or fp32, flat ``[n]``.
            update: step number, hyper-parameters, gradient scale.
            decay: whether weight decay applies to this range.
            stream: number of this range within the step, so that stochastic rounding differs between ranges.
            runs: the parts of it that are updated, each a multiple of 128 elements; None: all of it.
        """
        if update.skip:
            return
        sources = None
        if states.mean.dtype == torch.bfloat16:
            # One for each moment: with a single one, numbers would depend on where a pass ends.
            sources = (_random_bits(update, stream, 0), _random_bits(update, stream, 1))
        for run in (UpdateRange(0, states.parameter.numel(), 0),) if runs is None else runs:
            self._step.fill_(update.step - update.skipped - run.missed)
            for start in range(run.start, run.stop, self._elements):
                part = slice(start, min(start + self._elements, run.stop))
                self._pass(states.part(part), gradient[part], update, decay, sources)

    def _pass(
        self,
        states: AdamStates,
        gradient: torch.Tensor,
        update: Update,
        decay: bool,
        sources: tuple[np.random.SFC64, np.random.SFC64] | None,
    ) -> None:
        parameter, low, mean, variance = states
        count = parameter.numel()
        scratch = self._scratch[:count]
        master = parameter
        if low is not None:
            master = self._master[:count]
            join(parameter, low, master, scratch)
        if gradient.dtype != torch.float32 or update.gradient_scale != 1.0:
            wide = scratch.view(torch.float32)
            wide.copy_(gradient)
            if update.gradient_scale != 1.0:
                wide.mul_(update.gradient_scale)
            gradient = wide
        first, second = mean, variance
        if sources is not None:
            first, second = self._wide_moments(mean, variance)
        adam = update.adam
        torch._fused_adamw_(
            [master],
            [gradient],
            [first],
            [second],
            [],
            [self._step],
            amsgrad=False,
            lr=adam.lr,
            beta1=adam.betas[0],
            beta2=adam.betas[1],
            weight_decay=adam.weight_decay if decay else 0.0,
            eps=adam.eps,
            maximize=False,
        )
        if sources is not None:
            stochastic_round(first, mean, scratch, sources[0])
            stochastic_round(second, variance, scratch, sources[1])
        if low is not None:
            split_in_place(master, parameter, low)

    def _wide_moments(self, mean: torch.Tensor, variance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return fp32 copies of bf16 moments."""
        if self._moments is None:
            self._moments = torch.empty(self._elements), torch.empty(self._elements)
        first, second = (wide[: mean.numel()] for wide in self._moments)
        return first.copy_(mean), second.copy_(variance)


def _random_bits(update: Update, stream: int, moment: int) -> np.random.SFC64:
    """Return the random numbers that round one moment of one range in one step; a repeated step draws the same.

    They are NumPy's, whose streams are equal in all its versions, at a sixth of the cost of PyTorch's.
    """
    return np.random.SFC64(hash((update.seed, update.step, stream, moment)) & (2**63 - 1))


def stochastic_round(wide: torch.Tensor, narrow: torch.Tensor, scratch: torch.Tensor, source: np.random.SFC64) -> None:
    """Round fp32 ``wide`` to bf16 ``narrow``, up or down with the probability that makes the mean exact.

    This adds 16 random bits below the bf16 mantissa, and truncates. ``wide`` must be finite; ``scratch`` is int32
    ``[n]``.
    """
    count = wide.numel()
    bits = source.random_raw(-(-count // 4)).view(np.int16)[:count]  # four times 16 bits from each number
    scratch.copy_(torch.from_numpy(bits))  # widened with its sign: from -0x8000 on
    scratch.add_(0x8000).add_(wide.view(torch.int32)).bitwise_right_shift_(16)
    narrow.view(torch.int16).copy_(scratch)
