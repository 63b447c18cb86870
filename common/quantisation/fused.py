"""Chains of elementwise operators as one kernel: PyTorch compiles them for a GPU. Not run on one yet."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from common.hardware.kernels import kernels_of

_failures: list[str] = []  # Why PyTorch could not compile a function; after that all run eagerly


def run_fused(function: Callable[..., None], device: torch.device, *arguments: Any) -> None:
    """Run ``function``: on CUDA compiled, unless compiling has failed, which is reported once."""
    if kernels_of(device) == "cuda" and not _failures:
        try:
            _compiled(function)(*arguments)
            return
        except Exception as error:  # Dynamo, Inductor, Triton, or a missing compiler
            _failures.append(f"{type(error).__name__}: {error}")
            warnings.warn(f"Quantization runs uncompiled: torch.compile failed ({_failures[0]}).", stacklevel=3)
    function(*arguments)


@functools.cache
def fuses(device: torch.device) -> bool:
    """Return whether PyTorch compiles for ``device``, after trying a small function: if so, no chain needs memory."""
    if kernels_of(device) == "cuda":
        run_fused(_try, device, torch.zeros(8, device=device))
        return not _failures
    return False


def _try(values: torch.Tensor) -> None:
    values.add_(1.0).mul_(2.0)


@functools.cache
def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    # fullgraph: compiling fails as a whole, before anything has been written or added.
    return torch.compile(function, fullgraph=True, dynamic=True)
