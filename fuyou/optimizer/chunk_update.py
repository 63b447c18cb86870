"""An optimizer over flat records, in chunks that stay in the processor's cache.

:mod:`fuyou.optimizer.rules` has the arithmetic on fp32 tensors. This file adds the conversions around it: split master
weights, gradients in bf16, moments in fewer bits. Where a compiler is there, one compiled pass does all of it, with the
same bits (:mod:`fuyou.optimizer.kernels`).
"""

from collections.abc import Sequence

import torch

from common.memory.buffers import HostBuffer
from fuyou.layout.optimizer_state import ADAMW
from fuyou.optimizer.adam import Update, UpdateRange
from fuyou.optimizer.kernels import Kernels
from fuyou.optimizer.moments import Moments, OptimizerStates
from fuyou.optimizer.rules import RULES, StepScalars
from fuyou.optimizer.split_weights import join, split_in_place

# Elements per pass and thread. Master and gradient in fp32 take 512 KiB, and what a pass reads and writes about 1 MiB:
# together they stay in the second-level cache of a core (1 to 2 MiB).
PASS_ELEMENTS = 1 << 16


class ChunkOptimizer:
    """An optimizer on flat ranges, in place, with scratch memory that is allocated once.

    It uses as many threads as PyTorch does when it is made. Results do not depend on their number.

    Args:
        optimizer: its name.
        kernels: compiled ones; None does without.
    """

    def __init__(self, optimizer: str = ADAMW, kernels: Kernels | None = None):
        self._name, self._rule, self._kernels = optimizer, RULES[optimizer], kernels
        self._elements = PASS_ELEMENTS * torch.get_num_threads()
        self._memory = HostBuffer(8 * self._elements).touch()
        self._master = self._memory.tensor(torch.float32, 0, self._elements)
        self._scratch = self._memory.tensor(torch.int32, 4 * self._elements, self._elements)
        """Holds one after the other: low bits, the gradient in fp32, random bits."""
        self._moments: list[torch.Tensor] = []

    @torch.inference_mode()  # saves the bookkeeping of views and versions: 3% of the time
    def update(
        self,
        states: OptimizerStates,
        gradient: torch.Tensor,
        update: Update,
        *,
        decay: bool,
        stream: int = 0,
        runs: Sequence[UpdateRange] | None = None,
    ) -> None:
        """Take one step over ``n`` parameters.

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
        adam, moments = update.adam, Moments(states, update, stream)
        compiled = self._kernels is not None and self._kernels.can_update(self._name, states, gradient)
        for run in (UpdateRange(0, states.parameter.numel(), 0),) if runs is None else runs:
            count = update.step - update.skipped - run.missed
            scalars = StepScalars(count, adam.lr, adam.betas, adam.eps, adam.weight_decay if decay else 0.0)
            if compiled and self._kernels is not None:
                part = slice(run.start, run.stop)
                self._kernels.update(self._name, states.part(part), gradient[part], scalars, update.gradient_scale)
                continue
            for start in range(run.start, run.stop, self._elements):
                part = slice(start, min(start + self._elements, run.stop))
                self._pass(states.part(part), gradient[part], scalars, update.gradient_scale, moments)

    def _pass(
        self,
        states: OptimizerStates,
        gradient: torch.Tensor,
        scalars: StepScalars,
        scale: float,
        moments: Moments,
    ) -> None:
        count = states.parameter.numel()
        scratch = self._scratch[:count]
        master = states.parameter
        if states.low is not None:
            master = self._master[:count]
            join(states.parameter, states.low, master, scratch)
        if gradient.dtype != torch.float32 or scale != 1.0:
            wide = scratch.view(torch.float32)
            wide.copy_(gradient)
            if scale != 1.0:
                wide.mul_(scale)
            gradient = wide
        widened = moments.widened(states, self._room(states))
        self._rule(master, gradient, widened, scalars)
        moments.keep(widened, states, scratch)
        if states.low is not None:
            split_in_place(master, states.parameter, states.low)

    def _room(self, states: OptimizerStates) -> list[torch.Tensor]:
        if not self._moments and states.moments[0].dtype != torch.float32:
            self._moments = [torch.empty(self._elements) for _ in states.moments]
        return self._moments
