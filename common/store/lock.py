"""A lock that lets one run use a directory; the kernel drops it when the last process that owns it is gone.

The lock is ``flock`` on the directory itself, so there is no file that a crash could leave behind. Its owners are all
processes that hold the descriptor: the engine hands it to the optimizer process, which may outlive a killed engine by
one write, and nobody else may write to that place before it has ended.
"""

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterable
from pathlib import Path

from common.errors import UserError
from common.store.errors import describe_os_error

PATIENCE_SECONDS = 5.0  # Seconds to wait for processes of a run that was just killed

# Error numbers of network file systems that lock files which are open for writing, but no directories.
_UNSUPPORTED = (errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
LOCK_FILE = ".lock"  # Name of the file that is locked, and stays, where a directory cannot be locked


class DirectoryLock:
    """A lock on ``directories``, held until it is closed or the process ends.

    Raises:
        UserError: if another run holds one of them.
        StoreError: if one cannot be opened.
    """

    def __init__(self, directories: Iterable[Path], patience: float = PATIENCE_SECONDS) -> None:
        self.descriptors: list[int] = []
        """Descriptors of the locks: a process that gets them is an owner, too."""
        try:
            self.add(directories, patience)
        except BaseException:
            self.close()
            raise

    def add(self, directories: Iterable[Path], patience: float = PATIENCE_SECONDS) -> None:
        """Lock these directories as well. Raises as the class does."""
        deadline = time.monotonic() + patience
        for directory in directories:
            self.descriptors.append(_lock(directory, deadline))

    def close(self) -> None:
        """Release the lock; other owners may still hold it. Calling it again does nothing."""
        while self.descriptors:
            os.close(self.descriptors.pop())

    def __enter__(self) -> "DirectoryLock":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _lock(directory: Path, deadline: float) -> int:
    descriptor = -1
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
            except BlockingIOError:
                if time.monotonic() > deadline:
                    owner = _owner(descriptor)
                    advice = "That is this process: close() what it has open there first"
                    if str(os.getpid()) not in owner:
                        advice = "Wait until that has ended, or take another directory"
                    raise UserError(f"{directory} is in use by another run{owner}. {advice}.") from None
                time.sleep(0.02)
            except OSError as error:
                if error.errno not in _UNSUPPORTED or not stat.S_ISDIR(os.fstat(descriptor).st_mode):
                    raise
                os.close(descriptor)
                descriptor = -1
                descriptor = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except BaseException as error:
        if descriptor >= 0:
            os.close(descriptor)
        if isinstance(error, OSError):
            raise describe_os_error("locking", directory, error) from error
        raise


def _owner(descriptor: int) -> str:
    status = os.fstat(descriptor)
    inode = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        words = line.split()
        if "FLOCK" in words and inode in words:
            return f" (process {words[words.index(inode) - 1]})"
    return ""
