"""Host memory for I/O: allocated once, page-aligned, on huge pages, shareable and page-locked for CUDA.

Direct I/O into scattered 4 KiB pages runs at a third of the speed that it reaches on huge pages, and the first touch
of a page costs more than copying it. So every buffer is one mapping, advised to use huge pages and touched at once.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import torch

from common.errors import FinetuneError
from common.memory.shortage import shortage_explained
from common.units import format_bytes

PAGE = 4096
HUGE_PAGE = 2 << 20
_MAP_FIXED = 0x10
_MADV_POPULATE_WRITE = 23  # Since Linux 5.14: take all pages, as a write to each would
_MADV_COLLAPSE = 25  # Since Linux 6.1: make huge pages now, of shared memory too
_PIECE_BYTES = 16 << 20
_LIBC = ctypes.CDLL(None, use_errno=True)


def round_up(value: int, unit: int) -> int:
    """Return the smallest multiple of ``unit`` that is not below ``value``."""
    return -(-value // unit) * unit


class HostBuffer:
    """A mapping of host memory of the given size, rounded up to whole pages.

    Args:
        shared: whether to back it by an anonymous memory file that another process can map through :attr:`fd`. It has
            no name in any file system, so nothing is left behind however the processes die.
        fd: descriptor of an existing memory file to map instead of making one.
    """

    def __init__(self, nbytes: int, *, shared: bool = False, fd: int | None = None):
        self.nbytes = round_up(max(nbytes, 1), PAGE)
        self.fd = fd
        self._locked: list[int] = []
        try:
            with shortage_explained(self.nbytes):
                if shared and fd is None:
                    self.fd = os.memfd_create("fuyou", os.MFD_CLOEXEC)
                    os.ftruncate(self.fd, self.nbytes)
                if self.fd is None:
                    self._map = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                    self._start = 0
                else:
                    self._map, self._start = _map_aligned(self.fd, self.nbytes)
        except FinetuneError:
            self._close_file()
            raise
        self.array: np.ndarray = np.frombuffer(self._map, np.uint8, self.nbytes, self._start)
        """The bytes as a numpy array: ``uint8 [nbytes]``."""
        # from_numpy holds the array and so the mapping; frombuffer on the mapping itself would not.
        self._tensor: torch.Tensor = torch.from_numpy(self.array)
        self._advise(mmap.MADV_HUGEPAGE, 0, self.nbytes)

    def touch(self, offset: int = 0, nbytes: int | None = None) -> "HostBuffer":
        """Take pages from the system, on all cores, so that neither faults nor shortage occur in the training loop.

        What is in them does not change, and other threads may use them meanwhile.

        Args:
            offset: first byte of a range, of which whole pieces of 16 MiB are taken.
            nbytes: its size; None: all that follows.

        Raises:
            FinetuneError: the system has no memory left.
        """
        take = self._take if self.fd is None else self._take_shared
        end = self.nbytes if nbytes is None else min(offset + nbytes, self.nbytes)
        starts = range(offset - offset % _PIECE_BYTES, end, _PIECE_BYTES)
        sizes = [min(_PIECE_BYTES, self.nbytes - start) for start in starts]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            for _ in threads.map(take, starts, sizes):
                pass
        return self

    def _take(self, start: int, nbytes: int) -> None:
        """Write to every page of a piece without a change of what is in it."""
        error = self._advise(_MADV_POPULATE_WRITE, start, nbytes)
        if error == errno.EINVAL and self.fd is not None:  # kernels before 5.14
            # Allocated already. Writing back what was read would undo what another thread writes meanwhile.
            self.array[start : start + nbytes : PAGE].max()
        elif error == errno.EINVAL:
            self.array[start : start + nbytes : PAGE] |= 0
        elif error:
            raise self._shortage(error)

    def _take_shared(self, start: int, nbytes: int) -> None:
        """Allocate a piece of the memory file, on huge pages where possible; a shortage would be SIGBUS later."""
        assert self.fd is not None
        # The kernel makes huge pages of shared memory only from small ones, and copies these. From a single one it is
        # six times as fast as from all.
        self._allocate(range(start, start + nbytes, HUGE_PAGE), PAGE)
        # Kernels without it have small pages: slower, still right
        self._advise(_MADV_COLLAPSE, start, nbytes)
        self._allocate([start], nbytes)
        self._take(start, nbytes)

    def _allocate(self, starts: Iterable[int], nbytes: int) -> None:
        assert self.fd is not None
        try:
            for start in starts:
                os.posix_fallocate(self.fd, start, nbytes)
        except OSError as error:
            raise self._shortage(error.errno) from error

    def _shortage(self, error: int | None) -> FinetuneError:
        reason = os.strerror(error or errno.ENOMEM)
        return FinetuneError(f"The system has no {format_bytes(self.nbytes)} of memory left ({reason}).")

    def _advise(self, advice: int, start: int, nbytes: int) -> int:
        """Return the error number of ``madvise``, or 0. The method of ``mmap`` would stop all threads."""
        address = ctypes.c_void_p(self.array.ctypes.data + start)
        failed = _LIBC.madvise(address, ctypes.c_size_t(nbytes), advice)
        return ctypes.get_errno() if failed else 0

    def tensor(self, dtype: torch.dtype, offset: int, count: int) -> torch.Tensor:
        """Return a tensor ``dtype [count]`` over the bytes from ``offset``."""
        size = torch.empty((), dtype=dtype).element_size()
        return self._tensor[offset : offset + count * size].view(dtype)

    def bytes(self, offset: int, nbytes: int) -> np.ndarray:
        """Return the bytes from ``offset``, ``uint8 [nbytes]``, for the store."""
        return self.array[offset : offset + nbytes]

    def page_lock(self, starts: Iterable[int] = ()) -> int:
        """Register the mapping with CUDA, so that copies to and from the device are asynchronous.

        PyTorch's own pinned allocator rounds up to a power of two; this takes exactly what is mapped. Only the process
        that drives the device registers. Not run on a GPU yet.

        Args:
            starts: bytes at which the buffers begin that copies are made from and to. CUDA refuses a copy across two
                registrations ("invalid argument"), so these end where a buffer ends.

        Returns:
            Bytes that are registered: all, or those before the first that CUDA refused (WSL2 allows few). Copies of
            the rest wait for the device, and are correct.
        """
        runtime = torch.cuda.cudart()
        base = self.array.ctypes.data
        locked = 0
        # One for each buffer. No page is in two of them: registering one again is an error.
        borders = {start for start in starts if start % PAGE == 0 and 0 < start < self.nbytes}
        for start, end in pairwise(sorted({0, *borders, self.nbytes})):
            error = int(runtime.cudaHostRegister(base + start, end - start, 1))  # 1: portable
            if error:
                with contextlib.suppress(RuntimeError):
                    _launch_kernel()  # or PyTorch would report the error at its next kernel
                warnings.warn(
                    f"CUDA page-locked {format_bytes(locked)} of {format_bytes(self.nbytes)} of host memory (cudaError "
                    f"{error}): copies of the rest are slower. A lower --host-memory needs less of it.",
                    stacklevel=2,
                )
                break
            self._locked.append(base + start)
            locked = end
        return locked

    def _unlock(self) -> None:
        for address in self._locked:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._locked.clear()

    def _close_file(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def __del__(self) -> None:  # dropped by an exception before anybody could close it
        with contextlib.suppress(Exception):
            self._unlock()
        with contextlib.suppress(Exception):
            self._close_file()

    def close(self) -> None:
        """Unregister the mapping and drop it. The pages are freed when the last tensor over them is dropped."""
        self._unlock()
        self._close_file()
        for name in ("array", "_tensor", "_map"):  # gone where an exception ended an earlier call halfway
            vars(self).pop(name, None)


def _launch_kernel() -> None:
    torch.ones(1, device="cuda")


def _map_aligned(fd: int, nbytes: int) -> tuple[mmap.mmap, int]:
    """Return a mapping that holds ``nbytes`` bytes of the memory file ``fd``, and the offset at which it holds them.

    Shared memory gets huge pages only at an address that is a multiple of ``HUGE_PAGE``, and Python cannot ask for one.
    So this maps private memory with room to spare, and the file over the aligned part of it; both are unmapped as one.
    """
    room = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(room))
    start = -address % HUGE_PAGE
    _LIBC.mmap.restype = ctypes.c_void_p
    mapped = _LIBC.mmap(
        ctypes.c_void_p(address + start),
        ctypes.c_size_t(nbytes),
        mmap.PROT_READ | mmap.PROT_WRITE,
        mmap.MAP_SHARED | _MAP_FIXED,
        fd,
        ctypes.c_long(0),
    )
    if mapped != address + start:
        error = ctypes.get_errno()
        raise OSError(error, f"mapping {format_bytes(nbytes)} of shared memory: {os.strerror(error)}")
    return room, start
