"""Temporary folders that do not outlive a killed process: the next one that makes one there removes them."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

PREFIX = "finetune-scratch-"
LOCK = ".alive"  # file in each folder, locked while the folder's process lives


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Make a folder in ``parent`` that is removed at the end, after removing those of processes that were killed.

    It holds a file ``lock``.

    Raises:
        OSError: if there is no such directory, or it cannot be written to.
    """
    remove_abandoned(parent)
    folder, lock = _make(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.close()


def remove_abandoned(parent: Path) -> None:
    """Remove the scratch folders in ``parent`` that this user's processes have left, once those have ended."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another process removes it, or still has it
            state = folder.lstat()
            if state.st_uid != os.geteuid() or folder.is_symlink():
                continue
            try:
                lock = (folder / LOCK).open("r+")
            except FileNotFoundError:
                # Its process was killed before it made the lock; fails if anything else is there
                folder.rmdir()
                continue
            with lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


def _make(parent: Path) -> tuple[Path, TextIO]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        with contextlib.suppress(FileNotFoundError):  # removed by another process before it was locked
            lock = (folder / LOCK).open("x")
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            if (folder / LOCK).exists():
                return folder, lock
            lock.close()
