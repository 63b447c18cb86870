"""Starts the optimizer process, which spends a second importing PyTorch. Imports nothing slow."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from common.memory.shortage import shortage_explained

_PAGE = 4096
_early: list["StartedProcess"] = []


@dataclass
class StartedProcess:
    """An optimizer process that imports PyTorch, and waits for its set-up."""

    process: subprocess.Popen[bytes]
    shared_fd: int  # File in memory that both map
    connection_fd: int  # Our end of the pipe
    parent: int  # Process that started it

    @classmethod
    def take(cls) -> "StartedProcess":
        """Return the process that was started early, if any, or a new one."""
        early = _early.pop() if _early else None
        return early if early is not None and early.parent == os.getpid() else cls.start()

    @classmethod
    def start(cls) -> "StartedProcess":
        """Start a process.

        Raises:
            OSError: the system cannot start it.
        """
        # The process inherits the memory file, so it has to exist now; its size is set later.
        with shortage_explained(_PAGE):
            shared_fd = os.memfd_create("fuyou", os.MFD_CLOEXEC)
        ours, theirs = socket.socketpair()
        # The user's own directory must not shadow our packages: the search path is ours, without "" in front.
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "fuyou.optimizer.process.main", str(theirs.fileno())],
                pass_fds=(theirs.fileno(), shared_fd),
                stdin=subprocess.DEVNULL,
                env=environment,
            )
        except OSError:
            os.close(shared_fd)
            ours.close()
            raise
        finally:
            theirs.close()
        return cls(process, shared_fd, ours.detach(), os.getpid())

    def discard(self) -> None:
        """End a process that no engine has taken."""
        os.close(self.connection_fd)
        os.close(self.shared_fd)
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def started_early() -> Iterator[None]:
    """Start the process of the first engine that is opened inside: it and this one import PyTorch at the same time."""
    with contextlib.suppress(Exception):  # which the engine reports when it tries again
        _early.append(StartedProcess.start())
    try:
        yield
    finally:
        while _early:
            _early.pop().discard()
