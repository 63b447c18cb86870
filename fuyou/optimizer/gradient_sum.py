"""Gathers gradients into flat buffers as autograd makes them, one parameter at a time.

Autograd makes each parameter's gradient where it likes. A hook adds it to the flat buffer at once and lets it go, so at
no time is there more than one of them beside the buffer.
"""

from collections.abc import Mapping

import torch

from fuyou.layout.record import Record

#: Elements per pass when the squares of a gradient are summed on a CPU: stays in the cache as float64.
_NORM_ELEMENTS = 1 << 17
#: The same on a GPU, where CUDA makes a float64 copy of what is summed: 64 MiB of it.
_CUDA_NORM_ELEMENTS = 1 << 23
#: Elements per pass when a sum is rounded in place.
_ROUNDING_ELEMENTS = 1 << 24


class GradientSum:
    """The gradient of one record, summed over micro-batches.

    Args:
        record: its layout.
        flat: ``[>= numel]`` where the sum is kept, fp32 or the compute dtype.
    """

    def __init__(self, record: Record, flat: torch.Tensor):
        self.record = record
        self.flat = flat[: record.numel]
        self._views = record.views(self.flat)
        self.seen: set[str] = set()
        """Names of the parameters that something has flowed into."""
        self._zero_padding()

    def attach(self, leaves: Mapping[str, torch.Tensor]) -> None:
        """Take over the gradients of ``leaves`` (by parameter name) from now on."""
        for name, leaf in leaves.items():
            leaf.register_post_accumulate_grad_hook(lambda leaf, name=name: self._add(name, leaf))

    def finish(self) -> None:
        """Clear what lies in the place of parameters that nothing flowed into."""
        for name, view in self._views.items():
            if name not in self.seen:
                view.zero_()

    def _add(self, name: str, leaf: torch.Tensor) -> None:
        assert leaf.grad is not None
        if name in self.seen:
            self._views[name].add_(leaf.grad)
        else:
            self._views[name].copy_(leaf.grad)
            self.seen.add(name)
        leaf.grad = None

    def _zero_padding(self) -> None:
        """What lies between parameters is updated like them: its gradient must be zero."""
        position = 0
        for slot in sorted(self.record.parameters, key=lambda slot: slot.offset):
            self.flat[position : slot.offset].zero_()
            position = slot.offset + slot.numel
        self.flat[position:].zero_()


def round_in_place(wide: torch.Tensor, narrow: torch.Tensor) -> None:
    """Round ``wide`` fp32 ``[n]`` into ``narrow`` bf16 ``[n]``, which begins at the same address.

    From the front: what is written lies before what is still to be read.
    """
    for start in range(0, wide.numel(), _ROUNDING_ELEMENTS):
        part = slice(start, start + _ROUNDING_ELEMENTS)
        narrow[part] = wide[part].to(narrow.dtype)


def sum_of_squares(flat: torch.Tensor) -> torch.Tensor:
    """Sum of the squares of a flat gradient, in float64: exact enough that its order does not matter."""
    if flat.is_cuda:
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
