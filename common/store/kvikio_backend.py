"""Read from the drives into device memory with kvikio (GPUDirect Storage where it works, bounce buffers elsewhere).

Only device memory comes here: for host memory kvikio makes the same POSIX calls as ``posix.py``. The logic is tested
with a stand-in for kvikio and, on host memory, with kvikio itself; it has not been run on a GPU yet.

kvikio knows nothing of CUDA streams other than the default one: wait for the future before using what was read.
"""

import contextlib
import ctypes
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from common.errors import UserError
from common.store.errors import StoreError
from common.store.layout import ALIGNMENT
from common.store.posix import PosixFile
from common.units import format_bytes

if TYPE_CHECKING:
    import torch

_setting = threading.Lock()


def why_unavailable() -> str | None:
    """Return why kvikio cannot be used here, in one sentence, or None if it can."""
    try:
        import kvikio  # noqa: F401
    except ImportError as error:
        return f"kvikio cannot be imported ({error}); install it with: pip install 'fuyou[cuda]'."
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no CUDA driver was found (libcuda.so.1), and kvikio reads nothing without one."
    return None


# Pinned host memory that kvikio takes for each of its threads where a drive cannot write to the GPU's memory itself.
BOUNCE_BYTES = 16 << 20


def require() -> None:
    if reason := why_unavailable():
        raise UserError(f"--io kvikio is not possible: {reason} --io posix works everywhere.")


def configure(threads: int) -> None:
    """Give kvikio's process-wide pool at least ``threads`` threads, and direct reads (both are off by default).

    Call it before files are opened. Changing the number resets the pool, so it only ever grows.
    """
    import kvikio.defaults

    with _setting:
        kvikio.defaults.set("auto_direct_io_read", True)
        if kvikio.defaults.get("num_threads") < threads:
            kvikio.defaults.set("num_threads", threads)


class KvikioFile:
    """A file of the store, read into device memory: flat contiguous uint8 tensors.

    Each call moves at most one stripe, which is kvikio's task size: one task per call, so no sibling task can still be
    writing into the tensor when the call fails (kvikio up to 26.08 did that with larger calls).
    """

    def __init__(self, path: Path, posix: PosixFile) -> None:
        """Open ``path``; ``posix`` is the same file, for the pages that are not whole."""
        import kvikio

        self.path = path
        self._posix = posix
        try:
            self._file = kvikio.CuFile(path, "r+")  # "w" would truncate it
        except (RuntimeError, OSError) as error:
            raise StoreError(f"kvikio cannot open {path.name} in {path.parent}: {error}") from error

    def read(self, offset: int, tensor: "torch.Tensor") -> None:
        """Fill ``tensor`` (uint8, flat, on a device) with the bytes from ``offset`` on, which is a multiple of 4096."""
        import torch

        body = len(tensor) - len(tensor) % ALIGNMENT
        self._read_pages(offset, tensor[:body])
        if body < len(tensor):
            tail = np.empty(len(tensor) - body, dtype=np.uint8)
            self._posix.read(offset + body, tail)
            tensor[body:].copy_(torch.from_numpy(tail))

    def _read_pages(self, offset: int, pages: "torch.Tensor") -> None:
        if len(pages) == 0:
            return
        try:
            # kvikio's future keeps neither buffer nor file alive; this frame holds both until get() returns.
            moved = self._file.pread(pages, len(pages), offset).get()
            why = f"only {moved} bytes were moved" if moved != len(pages) else None
        except RuntimeError as error:
            why = str(error)
        if why is not None:
            what = f"reading {format_bytes(len(pages))} at offset {offset} of {self.path.name} in {self.path.parent}"
            raise StoreError(f"{what} with kvikio failed: {why}. Use --io posix, which works without kvikio.")

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._file.close()
