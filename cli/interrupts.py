"""Ctrl-C and SIGTERM: heard once, at a moment when the run can still be brought to a good end."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Stopped(Exception):
    """The user stopped the run; the message says how to continue."""


class Interrupts:
    """While this context is open, the first SIGINT or SIGTERM raises KeyboardInterrupt and later ones do nothing.

    So nobody who presses Ctrl-C twice cuts short what puts the run in order. An exception that a signal raises can get
    lost (in a destructor, in a library's callback); :meth:`check` raises it again.
    """

    def __init__(self) -> None:
        self._requested = False
        self._before: dict[signal.Signals, Any] = {}

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal came."""
        if self._requested:
            raise KeyboardInterrupt

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():  # Python sets signal handlers nowhere else
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, signum: int, frame: FrameType | None) -> None:
        if not self._requested:
            self._requested = True
            raise KeyboardInterrupt
