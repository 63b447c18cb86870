"""Read and write files with ``preadv`` and ``pwritev`` and O_DIRECT, on threads: the backend that runs everywhere.

Direct I/O moves whole pages between page-aligned addresses. What is not like that (the odd tail of a record, a
buffer at an odd address) passes through a page-aligned bounce buffer, so that no byte of a file is ever reached both
directly and through the page cache.
"""

import bisect
import errno
import mmap
import os
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from common.memory.shortage import shortage_explained
from common.store.errors import StoreError, describe_os_error, described
from common.store.layout import ALIGNMENT, whole_pages
from common.units import format_bytes


class Clock(Protocol):
    """The time of one drive."""

    def during(
        self, direction: Literal["read", "write"], nbytes: int, work: Callable[..., None], *arguments: Any
    ) -> None:
        """Run ``work(*arguments)``, and return when the drive has had time to move ``nbytes`` bytes."""
        ...

    def close(self) -> None: ...


class Throttle(Protocol):
    """Slows drives down, for benchmarks. The optimizer process gets a pickled copy."""

    def clock(self, directory: Path) -> Clock:
        """Return the clock of the drive that ``directory``, a store's, lies on."""
        ...


class Transfer:
    """Pieces of work on executors, with a future that completes when *all* of them have ended, also after a failure.

    So when the future is done, the buffer may be reused or freed, because nothing writes into it any more. The pieces
    hold the buffer until then, and release it afterwards even if the future is kept.
    """

    def __init__(self, pieces: int) -> None:
        self.future: Future[None] = Future()
        # From here on it cannot be cancelled: the drives would not notice
        self.future.set_running_or_notify_cancel()
        self._remaining = pieces
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def submit(self, executor: Executor, work: Callable[..., None], *arguments: Any) -> None:
        """Run ``work(*arguments)`` as one of the pieces; exactly as many calls must be made as were announced."""
        try:
            executor.submit(self._run, [work, arguments])
        except BaseException as error:  # an executor that was shut down: this piece will never run
            self._ended(error)

    def _run(self, piece: list[Any]) -> None:
        work, arguments = piece
        piece.clear()  # the executor holds it until after the future is done
        error = None
        if self._error is None:  # after a failure the rest is pointless
            try:
                work(*arguments)
            except BaseException as caught:
                error = caught
                _forget_locals(error)
        del work, arguments
        self._ended(error)

    def _ended(self, error: BaseException | None) -> None:
        with self._lock:
            self._error = self._error or error
            self._remaining -= 1
            last = self._remaining == 0
        if not last:
            return
        if self._error is not None:
            self.future.set_exception(self._error)
        else:
            self.future.set_result(None)


