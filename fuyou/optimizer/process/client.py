"""The engine's end of the pipe to the optimizer process: starts it, listens, and notices when it dies."""

import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

from common.errors import FinetuneError
from fuyou.optimizer.process.protocol import BEAT_SECONDS, Alive, Failed, Ready, Setup
from fuyou.optimizer.process.start import StartedProcess

# Number of missing signs of life in a row (a minute) after which the process counts as hung
PATIENCE_BEATS = 30
# Time after which a killed process is left behind that still hangs in a call to a drive
_UNKILLABLE_SECONDS = 10.0


class OptimizerLink:
    """A running optimizer process. Creating a link starts it; it imports PyTorch meanwhile."""

    def __init__(self) -> None:
        self._closing = False
        self._heard_before = False  # it imports until it sends its first message
        self._sending = threading.Lock()
        self._thread: threading.Thread | None = None
        try:
            started = StartedProcess.take()
        except OSError as error:
            raise FinetuneError(f"The optimizer process cannot be started: {error.strerror}.") from error
        self.shared_fd = started.shared_fd
        self._process = started.process
        self._connection = Connection(started.connection_fd)

    @property
    def pid(self) -> int:
        return self._process.pid

    def set_up(
        self,
        setup: Setup,
        on_message: Callable[[object], None],
        on_failure: Callable[[BaseException], None],
        locks: Sequence[int] = (),
    ) -> None:
        """Send the set-up message, and start listening; the process takes its memory meanwhile.

        Args:
            on_message: called in the link's thread with every ``Updated`` and ``Written``.
            on_failure: called once if the process reports a failure or ends unexpectedly.
            locks: descriptors that the process holds as long as it lives.
        """
        self._on_message = on_message
        self._on_failure = on_failure
        try:
            self._connection.send((setup, self.shared_fd, len(locks)))
            if locks:
                with socket.socket(fileno=os.dup(self._connection.fileno())) as channel:
                    socket.send_fds(channel, [b"."], list(locks))
        except OSError:
            raise self._died() from None
        self._thread = threading.Thread(target=self._listen, name="fuyou optimizer link", daemon=True)
        self._thread.start()

    def send(self, message: object) -> None:
        """Send a message.

        Raises:
            FinetuneError: if the process has ended.
        """
        try:
            with self._sending:
                self._connection.send(message)
        except OSError:
            raise self._died() from None

    def close(self) -> None:
        """Kill the process (everything it holds is on SSD or in our memory), and wait for its end."""
        if self._closing:
            return
        self._closing = True
        os.close(self.shared_fd)
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_UNKILLABLE_SECONDS)
        if self._thread is not None:
            self._thread.join()
        self._connection.close()

    def wait_until_up(self) -> None:
        """Wait until the process has imported its libraries."""
        try:
            message = self._receive()
        except (EOFError, OSError):
            raise self._died() from None
        if isinstance(message, Failed):
            raise FinetuneError(message.message)
        assert isinstance(message, Ready)

    def _listen(self) -> None:
        while True:
            try:
                message = self._receive()
            except FinetuneError as error:
                self._on_failure(error)
                return
            except (EOFError, OSError):
                if not self._closing:
                    self._on_failure(self._died())
                return
            if isinstance(message, Failed):
                text = (
                    message.message
                    if message.expected
                    else f"The optimizer process failed:\n{message.message}"
                )
                self._on_failure(FinetuneError(text))
                return
            try:
                self._on_message(message)
            except BaseException as error:  # raised in this thread, it would be lost
                self._on_failure(error)
                return

    def _receive(self) -> object:
        missed = 0
        while True:
            # Missing beats count, not time that passes: Ctrl-Z stops both processes.
            if not self._connection.poll(BEAT_SECONDS):
                missed += self._heard_before
                if missed > PATIENCE_BEATS:
                    self._process.kill()
                    raise FinetuneError(
                        f"The optimizer process has not answered for {PATIENCE_BEATS * BEAT_SECONDS:.0f} s and was "
                        "killed. Does a drive hang, or does the system swap? (See dmesg.) The last committed step is "
                        "intact; --resume continues from it."
                    )
                continue
            message = self._connection.recv()
            self._heard_before = True
            missed = 0
            if not isinstance(message, Alive):
                return message

    def _died(self) -> FinetuneError:
        try:
            status = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return FinetuneError("The optimizer process closed its pipe.")
        if status == -9:
            return FinetuneError(
                "The optimizer process was killed (signal 9). If nobody did that by hand, the system ran out of "
                "memory: lower --host-memory. The last committed step is intact; --resume continues from it."
            )
        how = f"was ended by signal {-status}" if status < 0 else f"ended with exit status {status}"
        return FinetuneError(
            f"The optimizer process {how} during the run. The last committed step is intact; --resume "
            "continues from it."
        )
