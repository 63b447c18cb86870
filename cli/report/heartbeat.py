"""A sign of life on standard error while something takes long: nobody looks at a blank terminal for more than 3 s."""

import contextlib
import sys
import threading
import time

from common.activity import current_activity

FIRST_AFTER_S = 2.0
"""Seconds that an activity may take without a word."""
AGAIN_AFTER_S = 30.0
"""Seconds between two lines about it in a log; on a terminal, one line counts the seconds."""
_LOOK_EVERY_S = 0.25


class Heartbeat:
    """A heartbeat shows activities that take longer than two seconds, from a thread of its own.

    On a terminal it is one line, gone when the activity ends; elsewhere a line now and then.
    """

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._drawn = False

    def __enter__(self) -> "Heartbeat":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        seen, next_word = None, 0.0
        while not self._over.wait(_LOOK_EVERY_S):
            doing, now = current_activity(), time.monotonic()
            if doing is not seen:
                self._erase()
                seen, next_word = doing, now + FIRST_AFTER_S
            if doing is None or now < next_word:
                continue
            seconds = f"{now - doing.since:.0f} s"
            if self._is_terminal:
                self._write(f"\r\x1b[K{doing.what} ({seconds})")
                self._drawn, next_word = True, now + 0.5
            else:
                self._write(f"{doing.what} ({seconds} so far)\n")
                next_word = now + AGAIN_AFTER_S
        self._erase()

    def _erase(self) -> None:
        if self._drawn:
            self._write("\r\x1b[K")
            self._drawn = False

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
            sys.stderr.write(text)
            sys.stderr.flush()
