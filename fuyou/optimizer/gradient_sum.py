"""Sum gradients in flat buffers as autograd makes them, one parameter at a time.

A hook adds each parameter's gradient to the flat buffer and frees it, so that never more than one is in memory.
"""

from collections.abc import Mapping
from functools import partial

import torch

from common.mixed_sum import add_to_wider
from fuyou.layout.record import Record

# Elements per pass when squares are summed on a CPU: as float64 they stay in the cache
_NORM_ELEMENTS = 1 << 17
_CUDA_NORM_ELEMENTS = 1 << 23  # Elements per pass on a GPU, where CUDA makes a float64 copy
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
        for start, stop in record.padding:
            self.flat[start:stop].zero_()

    def attach(self, leaves: Mapping[str, torch.Tensor]) -> None:
        """Take the gradients of ``leaves`` (by parameter name) as soon as they are accumulated."""
        for name, leaf in leaves.items():
            leaf.register_post_accumulate_grad_hook(partial(self._take, name))

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
    """Return the sum of the squares of a flat gradient, in float64: so exact that the order does not matter."""
    if flat.is_cuda:
        parts = [
            torch.linalg.vector_norm(part, dtype=torch.float64) for part in flat.split(_CUDA_NORM_ELEMENTS)
        ]
        return torch.stack(parts).square().sum()  # stays on the device: nothing waits for it here
    total = 0.0
    wide = torch.empty(min(_NORM_ELEMENTS, flat.numel()), dtype=torch.float64)
    for start in range(0, flat.numel(), _NORM_ELEMENTS):
        part = flat[start : start + _NORM_ELEMENTS]
        values = wide[: part.numel()]
        values.copy_(part)
        total += float(torch.dot(values, values))
    return torch.tensor(total, dtype=torch.float64)
