"""How many bytes tensors hold at most, for machines where PyTorch does not count: the CPU."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors held at once, of those that any operation has seen.

    Args:
        others: tensors whose memory is not the device's.
    """

    def __init__(self, others: Iterable[torch.Tensor]):
        super().__init__()
        self._others = {tensor.untyped_storage().data_ptr() for tensor in others}
        self._storages: dict[int, weakref.ref[Any]] = {}
        self.peak = 0

    def see(self, tensor: torch.Tensor) -> None:
        """Count a tensor from now until its memory is freed."""
        tensor = getattr(tensor, "_local_tensor", tensor)
        if tensor.device.type == "cpu":
            storage = tensor.untyped_storage()
            self._storages[storage._cdata] = weakref.ref(storage)

    def see_all(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Count what a model and its optimizer hold."""
        states = (value for state in optimizer.state.values() for value in state.values())
        for value in (*states, *model.parameters(), *model.buffers()):
            self.see(value.detach())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in tree_iter((args, kwargs, result)):
            if isinstance(value, torch.Tensor):
                self.see(value)
        # FSDP2 frees and allocates by resizing, so sizes are requested again.
        live = {key: storage for key, held in self._storages.items() if (storage := held()) is not None}
        self._storages = {key: self._storages[key] for key in live}
        sizes = (storage.nbytes() for storage in live.values() if storage.data_ptr() not in self._others)
        self.peak = max(self.peak, sum(sizes))
        return result
