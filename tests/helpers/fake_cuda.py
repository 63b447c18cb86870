"""Tensors on a GPU that is not there: shapes, dtypes and devices, but no values.

What mixes devices raises, and so does what would make the host wait for the device: ``item``, ``tolist``, ``nonzero``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

CUDA = torch.device("cuda:0")


@contextmanager
def fake_cuda() -> Iterator[FakeTensorMode]:
    ada = patch.object(torch.cuda, "get_device_capability", lambda device: (8, 9))
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode, _Indexing(), ada:
        yield mode


class _Indexing(TorchFunctionMode):
    """Indexes and copies by other operators: Python's choose a CUDA device, which a build for CPUs lacks."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            return _get(*args)
        if func is torch.Tensor.__setitem__:
            value, index, new = args
            target = _get(value, index)
            return _copy(target, new) if isinstance(new, torch.Tensor) else target.fill_(new)
        if func is torch.Tensor.copy_:
            return _copy(*args, **(kwargs or {}))
        if (
            func is torch.Tensor.to
            and args[0].device.type == "cpu"
            and CUDA in args
            and not (kwargs or {}).get("non_blocking")
        ):
            raise RuntimeError("A copy to the device, for which the host waits.")
        if kwargs and kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}  # which a build for CPUs refuses
        return func(*args, **(kwargs or {}))


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if source.device != target.device and not non_blocking:
        raise RuntimeError("A copy between host and device, for which the host waits.")
    torch.ops.aten.copy.default(target, source)  # counted as one kernel
    return target


def _get(value: torch.Tensor, index: Any) -> torch.Tensor:
    aten = torch.ops.aten
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(part is Ellipsis for part in parts):
        at = next(number for number, part in enumerate(parts) if part is Ellipsis)
        parts[at : at + 1] = [slice(None)] * (value.dim() - sum(part is not None for part in parts) + 1)
    dim, tensors = 0, {}
    for part in parts:
        if isinstance(part, slice):
            value = aten.slice.Tensor(value, dim, part.start, part.stop, part.step or 1)
        elif part is None:
            value = value.unsqueeze(dim)
        elif isinstance(part, torch.Tensor):
            tensors[dim] = part
        else:
            value = aten.select.int(value, dim, part)
            continue
        dim += 1
    return (
        aten.index.Tensor(value, [tensors.get(dim) for dim in range(max(tensors) + 1)]) if tensors else value
    )
