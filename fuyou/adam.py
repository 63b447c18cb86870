"""AdamW over flat records, in chunks that stay in the processor's cache.

The arithmetic is PyTorch's own ``torch._fused_adamw_``. What this file adds is the way in and out: masters kept as two
halves, gradients in bf16, moments in fp32 or (with stochastic rounding) in bf16.
"""

from dataclasses import dataclass

import torch

from fuyou.halves import join, split

#: Elements per pass: 1 Mi fp32 values each of master, gradient and moments fit a core's share of the cache.
PASS_ELEMENTS = 1 << 20


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


@dataclass(frozen=True)
class Update:
    """What one step does to every record: sent to the optimizer process with the gradients."""

    step: int
    """Number of this update, from 1: bias correction depends on it."""
    adam: AdamConfig
    """Hyper-parameters of this step."""
    gradient_scale: float = 1.0
    """Every gradient is multiplied by this: the clipping coefficient."""
    seed: int = 0
    """Seed of the stochastic rounding of bf16 moments."""


class ChunkAdam:
    """Updates flat ranges in place, with scratch memory that is allocated once."""

    def __init__(self) -> None:
        self._master = torch.empty(PASS_ELEMENTS, dtype=torch.float32)
        self._gradient = torch.empty(PASS_ELEMENTS, dtype=torch.float32)
        self._scratch = torch.empty(PASS_ELEMENTS, dtype=torch.int32)
        self._moments = (torch.empty(0), torch.empty(0))
        self._step = torch.zeros((), dtype=torch.float32)

    def update(
        self,
        parameter: torch.Tensor,
        lo: torch.Tensor | None,
        mean: torch.Tensor,
        variance: torch.Tensor,
        gradient: torch.Tensor,
        update: Update,
        *,
        decay: bool,
        stream: int = 0,
    ) -> None:
        """One AdamW step over ``n`` parameters, all arguments flat ``[n]`` and updated in place.

        Args:
            parameter: ``hi`` in bf16, or the fp32 master itself if ``lo`` is None.
            lo: int16 low halves of the masters.
            mean, variance: first and second moment, fp32 or bf16.
            gradient: bf16 or fp32.
            update: step number, hyper-parameters, gradient scale.
            decay: whether weight decay applies to this range.
            stream: tells this range from others of the same step, so that their stochastic rounding differs.
        """
        generator = None
        if mean.dtype == torch.bfloat16:
            generator = torch.Generator().manual_seed(hash((update.seed, update.step, stream)) & (2**63 - 1))
        for start in range(0, parameter.numel(), PASS_ELEMENTS):
            part = slice(start, min(start + PASS_ELEMENTS, parameter.numel()))
            self._pass(
                parameter[part], None if lo is None else lo[part], mean[part], variance[part], gradient[part],
                update, decay, generator,
            )  # fmt: skip

    def _pass(
        self,
        parameter: torch.Tensor,
        lo: torch.Tensor | None,
        mean: torch.Tensor,
        variance: torch.Tensor,
        gradient: torch.Tensor,
        update: Update,
        decay: bool,
        generator: torch.Generator | None,
    ) -> None:
        count = parameter.numel()
        if lo is None:
            master = parameter
        else:
            master = self._master[:count]
            join(parameter, lo, master)
        if gradient.dtype != torch.float32 or update.gradient_scale != 1.0:
            wide = self._gradient[:count]
            wide.copy_(gradient)
            if update.gradient_scale != 1.0:
                wide.mul_(update.gradient_scale)
            gradient = wide
        first, second = mean, variance
        if generator is not None:
            if not self._moments[0].numel():
                self._moments = (torch.empty(PASS_ELEMENTS), torch.empty(PASS_ELEMENTS))
            first, second = self._moments[0][:count], self._moments[1][:count]
            first.copy_(mean)
            second.copy_(variance)
        adam = update.adam
        self._step.fill_(update.step)
        torch._fused_adamw_(
            [master], [gradient], [first], [second], [], [self._step],
            amsgrad=False, lr=adam.lr, beta1=adam.betas[0], beta2=adam.betas[1],
            weight_decay=adam.weight_decay if decay else 0.0, eps=adam.eps, maximize=False,
        )  # fmt: skip
        if generator is not None:
            stochastic_round(first, mean, self._scratch[:count], generator)
            stochastic_round(second, variance, self._scratch[:count], generator)
        if lo is not None:
            split(master, parameter, lo, self._scratch[:count])


def stochastic_round(
    wide: torch.Tensor, narrow: torch.Tensor, scratch: torch.Tensor, generator: torch.Generator
) -> None:
    """Round fp32 ``wide`` to bf16 ``narrow``, up or down with the probability that makes the mean exact.

    Adds 16 random bits below the bf16 mantissa and truncates. ``wide`` must be finite; ``scratch`` is int32 ``[n]``.
    """
    scratch.random_(0, 1 << 16, generator=generator)
    scratch.add_(wide.view(torch.int32))
    scratch.bitwise_right_shift_(16)
    narrow.view(torch.int16).copy_(scratch)
