"""Sum gradients in flat buffers as autograd makes them, one parameter at a time.

A hook adds each parameter's gradient to the flat buffer and frees it, so that never more than one is in memory.
"""

from collections.abc import Mapping
from functools import cache

import torch

from common.mixed_sum import add_to_wider
from fuyou.layout.record import Record

_NORM_ELEMENTS = 1 << 17  # Elements per pass when squares are summed on a CPU: as float64 they stay in the cache
_CUDA_NORM_ELEMENTS = 1 << 23  # Elements per pass on a GPU, where CUDA makes a float64 copy
# Compute capabilities of GPUs that do half of their fp32 arithmetic in fp64 (CUDA C++ Programming Guide, Arithmetic
# Instructions). Others, those for games among them, do a 32nd or 64th.
_FAST_FP64 = frozenset({(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)})
_GROUP = 64  # Squares that are added in fp32 where fp64 is slow
_ROUNDING_ELEMENTS = 1 << 24  # Elements per pass when a sum is rounded in place


class GradientSum:
    """Gradient of one record, summed over micro-batches.

    Args:
        flat: memory of the sum, ``[>= numel]``, fp32 or the compute dtype.
    """

    def __init__(self, record: Record, flat: torch.Tensor):
        self.record = record
        self.flat = flat[: record.numel]
        self._views = record.views(self.flat)
        self.seen: set[str] = set()  # Names of the parameters that have a gradient
        position = 0
        for slot in sorted(record.parameters, key=lambda slot: slot.offset):
            self.flat[position : slot.offset].zero_()  # the padding
            position = slot.offset + slot.numel
        self.flat[position:].zero_()

    def attach(self, leaves: Mapping[str, torch.Tensor]) -> None:
        """Take the gradients of ``leaves`` (by parameter name) as soon as they are accumulated."""
        for name, leaf in leaves.items():
            leaf.register_post_accumulate_grad_hook(lambda leaf, name=name: self._take(name, leaf))

    def add(self, name: str, gradient: torch.Tensor) -> None:
        if name in self.seen:
            add_to_wider(self._views[name], gradient)
        else:
            self._views[name].copy_(gradient)
            self.seen.add(name)

    def finish(self) -> None:
        """Set the gradients of parameters that have none to zero."""
        for name, view in self._views.items():
            if name not in self.seen:
                view.zero_()

    def _take(self, name: str, leaf: torch.Tensor) -> None:
        assert leaf.grad is not None
        self.add(name, leaf.grad)
        leaf.grad = None


def round_in_place(wide: torch.Tensor, narrow: torch.Tensor) -> None:
    """Round ``wide`` fp32 ``[n]`` into ``narrow`` bf16 ``[n]``, which begins at the same address."""
    for start in range(0, wide.numel(), _ROUNDING_ELEMENTS):
        part = slice(start, start + _ROUNDING_ELEMENTS)
        narrow[part] = wide[part].to(narrow.dtype)


def squares_bytes(elements: int) -> int:
    """Return the device bytes that summing the squares of this many elements takes."""
    return 8 * min(elements, _CUDA_NORM_ELEMENTS)


def sum_of_squares(flat: torch.Tensor) -> torch.Tensor:
    """Return the sum of the squares of a flat gradient, in float64: so exact that the order does not matter.

    On GPUs with slow fp64, unless deterministic algorithms are enabled, only sums of groups are added in fp64.
    """
    if flat.is_cuda:
        if _slow_at_fp64(flat.device) and not torch.are_deterministic_algorithms_enabled():
            return sum_of_squares_in_groups(flat)
        parts = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in flat.split(_CUDA_NORM_ELEMENTS)]
        return torch.stack(parts).square().sum()  # stays on the device: nothing waits for it here
    total = 0.0
    wide = torch.empty(min(_NORM_ELEMENTS, flat.numel()), dtype=torch.float64)
    for start in range(0, flat.numel(), _NORM_ELEMENTS):
        part = flat[start : start + _NORM_ELEMENTS]
        values = wide[: part.numel()]
        values.copy_(part)
        total += float(torch.dot(values, values))
    return torch.tensor(total, dtype=torch.float64)


def sum_of_squares_in_groups(flat: torch.Tensor) -> torch.Tensor:
    """Return the sum of the squares of a flat gradient, with a 64th of the arithmetic in float64.

    Squares of groups of 64 are added in fp32, these sums in float64. All terms are positive, so that the relative error
    is at most that of a group: 66 roundings of 2^-24, 4e-6; errors of many groups cancel, measured to 1e-9. Elements
    below 1e-19 may count as zero, and elements above 1e18 make the sum infinite.
    """
    whole = flat.numel() - flat.numel() % _GROUP
    parts = [part.view(-1, _GROUP) for part in flat[:whole].split(_CUDA_NORM_ELEMENTS)] if whole else []
    norms = [torch.linalg.vector_norm(part, dim=1, dtype=torch.float32) for part in parts]
    norms.append(torch.linalg.vector_norm(flat[whole:], dtype=torch.float32).view(1))
    return torch.stack([norm.double().square().sum() for norm in norms]).sum()


@cache
def _slow_at_fp64(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) not in _FAST_FP64
