"""kvikio without a GPU: a stand-in that does its calls on host memory, and CPU tensors that pretend."""

import contextlib
import ctypes
import os
import sys
import types
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from common.store import ALIGNMENT
from common.store.layout import LARGEST_UNIT


class PretendedDeviceTensor(torch.Tensor):
    """A CPU tensor that calls itself a CUDA tensor, and that kvikio's stand-in takes for one."""

    is_cuda = True


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as one that calls itself a CUDA tensor."""
    return tensor.as_subclass(PretendedDeviceTensor)


class LazyFuture:
    """Like kvikio's: keeps neither buffer nor file alive, and only ``get`` makes sure that it happened."""

    def __init__(self, file: "StandInCuFile", buffer: torch.Tensor, size: int, offset: int) -> None:
        self.file, self.buffer = weakref.ref(file), weakref.ref(buffer)
        self.size, self.offset = size, offset

    def get(self) -> int:
        """Do it, and return how many bytes were moved."""
        file, buffer = self.file(), self.buffer()
        assert file is not None, "the file was closed under kvikio's feet"
        assert buffer is not None, "the buffer was freed under kvikio's feet"
        with file.opened():
            return os.preadv(
                file.descriptor, [buffer.detach().as_subclass(torch.Tensor).numpy()], self.offset
            )


class StandInCuFile:
    """A file as kvikio opens it, of which whole pages move."""

    opened: Callable[[], AbstractContextManager[None]] = staticmethod(contextlib.nullcontext)

    def __init__(self, path: os.PathLike[str], flags: str) -> None:
        assert flags == "r+"
        try:
            self.descriptor = os.open(path, os.O_RDWR)
        except OSError as error:
            raise RuntimeError(f"Unable to open file: {error.strerror}") from None

    def pread(self, buffer: torch.Tensor, size: int, file_offset: int) -> LazyFuture:
        """Read into a tensor."""
        assert size == len(buffer) <= LARGEST_UNIT  # one task, see KvikioFile
        assert size % ALIGNMENT == file_offset % ALIGNMENT == 0  # all of it direct
        return LazyFuture(self, buffer, size, file_offset)

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)


def install(
    monkeypatch: pytest.MonkeyPatch,
    opened: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> dict[str, Any]:
    """Put the stand-in in kvikio's place, and pretend that there is a CUDA driver; return its settings.

    Args:
        opened: lets the tensors' memory be touched.
    """
    settings = {"num_threads": 1, "auto_direct_io_read": False}
    defaults, package = types.ModuleType("kvikio.defaults"), types.ModuleType("kvikio")
    vars(defaults).update(set=settings.__setitem__, get=settings.__getitem__)
    vars(package).update(CuFile=StandInCuFile, defaults=defaults)
    monkeypatch.setitem(sys.modules, "kvikio", package)
    monkeypatch.setitem(sys.modules, "kvikio.defaults", defaults)
    monkeypatch.setattr(StandInCuFile, "opened", staticmethod(opened))
    load = ctypes.CDLL
    monkeypatch.setattr(
        ctypes, "CDLL", lambda name, **options: None if name and "cuda" in name else load(name, **options)
    )
    return settings
