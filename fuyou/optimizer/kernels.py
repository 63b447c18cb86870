"""Compiled updates: ``kernels.cpp``, one pass over everything in place of several, with the same bits.

They are compiled when they are first needed, for this processor, by the C++ compiler that is there, which takes two
seconds, and kept in the cache. Where there is none, or where they do not give the very bits that PyTorch gives here
(tried each time they are loaded, which takes a few milliseconds), PyTorch does it alone.
"""

import ctypes
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from common.compiled_library import compiled_library
from fuyou.layout.optimizer_state import ADAMW, BLOCK_ELEMENTS, OPTIMIZERS
from fuyou.optimizer.dynamic8 import LEAST, MOMENT_CODES, MOST, SIGNS
from fuyou.optimizer.moments import OptimizerStates
from fuyou.optimizer.rules import StepScalars

_SOURCE = Path(__file__).with_name("kernels.cpp")
_SMALLEST_SHARE = 1 << 14  # Elements below which another thread costs more than it saves


class _Job(ctypes.Structure):
    """As ``Job`` in ``kernels.cpp``."""

    _fields_ = (
        ("count", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("parameter", "low", "gradient", "mean", "variance")),
        *((name, ctypes.c_void_p) for name in ("mean_scale", "variance_scale")),
        *((name, ctypes.c_void_p * 2) for name in ("values", "thresholds", "bases")),
        ("zeros", ctypes.c_int32 * 2),
        *((name, ctypes.c_int32) for name in ("least", "most", "signs")),
        *((name, ctypes.c_float) for name in ("gradient_scale", "decay", "lerp", "beta1", "beta2", "rest1", "rest2")),
        *((name, ctypes.c_float) for name in ("root", "eps", "step")),
    )


class Kernels:
    """The compiled updates, on as many threads as PyTorch has when this is made.

    Args:
        library: compiled from ``kernels.cpp``.
    """

    def __init__(self, library: ctypes.CDLL):
        self._functions = {name: getattr(library, f"update_{name}") for name in OPTIMIZERS}
        self._threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self._threads, "adam") if self._threads > 1 else None

    def can_update(self, optimizer: str, states: OptimizerStates, gradient: torch.Tensor) -> bool:
        """Return whether there is a compiled update for states and gradient of these dtypes."""
        blockwise = OPTIMIZERS[optimizer].blockwise
        split = states.low is not None  # else PyTorch makes one pass of AdamW itself
        wide = gradient.dtype == (torch.bfloat16 if split else torch.float32)
        return (
            (split or optimizer != ADAMW)
            and wide
            and states.moments[0].dtype == (torch.uint8 if blockwise else torch.float32)
        )

    def update(
        self, optimizer: str, states: OptimizerStates, gradient: torch.Tensor, scalars: StepScalars, scale: float
    ) -> None:
        """Do what :class:`fuyou.optimizer.chunk_update.ChunkOptimizer` does to a range.

        Args:
            optimizer: its name.
            states: of ``n`` parameters, a multiple of 128.
            gradient: ``[n]``, not changed.
            scalars: numbers of the step.
            scale: that the gradient is multiplied by.
        """
        count, function = states.parameter.numel(), self._functions[optimizer]
        share = max(_SMALLEST_SHARE, -(-count // (self._threads * BLOCK_ELEMENTS)) * BLOCK_ELEMENTS)
        parts = [slice(start, min(start + share, count)) for start in range(0, count, share)]
        jobs = [_job(optimizer, states.part(part), gradient[part], scalars, scale) for part in parts]
        if self._pool is None or len(jobs) == 1:
            for job in jobs:
                function(ctypes.byref(job))
        else:  # ctypes lets go of the interpreter's lock
            list(self._pool.map(lambda job: function(ctypes.byref(job)), jobs))


def _job(optimizer: str, states: OptimizerStates, gradient: torch.Tensor, scalars: StepScalars, scale: float) -> _Job:
    """Return what a kernel is told; numbers are computed in double precision, as PyTorch does."""
    lr, (beta1, beta2) = scalars.lr, scalars.betas
    pointers = [moment.data_ptr() for moment in states.moments] + [None]
    scales: Sequence[int | None] = [one.data_ptr() for one in states.scales] or [None, None]
    job = _Job(
        count=states.parameter.numel(),
        parameter=states.parameter.data_ptr(),
        low=None if states.low is None else states.low.data_ptr(),
        gradient=gradient.data_ptr(),
        mean=pointers[0],
        variance=pointers[1],
        mean_scale=scales[0],
        variance_scale=scales[1],
        gradient_scale=scale,
        decay=1 - lr * scalars.weight_decay,
        lerp=1 - beta1,
        beta1=beta1,
        beta2=beta2,
        rest1=1 - beta1,
        rest2=1 - beta2,
        root=math.sqrt(1 - beta2**scalars.count),
        eps=scalars.eps,
        least=LEAST,
        most=MOST,
        signs=SIGNS,
        step=-lr if optimizer == "lion" else -(lr / (1 - beta1**scalars.count)),
    )
    for number, code in enumerate(MOMENT_CODES):
        job.values[number] = code.values.ctypes.data
        job.thresholds[number] = code.thresholds.ctypes.data
        job.bases[number] = code.bases.ctypes.data
        job.zeros[number] = code.zero
    return job


def optimizer_library() -> ctypes.CDLL | None:
    """Return the compiled kernels, which are compiled if they are not in the cache; None where that cannot be."""
    return compiled_library(_SOURCE)
