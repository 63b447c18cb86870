"""The optimizer process's end of the pipe to the engine."""

import contextlib
import os
import socket
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from common.errors import FinetuneError
from fuyou.optimizer.process.protocol import BEAT_SECONDS, Alive, Failed


class EnginePipe:
    """A pipe to the engine that several threads may send through.

    Args:
        descriptor: its file descriptor.
    """

    def __init__(self, descriptor: int):
        self._connection = Connection(descriptor)
        self._sending = threading.Lock()

    def send(self, message: object) -> None:
        """Send one message."""
        with self._sending:
            self._connection.send(message)

    def receive(self) -> Any:
        """Wait for the next message, and return it.

        Raises:
            EOFError, OSError: the engine is gone, or has closed the pipe.
        """
        return self._connection.recv()

    def receive_locks(self, count: int) -> None:
        """Take ``count`` locks of the run from the engine.

        They are never closed: if the engine dies, this process may still be writing.
        """
        if count:
            with socket.socket(fileno=os.dup(self._connection.fileno())) as channel:
                socket.recv_fds(channel, 1, count)

    def send_heartbeats(self) -> None:
        """Send a sign of life every few seconds, as long as the engine listens."""
        with contextlib.suppress(OSError):
            while True:
                time.sleep(BEAT_SECONDS)
                self.send(Alive())

    def report(self, error: BaseException) -> None:
        """Tell the engine why the process ends, if it still listens."""
        expected = isinstance(error, FinetuneError)
        message = error.as_written if isinstance(error, FinetuneError) else "".join(traceback.format_exception(error))
        with contextlib.suppress(OSError):
            self.send(Failed(message, expected))

    def fail(self, error: BaseException) -> None:
        """Report an error of any thread, and end the process."""
        self.report(error)
        os._exit(1)
