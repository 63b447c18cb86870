"""A store reads and writes records on all drives at once: one I/O call per stripe, on a pool of threads per drive."""

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from common.activity import advancing
from common.errors import UserError, did_you_mean
from common.store import directories as placement
from common.store import kvikio_backend
from common.store.checksums import CheckedExtent, ChecksummedExtent, ExtentChecksums
from common.store.errors import StoreError
from common.store.kvikio_backend import KvikioFile
from common.store.layout import ALIGNMENT, Extent, Layout, pieces, whole_pages
from common.store.posix import Clock, PosixFile, Throttle, Transfer, aligned_bytes

Io = Literal["posix", "kvikio"]
IOS = get_args(Io)
IO_THREADS = 4  # per directory; four keep a drive busy


class Store:
    """Directories, one per drive, and the extents that are striped over them.

    Reads and writes go past the page cache and return futures; several may run at once, in any order. The
    caller orders two that overlap, one of them a write, by waiting for the first. A buffer belongs to the
    store until its future is done; the future of a failed transfer is done only when nothing touches the buffer any
    more. Use it from any number of threads, but not across a fork: other processes ``open`` the directories themselves.
    """

    @classmethod
    def create(
        cls,
        directories: Sequence[Path],
        layout: Layout,
        *,
        io: Io = "posix",
        threads: int = IO_THREADS,
        overwrite: bool = False,
        throttle: Throttle | None = None,
        replaces: str = "",
    ) -> "Store":
        """Make a store in existing directories, with room for the whole of ``layout``.

        Args:
            directories: one per drive, as many as the layout is for.
            io: ``kvikio`` also reads into device memory; host memory is always reached by direct POSIX I/O.
            threads: I/O threads per directory.
            replaces: names of the stores that this one will replace, with spaces between them.

        Raises:
            UserError: if a directory is missing, not writable, given twice, or in use, or has too little space. Nothing
                was written.
            StoreError: if a file system refuses; created files are removed again.
        """
        _check_io(io)
        created = placement.create_directories(directories, layout, overwrite, replaces)
        try:
            return cls(*created, io, threads, throttle)
        except BaseException:
            placement.remove(directories)  # no caller has the store
            raise

    @classmethod
    def open(
        cls,
        directories: Sequence[Path],
        *,
        io: Io = "posix",
        threads: int = IO_THREADS,
        throttle: Throttle | None = None,
        writes: bool = True,
    ) -> "Store":
        """Open the store that ``directories`` hold, given in any order, also to write to it if it ``writes``; the rest
        as in ``create``."""
        _check_io(io)
        return cls(*placement.find_directories(directories, writes), io, threads, throttle, writes)

    def __init__(
        self,
        directories: list[Path],
        identity: placement.Identity,
        io: Io,
        threads: int,
        throttle: Throttle | None = None,
        writes: bool = True,
    ) -> None:
        # Random name of the store: a manifest that names it cannot be taken for another run's
        self.id = identity.store
        self.directories = tuple(directories)  # The directories, in the order of the stripes
        self.layout = identity.layout
        self.bytes_read = 0  # Bytes read from the drives, in whole pages
        self.bytes_written = 0
        self._counting = threading.Lock()
        self._closed = False
        self._file_bytes = self.layout.file_bytes()
        self._files: dict[str, list[PosixFile]] = {}
        self._device_files: dict[str, list[KvikioFile]] = {}
        self._clocks: list[Clock] = []
        self._pools: list[ThreadPoolExecutor] = []
        # Their own threads: a sync takes as long as the drive likes, and reads must not queue behind it.
        self._syncing = ThreadPoolExecutor(len(directories), "store-sync")
        try:
            for name in self._file_bytes:
                self._files[name] = []
                for path in directories:
                    self._files[name].append(PosixFile(path / name, writes))
            if io == "kvikio":
                kvikio_backend.configure(threads * len(directories))
                for name, files in self._files.items():
                    self._device_files[name] = [KvikioFile(file.path, file) for file in files]
            self._clocks = [throttle.clock(path) for path in directories if throttle is not None]
            # A pool for each drive, so that a slow one does not collect the threads of the others.
            self._pools = [ThreadPoolExecutor(threads, f"store-{index}") for index in range(len(directories))]
        except BaseException:
            self.close()
            raise

    @property
    def direct(self) -> bool:
        """Whether every file is reached past the page cache. False on file systems without O_DIRECT."""
        return all(file.direct for files in self._files.values() for file in files)

    def read(
        self, checked: CheckedExtent, buffer: Any, offset: int = 0, nbytes: int | None = None
    ) -> "Future[None]":
        """Fill the first ``nbytes`` bytes of ``buffer`` with those from ``offset`` on in an extent, and check them.

        The future has a StoreError if they are not what was written there.

        Args:
            checked: the extent with the checksums of its parts, of which whole ones are read.
            buffer: writable C-contiguous memory (numpy array, mmap, memoryview, ...), fastest at a page-aligned
                address; or a contiguous CUDA tensor, if opened with ``io="kvikio"``.

        Raises:
            ValueError, TypeError: if the range or the buffer is invalid. Errors of the drive are in the future.
        """
        extent = checked.extent
        nbytes = extent.nbytes - offset if nbytes is None else nbytes
        self._check_range("read", extent, offset, nbytes)
        if checked.covering(offset, nbytes) != (offset, offset + nbytes):
            raise ValueError(f"bytes {offset} to {offset + nbytes} are not whole parts of {checked.what}")
        sums = ExtentChecksums(extent, self.directories, checked.what, checked.ends, checked.sums)
        return self._start("read", extent, buffer, offset, nbytes, sums)

    def read_unchecked(
        self,
        extent: Extent,
        buffer: Any,
        offset: int = 0,
        nbytes: int | None = None,
        sums: ExtentChecksums | None = None,
    ) -> "Future[None]":
        """Read as ``read`` does, but any bytes, and compare them with nothing; for what finds damage, and for tests.

        Args:
            offset: any, but a multiple of 4096 for device memory.
            sums: checksums to which the bytes are added: whole pages.
        """
        return self._start("read", extent, buffer, offset, nbytes, sums)

    def write(
        self,
        extent: Extent,
        buffer: Any,
        offset: int = 0,
        nbytes: int | None = None,
        sums: ExtentChecksums | None = None,
    ) -> "Future[None]":
        """Write the first ``nbytes`` bytes of ``buffer`` to ``extent``, from ``offset`` on; buffers as in ``read``.

        Their checksums are added to ``sums`` before they are written, so that any later change is found.
        Whole pages are written: ``offset`` must be a multiple of 4096, and so must ``nbytes`` unless it reaches to the
        end of the extent. Nothing is durable before ``sync``.
        """
        return self._start("write", extent, buffer, offset, nbytes, sums)

    def leave_zeros(self, extent: Extent, offset: int, nbytes: int, sums: ExtentChecksums) -> None:
        """Add the checksums of bytes of a new store that nothing is written to.

        Its files have their space, and nothing in it: there a file system returns zeros without asking the drive.
        """
        self._check_range("write", extent, offset, nbytes)
        for directory, at, start, length in pieces(extent, len(self.directories), offset, nbytes):
            sums.add_zeros(directory, at, offset + start, length)

    def sync(self, files: Iterable[str]) -> None:
        """Return when all finished writes to these files are durable, or raise; running writes are not waited for."""
        self._check_open()
        files_by_directory = list(zip(*(self._files[name] for name in files), strict=True))
        if not files_by_directory:
            return
        transfer = Transfer(len(files_by_directory))
        for files_there in files_by_directory:
            transfer.submit(self._syncing, _sync_all, files_there)
        transfer.future.result()
        for directory in self.directories:
            if not (directory / placement.IDENTITY_FILE).exists():
                raise StoreError(
                    f"{directory / placement.IDENTITY_FILE} was deleted while the run was at work, and without it "
                    "the run is not found again. Restore it from a copy, or begin again with --overwrite."
                )

    def close(self) -> None:
        """Wait for running transfers and close the files. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for pool in (*self._pools, self._syncing):
            pool.shutdown()
        files: Iterable[KvikioFile | PosixFile | Clock] = chain(
            *self._device_files.values(), *self._files.values()
        )
        for opened in (*files, *self._clocks):
            opened.close()

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(
        self,
        direction: Literal["read", "write"],
        extent: Extent,
        buffer: Any,
        offset: int,
        nbytes: int | None,
        sums: ExtentChecksums | None,
    ) -> "Future[None]":
        self._check_open()
        nbytes = extent.nbytes - offset if nbytes is None else nbytes
        self._check_range(direction, extent, offset, nbytes)
        files: Sequence[PosixFile | KvikioFile]
        if getattr(buffer, "is_cuda", False):
            flat = self._flat_tensor(direction, buffer, offset)
            files = self._device_files[extent.file]
        else:
            flat = _flat_bytes(direction, buffer)
            files = self._files[extent.file]
        if len(flat) < nbytes:
            raise ValueError(
                f"a {direction} of {nbytes} bytes needs a buffer of that size, and this one has {len(flat)}"
            )

        calls = list(pieces(extent, len(self.directories), offset, nbytes))
        page_bytes = sum(whole_pages(call.offset % ALIGNMENT + call.nbytes) for call in calls)
        with self._counting:
            if direction == "read":
                self.bytes_read += page_bytes
            else:
                self.bytes_written += page_bytes
        transfer = Transfer(len(calls))
        for directory, at, start, length in calls:
            work = getattr(files[directory], direction)
            part = flat[start : start + length]
            if self._clocks:
                work = partial(
                    self._clocks[directory].during, direction, whole_pages(at % ALIGNMENT + length), work
                )
            if sums is not None:
                add = partial(sums.add, directory, at, offset + start)
                work = partial(_write_summed if direction == "write" else _read_summed, work, add)
            transfer.submit(self._pools[directory], work, at, part)
        return transfer.future

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("The store is closed.")

    def _check_range(self, direction: str, extent: Extent, offset: int, nbytes: int) -> None:
        """Refuse an extent of another layout, or a range beyond its end: it would read or destroy other records."""
        end = extent.offset + extent.bytes_per_directory(len(self.directories))
        if end > self._file_bytes.get(extent.file, 0):
            raise ValueError(f"{extent} is not in this store's layout")
        if offset < 0 or nbytes < 1 or offset + nbytes > extent.nbytes:
            raise ValueError(
                f"bytes {offset} to {offset + nbytes} are not inside an extent of {extent.nbytes}"
            )
        if direction == "write" and (
            offset % ALIGNMENT or (nbytes % ALIGNMENT and offset + nbytes != extent.nbytes)
        ):
            raise ValueError(
                f"a write of bytes {offset} to {offset + nbytes} of {extent.nbytes} cuts a page of {ALIGNMENT} bytes"
            )

    def _flat_tensor(self, direction: str, tensor: Any, offset: int) -> Any:
        import torch

        if direction == "write" or not self._device_files:
            raise TypeError(f"this store cannot {direction} device memory: go through the host")
        if not tensor.is_contiguous():
            raise ValueError("device memory must be contiguous")
        if offset % ALIGNMENT:
            raise ValueError(
                f"device memory needs an offset in whole pages of {ALIGNMENT} bytes, not {offset}"
            )
        return tensor.detach().view(-1).view(torch.uint8)


def _flat_bytes(direction: str, buffer: Any) -> Any:
    flat = np.frombuffer(buffer, dtype=np.uint8)  # which rejects what has no buffer, or one with gaps
    if direction == "read" and not flat.flags.writeable:
        raise TypeError(f"cannot read into a {type(buffer).__name__} that is read-only")
    return flat


def _read_summed(
    read: Callable[[int, Any], None], add: Callable[[Any], None], offset: int, part: Any
) -> None:
    read(offset, part)
    add(part)


def _write_summed(
    write: Callable[[int, Any], None], add: Callable[[Any], None], offset: int, part: Any
) -> None:
    add(part)
    write(offset, part)


def _sync_all(files: Iterable[PosixFile]) -> None:
    for file in files:
        file.sync()


def _check_io(io: str) -> None:
    if io not in IOS:
        raise UserError(f"--io {io} is unknown; it is {' or '.join(IOS)}.{did_you_mean(io, IOS)}")
    if io == "kvikio":
        kvikio_backend.require()


PIECE_BYTES = 64 << 20  # Bytes that are read and checked at once, by the threads of all drives


def verify(store: Store, sealed: Collection[ChecksummedExtent]) -> tuple[int, list[str]]:
    """Read all of ``sealed``; return the bytes read, and a sentence for each that is damaged or cannot be read."""
    read = 0
    damage = []
    for entry in advancing(sealed):
        read += entry.extent.nbytes
        try:
            check_extent(store, entry)
        except StoreError as error:
            damage.append(str(error))
    return read, damage


def check_extent(store: Store, entry: ChecksummedExtent) -> None:
    """Read all of an extent, and compare it with its checksums.

    Raises:
        StoreError: it is damaged, or cannot be read.
    """
    extent = entry.extent
    sums = ExtentChecksums(extent, store.directories, entry.what)
    buffer = aligned_bytes(min(PIECE_BYTES, extent.nbytes))
    for start in range(0, extent.nbytes, PIECE_BYTES):
        store.read_unchecked(extent, buffer, start, min(PIECE_BYTES, extent.nbytes - start), sums).result()
    sums.compare(entry.sums)
