"""An optimizer over flat records, in chunks that fit the processor's cache.

:mod:`fuyou.optimizer.adam` has the arithmetic on fp32 tensors; this file adds the conversions around it: split master
weights, bf16 gradients, moments in fewer bits. With a compiler, one compiled pass does all of it, with the same bits
(:mod:`fuyou.optimizer.kernels`).
"""

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch

from common.memory.buffers import HostBuffer
from fuyou.layout.record import Precision
from fuyou.layout.record_parts import ADAMW, ADAMW_8BIT, BLOCK_ELEMENTS
from fuyou.optimizer.adam import AdamConfig, Update, UpdateRange, adamw
from fuyou.optimizer.kernels import Kernels, compiled_library
from fuyou.optimizer.moments import MOMENT_CODES, OptimizerStates, join, split, split_in_place

# Elements per pass and thread. Master and gradient in fp32 take 512 KiB, and what a pass reads and writes about 1 MiB:
# together they stay in the second-level cache of a core (1 to 2 MiB).
PASS_ELEMENTS = 1 << 16


class ChunkOptimizer:
    """Updates flat ranges in place, with scratch memory that is allocated once.

    Uses as many threads as PyTorch does at creation; results do not depend on their number.

    Args:
        kernels: compiled kernels; None uses PyTorch alone.
    """

    def __init__(self, optimizer: str = ADAMW, kernels: Kernels | None = None):
        self._name = optimizer
        self._kernels = kernels
        self._elements = PASS_ELEMENTS * torch.get_num_threads()
        self._memory = HostBuffer(8 * self._elements).touch()
        self._master = self._memory.tensor(torch.float32, 0, self._elements)
        # Reused for each purpose
        self._scratch = self._memory.tensor(torch.int32, 4 * self._elements, self._elements)
        self._moments = [torch.empty(self._elements if optimizer != ADAMW else 0) for _ in MOMENT_CODES]

    @torch.inference_mode()  # saves the bookkeeping of views and versions: 3% of the time
    def update(
        self,
        states: OptimizerStates,
        gradient: torch.Tensor,
        update: Update,
        *,
        decay: bool,
        runs: Sequence[UpdateRange] | None = None,
    ) -> None:
        """Take one step over ``n`` parameters.

        Args:
            states: parameters and moments, updated in place.
            gradient: bf16 or fp32, flat ``[n]``.
            runs: the parts to update, each a multiple of 128 elements; None for all.
        """
        adam = update.adam if decay else replace(update.adam, weight_decay=0.0)
        # PyTorch makes one pass itself where master weights and moments are fp32.
        kernels = self._kernels if states.low is not None or states.scales else None
        for run in (UpdateRange(0, states.parameter.numel(), 0),) if runs is None else runs:
            count = update.step - run.missed
            if kernels is not None:
                part = slice(run.start, run.stop)
                kernels.update(
                    self._name, states.part(part), gradient[part], adam, count, update.gradient_scale
                )
                continue
            for start in range(run.start, run.stop, self._elements):
                part = slice(start, min(start + self._elements, run.stop))
                self._pass(states.part(part), gradient[part], adam, count, update.gradient_scale)

    def _pass(
        self, states: OptimizerStates, gradient: torch.Tensor, adam: AdamConfig, count: int, scale: float
    ) -> None:
        size = states.parameter.numel()
        scratch = self._scratch[:size]
        master = states.parameter
        if states.low is not None:
            master = self._master[:size]
            join(states.parameter, states.low, master, scratch)
        if gradient.dtype != torch.float32 or scale != 1.0:
            wide = scratch.view(torch.float32)
            wide.copy_(gradient)
            if scale != 1.0:
                wide.mul_(scale)
            gradient = wide
        moments = states.moments
        if states.scales:
            moments = tuple(memory[:size] for memory in self._moments)
            for number, code in enumerate(MOMENT_CODES):
                code.decode(states.moments[number], states.scales[number], moments[number])
        adamw(master, gradient, moments, adam, count)
        if states.scales:
            for number, code in enumerate(MOMENT_CODES):
                code.encode(moments[number], states.moments[number], states.scales[number])
        if states.low is not None:
            split_in_place(master, states.parameter, states.low)


_ELEMENTS = 32 * BLOCK_ELEMENTS
_STEPS = (
    Update(1, AdamConfig(lr=1e-3)),
    Update(7, AdamConfig(lr=3e-4, betas=(0.3, 0.95), weight_decay=0.1), gradient_scale=0.37),
    Update(1000, AdamConfig(lr=1e-5, eps=1e-6, weight_decay=0.0)),
)


@functools.cache
def tried_kernels(optimizer: str = ADAMW) -> Kernels | None:
    """Return the compiled kernels if they compute the same bits as PyTorch here; else None."""
    library = compiled_library()
    if isinstance(library, str):
        return None
    kernels = Kernels(library)
    return kernels if all(_same_bits(optimizer, kernels, split) for split in (True, False)) else None


# Times that PyTorch's updates take of the compiled ones', for 4 Mi parameters on one thread
SLOWER = {ADAMW: "4", ADAMW_8BIT: "6 to 10"}


def slow_updates(precision: Precision) -> tuple[str, str] | None:
    """Return how much slower updates are because they are not compiled and why, and what to do; None if they are
    compiled, or need not be. Compiles them if that has not been done."""
    optimizer = precision.optimizer
    needs_kernels = precision.split or optimizer != ADAMW
    if not needs_kernels or tried_kernels(optimizer) is not None:
        return None
    library = compiled_library()
    reason = "compiled ones give other bits on this processor"
    remedy = "They are right, only slow."
    if isinstance(library, str):
        reason = library
        remedy = "Install a C++ compiler: apt install g++"
    return f"Adam's updates take {SLOWER[optimizer]} times as long as compiled ones: {reason}.", remedy


def _same_bits(optimizer: str, kernels: Kernels, split_weights: bool) -> bool:
    sides = [(_states(optimizer, split_weights), ChunkOptimizer(optimizer, side)) for side in (None, kernels)]
    random = torch.Generator().manual_seed(1)
    for update in _STEPS:
        gradient = torch.randn(_ELEMENTS, generator=random) * 1e-2
        gradient[::7] = 0
        gradient = gradient.bfloat16() if split_weights else gradient
        for states, side in sides:
            side.update(states, gradient, update, decay=True)
    plain, compiled = (
        [t for t in (s.parameter, s.low, *s.moments, *s.scales) if t is not None] for s, _ in sides
    )
    return all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(plain, compiled, strict=True)
    )


def _states(optimizer: str, split_weights: bool) -> OptimizerStates:
    parameter = torch.randn(_ELEMENTS, generator=torch.Generator().manual_seed(0)) * 0.02
    low = None
    if split_weights:
        master = parameter
        low = torch.empty(_ELEMENTS, dtype=torch.int16 if optimizer == ADAMW else torch.int8)
        parameter = torch.empty(_ELEMENTS, dtype=torch.bfloat16)
        split(master, parameter, low)
    return OptimizerStates.before_training(parameter, low, optimizer)
