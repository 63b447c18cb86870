"""Continue a run on other SSDs: copy its records into a new store, which replaces the old one.

What lies on the drives depends on the model alone, apart from how it is striped: so the same bytes are written to other
places. Every record is compared with its checksum when it is read, and read again from its new place before the
old one is given up. When which store counts: :mod:`common.store.migration`.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.errors import FinetuneError
from common.store import DirectoryLock, Extent, Store, commit_manifest
from common.store.backends.posix import Bytes, aligned_bytes
from common.store.checksums import ExtentChecksums
from common.store.migration import abandon_successor, lock_folders, make_successor, promote, recover
from common.store.verify import PIECE_BYTES, ChecksummedExtent, verify
from fuyou.checkpoint.commits import TrainingState, check_records, sealed_records
from fuyou.layout.record import weights_file

_READS, _WRITES = 2, 2  # Pieces that are read, and written, at once: a record of any size is copied in 64 MiB of memory


@dataclass(frozen=True)
class Drives:
    """The folders of a run on all drives: where it is to be, and where else it may be now."""

    folders: Sequence[Path]  # Folders on the drives that it is to use
    leaving: Sequence[Path] = ()  # Folders on the drives that it is to leave

    @property
    def everywhere(self) -> list[Path]:
        return [*self.folders, *self.leaving]


def open_run(
    drives: Drives, load: Callable[[Store], TrainingState], **options: Any
) -> tuple[DirectoryLock, Store, TrainingState]:
    """Open the run that is on ``drives``; where it lies on other drives than it is to use, move it first.

    Every record has been read and compared with its checksum.

    Args:
        load: returns the state in a store, and refuses one that cannot be continued.
        options: options of :meth:`common.store.Store.open`.

    Raises:
        UserError: if there is none, a drive is missing, another process holds it, or there is too little space.
        FinetuneError: if a drive refuses, or something is damaged.
    """
    held = lock_folders(drives.everywhere)
    try:
        directories = recover(drives.everywhere)
        moves = set(directories) != set(drives.folders)
        if moves:
            restripe(directories, drives, load, held)
        store = Store.open(drives.folders, **options)
        try:
            state = load(store)
            if not moves:  # else it has just been read
                check_records(store, state)
        except BaseException:
            store.close()
            raise
        return held, store, state
    except BaseException:
        held.close()
        raise


def restripe(
    directories: Sequence[Path], drives: Drives, load: Callable[[Store], TrainingState], held: DirectoryLock
) -> None:
    """Spread the committed state of the store in ``directories`` over the drives that the run is to use.

    Raises:
        UserError: if there is too little space. Nothing was changed.
        FinetuneError: if a drive refuses, or a record is damaged. The run is at its old or its new location.
    """
    with Store.open(directories, io="posix") as old:
        state = load(old)
    layout = old.layout.restriped(len(drives.folders))
    spare = [weights_file(slot) for slot in range(state.slots) if slot != state.slot]
    new = make_successor(old, drives.folders, layout, spare)
    try:
        with new, Store.open(directories, io="posix") as old:
            held.add(new.directories)
            copied = _copy_all(old, state, new)
            commit_manifest(new.directories[0], replace(state, store=new.id, checksums=copied).to_dict())
    except BaseException:
        abandon_successor(old, drives.folders)
        raise
    promote(new.directories, drives.everywhere)


def _copy_all(old: Store, state: TrainingState, new: Store) -> list[dict[str, Any]]:
    extents = {
        old_extent: other
        for name in old.layout.file_bytes()
        for old_extent, other in zip(old.layout.extents(name), new.layout.extents(name), strict=True)
    }
    sealed = [copy_record(record, old, extents[record.extent], new) for record in sealed_records(old, state)]
    new.sync(new.layout.file_bytes())
    _, damage = verify(new, sealed)
    if damage:
        raise FinetuneError(f"A drive does not return what was written to it; the run stays where it was. {damage[0]}")
    return [record.to_dict() for record in sealed]


def copy_record(sealed: ChecksummedExtent, source: Store, extent: Extent, target: Store) -> ChecksummedExtent:
    """Copy a part of a record to its ``place`` in another store, in 64 MiB of memory.

    Raises:
        StoreError: if a drive refuses, or the part is damaged.
    """
    nbytes = sealed.extent.nbytes
    if extent.nbytes != nbytes:
        raise ValueError(f"{sealed.what} has {nbytes} bytes, and its new place {extent.nbytes}")
    seen = ExtentChecksums(sealed.extent, source.directories, sealed.what, sealed.sums)
    written = ExtentChecksums(extent, target.directories, sealed.what)
    free = [aligned_bytes(min(PIECE_BYTES, nbytes)) for _ in range(_READS + _WRITES)]
    reading: deque[tuple[Future[None], Bytes, int, int]] = deque()
    writing: deque[tuple[Future[None], Bytes]] = deque()

    def forward() -> None:
        """Write the piece whose reading was started first."""
        future, buffer, start, length = reading.popleft()
        future.result()
        if len(writing) == _WRITES:
            done, its = writing.popleft()
            done.result()
            free.append(its)
        writing.append((target.write(extent, buffer, start, length, written), buffer))

    for start in range(0, nbytes, PIECE_BYTES):
        if len(reading) == _READS:
            forward()
        length, buffer = min(PIECE_BYTES, nbytes - start), free.pop()
        reading.append((source.read(sealed.extent, buffer, start, length, seen), buffer, start, length))
    while reading:
        forward()
    for done, _ in writing:
        done.result()
    return ChecksummedExtent(sealed.what, extent, written.values)
