"""Whether the compiled kernels give the very bits that PyTorch gives, on this processor and with this PyTorch."""

import functools

import torch

from fuyou.layout.optimizer_state import ADAMW, BLOCK_ELEMENTS
from fuyou.optimizer.adam import AdamConfig, Update
from fuyou.optimizer.chunk_update import ChunkOptimizer
from fuyou.optimizer.kernels import Kernels, optimizer_library
from fuyou.optimizer.moments import OptimizerStates
from fuyou.optimizer.split_weights import split

_ELEMENTS = 32 * BLOCK_ELEMENTS
_STEPS = (
    Update(1, AdamConfig(lr=1e-3)),
    Update(7, AdamConfig(lr=3e-4, betas=(0.3, 0.95), weight_decay=0.1), gradient_scale=0.37),
    Update(1000, AdamConfig(lr=1e-5, eps=1e-6, weight_decay=0.0)),
)


@functools.cache
def tried_kernels(optimizer: str = ADAMW) -> Kernels | None:
    """Return the kernels, if an optimizer's gives PyTorch's bits; None where it does not, or there is no compiler."""
    library = optimizer_library()
    if library is None:
        return None
    kernels = Kernels(library)
    return kernels if all(_same_bits(optimizer, kernels, split) for split in (True, False)) else None


def _same_bits(optimizer: str, kernels: Kernels, split_weights: bool) -> bool:
    sides = [(_states(optimizer, split_weights), ChunkOptimizer(optimizer, own)) for own in (None, kernels)]
    random = torch.Generator().manual_seed(1)
    for update in _STEPS:
        gradient = torch.randn(_ELEMENTS, generator=random) * 1e-2
        gradient[::7] = 0
        gradient = gradient.bfloat16() if split_weights else gradient
        for states, side in sides:
            side.update(states, gradient, update, decay=True)
    plain, compiled = (_tensors(states) for states, _ in sides)
    return all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in zip(plain, compiled, strict=True)
    )


def _states(optimizer: str, split_weights: bool) -> OptimizerStates:
    parameter, low = torch.randn(_ELEMENTS, generator=torch.Generator().manual_seed(0)) * 0.02, None
    if split_weights:
        master, low = parameter, torch.empty(_ELEMENTS, dtype=torch.int16)
        parameter = torch.empty(_ELEMENTS, dtype=torch.bfloat16)
        split(master, parameter, low)
    return OptimizerStates.before_training(parameter, low, optimizer)


def _tensors(states: OptimizerStates) -> list[torch.Tensor]:
    low = [] if states.low is None else [states.low]
    return [states.parameter, *low, *states.moments, *states.scales]
