"""One pass over the data on the CPU, compiled from ``kernels.cpp``, with the bits of :mod:`.reference`."""

import ctypes
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from common.compiled_library import compiled_library
from common.quantisation.layout import Bits, blocks_of

_SOURCE = Path(__file__).with_name("kernels.cpp")
_SMALLEST_SHARE = 1 << 8
"""Blocks below which another thread costs more than it saves."""


class _Job(ctypes.Structure):
    """As ``Job`` in ``kernels.cpp``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "payload", "row_at", "payload_at")),
        *((name, ctypes.c_int64) for name in ("count", "first", "last")),
        *((name, ctypes.c_int32) for name in ("bits", "narrow", "add")),
    )


class CompiledKernels:
    """The compiled passes, on as many threads as PyTorch has."""

    def __init__(self, library: ctypes.CDLL):
        self._library = library

    def takes(self, rows: torch.Tensor, payload: torch.Tensor) -> bool:
        """Return whether these can be read and written: bf16 or fp32, and elements of a row side by side."""
        return rows.dtype in (torch.float32, torch.bfloat16) and rows.stride(-1) == payload.stride(-1) == 1

    def quantise(self, rows: torch.Tensor, bits: Bits, out: torch.Tensor) -> None:
        """See :func:`common.quantisation.reference.quantise`."""
        self._run(self._library.quantise, rows, out, bits, False)

    def dequantise(self, payload: torch.Tensor, bits: Bits, out: torch.Tensor, add: bool) -> None:
        """See :func:`common.quantisation.reference.dequantise`; only fp32 is added to."""
        self._run(self._library.dequantise, out, payload, bits, add)

    def _run(
        self, function: Callable[..., object], rows: torch.Tensor, payload: torch.Tensor, bits: Bits, add: bool
    ) -> None:
        row_at, payload_at = _row_offsets(rows), _row_offsets(payload)
        blocks = len(row_at) * blocks_of(rows.size(-1))
        threads = torch.get_num_threads()
        share = max(_SMALLEST_SHARE, -(-blocks // threads))
        jobs = [
            _Job(
                rows=rows.data_ptr(),
                payload=payload.data_ptr(),
                row_at=row_at.ctypes.data,
                payload_at=payload_at.ctypes.data,
                count=rows.size(-1),
                first=first,
                last=min(first + share, blocks),
                bits=bits,
                narrow=rows.dtype == torch.bfloat16,
                add=add,
            )
            for first in range(0, blocks, share)
        ]
        if len(jobs) == 1:
            function(ctypes.byref(jobs[0]))
        else:  # ctypes lets go of the interpreter's lock
            list(_pool(threads).map(lambda job: function(ctypes.byref(job)), jobs))


@functools.cache
def compiled_kernels() -> CompiledKernels | None:
    """Return the compiled passes; None where there is no compiler."""
    library = compiled_library(_SOURCE)
    return None if library is None else CompiledKernels(library)


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "quantise")


def _row_offsets(tensor: torch.Tensor) -> np.ndarray:
    """Return where each row of ``tensor`` begins, in bytes after its first element."""
    offsets = np.zeros(1, np.int64)
    for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        step = stride * tensor.element_size()
        offsets = (offsets[:, None] + np.arange(size, dtype=np.int64) * step).ravel()
    return offsets
