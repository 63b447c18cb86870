"""Signals that end a run, which are handled once and leave time to bring the run to a good end.

The status is a shell's for each: 130 for Ctrl-C, 143 for SIGTERM, by which job schedulers end a job, 129 for SIGHUP,
when the terminal goes away (and not heard at all under nohup). After the last two nobody is there to press Ctrl-C
again, so they come with a deadline.
"""

import contextlib
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

# After SIGTERM or SIGHUP, a run that has not ended by then ends at once: schedulers commonly kill after 30 s, and the
# last committed step is as safe either way.
STOP_SECONDS = 25.0

STATUS = {number: 128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}


class Stopped(Exception):
    """Raised when the user has stopped the run; the message says how to continue."""

    def __init__(self, message: str, number: int | None = None) -> None:
        super().__init__(message)
        self.number = number  # Signal that stopped the run, if it is not the one that :class:`Interrupts` has received


class Interrupts:
    """Interrupts is a context in which the first signal that ends a run raises KeyboardInterrupt, and only that one.

    So nobody who presses Ctrl-C twice cuts short what puts the run in order. An exception that a signal raises can get
    lost (in a destructor, in a library's callback); :meth:`enter` raises it again. If the process ends with the context
    (``ends_process``), no signal is heard after it.
    """

    is_rank0, world_size, restarted = True, 1, False  # As the loop sees a process that trains alone

    def __init__(self, ends_process: bool = False) -> None:
        self._ends_process, self._is_done = ends_process, False
        self.how_to_continue = ""  # Sentence to print if the deadline passes
        self._received: int | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._deadline: threading.Timer | None = None

    def enter(self, where: str) -> None:
        """Raise KeyboardInterrupt if a signal came; the loop calls this at each stage of a run."""
        if self._received is not None:
            raise KeyboardInterrupt

    def agree(self, wish: bool) -> bool:
        """Return the wish: no other rank has one."""
        return wish

    def finish(self) -> None:
        """Hear no more signals: all is done, and what is left to do is quick."""
        self._is_done = True

    def status(self, stopped: Stopped | None = None) -> int:
        number = stopped.number if stopped is not None and stopped.number is not None else self._received
        return STATUS[signal.Signals(number or signal.SIGINT)]

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():  # Python sets signal handlers nowhere else
            for number in STATUS:
                if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                    continue  # nohup
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self._ends_process else handler)
        if self._deadline is not None:
            self._deadline.cancel()

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if self._received is not None or self._is_done:
            return
        self._received = signum
        if signum != signal.SIGINT:
            self._deadline = threading.Timer(STOP_SECONDS, self._give_up)
            self._deadline.daemon = True
            self._deadline.start()
        raise KeyboardInterrupt

    def _give_up(self) -> None:
        with contextlib.suppress(OSError):
            print(f"\nstopped at once, after {STOP_SECONDS:.0f} s. {self.how_to_continue}", file=sys.stderr, flush=True)
        os._exit(self.status())