def _forget_locals(error: BaseException | None) -> None:
    """Clear the variables in the traceback of ``error``: they would keep the buffer alive as long as the error."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


Bytes = npt.NDArray[np.uint8]  # A flat, contiguous view of somebody's memory

# Type of `os.preadv` and `os.pwritev`, which take descriptor, buffers and offset, and return the bytes moved.
VectoredCall = Callable[[int, list[memoryview], int], int]

BOUNCE_BYTES = 1 << 20  # Bytes of the bounce buffer that a thread gets with its first transfer that needs one


class PosixFile:
    """A preallocated file of whole pages. Any number of threads may use it at once."""

    def __init__(self, path: Path, writes: bool = True) -> None:
        """Open ``path``, or raise a StoreError; without ``writes`` to read it only."""
        self.path = path
        with described("opening", path):
            self._descriptor, self.direct = _open_direct(path, os.O_RDWR if writes else os.O_RDONLY)

    def read(self, offset: int, view: Bytes) -> None:
        """Fill ``view`` with the bytes from ``offset`` on; both may be odd."""
        straight = 0
        if offset % ALIGNMENT == 0 and address_of(view) % ALIGNMENT == 0:
            straight = view.nbytes - view.nbytes % ALIGNMENT
            self._transfer("reading", os.preadv, offset, view[:straight])
        done = straight
        while done < view.nbytes:
            first_page, skip = divmod(offset + done, ALIGNMENT)
            take = min(view.nbytes - done, BOUNCE_BYTES - skip)
            bounce = bounce_buffer()[: whole_pages(skip + take)]
            self._transfer("reading", os.preadv, first_page * ALIGNMENT, bounce)
            view[done : done + take] = bounce[skip : skip + take]
            done += take

    def write(self, offset: int, view: Bytes) -> None:
        """Write ``view`` from ``offset`` (whole pages) on. The rest of its last page becomes zeros."""
        straight = 0
        if address_of(view) % ALIGNMENT == 0:
            straight = view.nbytes - view.nbytes % ALIGNMENT
            self._transfer("writing", os.pwritev, offset, view[:straight])
        done = straight
        while done < view.nbytes:
            take = min(view.nbytes - done, BOUNCE_BYTES)
            bounce = bounce_buffer()[: whole_pages(take)]
            bounce[:take] = view[done : done + take]
            bounce[take:] = 0
            self._transfer("writing", os.pwritev, offset + done, bounce)
            done += take

    def _transfer(self, doing: str, call: VectoredCall, offset: int, pages: Bytes) -> None:
        """Move whole pages, continuing where the kernel stopped short. (Python repeats calls that signals cut off.)"""
        memory = pages.data
        done = 0
        while done < pages.nbytes:
            try:
                moved = call(self._descriptor, [memory[done:]], offset + done)
            except OSError as error:
                what = f"{doing} {format_bytes(pages.nbytes - done)} at offset {offset + done}"
                raise describe_os_error(what, self.path, error) from error
            if moved < ALIGNMENT:
                with described("looking up", self.path):
                    size = os.fstat(self._descriptor).st_size
                raise StoreError(
                    f"{doing} {format_bytes(pages.nbytes - done)} at offset {offset + done} of {self.path.name} in "
                    f"{self.path.parent} stopped after {moved} bytes: the file was truncated (it has {size} bytes), or "
                    "the file system is full."
                )
            # A call that ended inside a page is continued from the start of that page: direct I/O moves whole ones.
            done += moved - moved % ALIGNMENT

    def sync(self) -> None:
        """Return when everything written is on the drive; if it refuses, that may be lost."""
        with described("syncing", self.path):
            os.fdatasync(self._descriptor)
        self._check_is_there()

    def _check_is_there(self) -> None:
        """Raise a StoreError if the path names another file, or none: what was written is lost when this is closed."""
        try:
            ours = os.fstat(self._descriptor)
            named = self.path.stat()
        except FileNotFoundError:
            what = "was deleted or moved"
        except OSError as error:
            raise describe_os_error("looking up", self.path, error) from error
        else:
            if (named.st_dev, named.st_ino) == (ours.st_dev, ours.st_ino):
                return
            what = "was replaced by another file"
        raise StoreError(
            f"{self.path} {what} while the run was writing to it, so no later step can be committed. If it was moved, "
            "put it back and continue with --resume; else begin again with --overwrite."
        )

    def close(self) -> None:
        os.close(self._descriptor)


def write_new_file(path: Path, parts: Sequence[Bytes]) -> None:
    """Write a new file of these bytes, one part after the other, past the page cache, and sync it.

    On four threads this is four times as fast as through the page cache, which copies with one.

    Raises:
        OSError, StoreError: the file is there, or the drive refuses; what was written stays.
    """
    ends = [*accumulate(len(part) for part in parts)]
    with path.open("xb") as created:
        os.posix_fallocate(created.fileno(), 0, whole_pages(ends[-1]))
        file = PosixFile(path)
        try:
            with ThreadPoolExecutor(4, "write") as threads:
                for _ in threads.map(
                    partial(_write_pages, file, parts, ends), range(0, ends[-1], BOUNCE_BYTES)
                ):
                    pass
            os.ftruncate(created.fileno(), ends[-1])
            file.sync()
        finally:
            file.close()


def _write_pages(file: PosixFile, parts: Sequence[Bytes], ends: Sequence[int], start: int) -> None:
    """Write the megabyte from ``start`` on, collected in this thread's buffer."""
    stop = min(start + BOUNCE_BYTES, ends[-1])
    pages = bounce_buffer()[: whole_pages(stop - start)]
    position = start
    index = bisect.bisect_right(ends, start)
    while position < stop:
        end = min(stop, ends[index])
        first = position - (ends[index] - len(parts[index]))
        pages[position - start : end - start] = parts[index][first : first + end - position]
        position = end
        index += 1
    file.write(start, pages)


def address_of(view: Bytes) -> int:
    """Return the address of the first byte of ``view``."""
    return int(view.__array_interface__["data"][0])


def aligned_bytes(nbytes: int) -> Bytes:
    """Return new page-aligned memory, zeroed."""
    with shortage_explained(nbytes):
        return np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)


_own = threading.local()


def bounce_buffer() -> Bytes:
    """Return the calling thread's bounce buffer, of ``BOUNCE_BYTES`` bytes."""
    if not hasattr(_own, "bounce"):
        _own.bounce = aligned_bytes(BOUNCE_BYTES)
    return _own.bounce


def _open_direct(path: Path, access: int) -> tuple[int, bool]:
    """Return a descriptor for ``path``, and whether it is a direct one: some tmpfs, FUSE and overlays have none."""
    flags = access | os.O_CLOEXEC
    descriptor = -1
    page = aligned_bytes(ALIGNMENT).data
    try:
        descriptor = os.open(path, flags | os.O_DIRECT)
        # Some accept the flag and refuse the I/O, such as drives whose blocks are larger than a page.
        os.preadv(descriptor, [page], 0)
        return descriptor, True
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    return os.open(path, flags), False
