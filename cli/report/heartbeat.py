"""A sign of life on standard error while something takes long: nobody looks at a blank terminal for more than 3 s."""

import contextlib
import sys
import threading
import time

from common.activity import Activity, current_activity, watched_by

FIRST_AFTER_S = 2.0  # Seconds that an activity may take without a word
# Seconds from one line about it to the next in a log, the last for all others; on a terminal, one line counts.
AGAIN_AFTER_S = (8.0, 20.0, 30.0)
_LOOK_EVERY_S = 0.25


class Heartbeat:
    """A heartbeat shows activities: what is announced when it begins, all else when it has taken two seconds.

    It is a thread of its own. On a terminal it is one line, gone before anything else is printed; elsewhere a line now
    and then.
    """

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._over, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._watches = contextlib.ExitStack()
        self._drawn = False

    def __enter__(self) -> "Heartbeat":
        self._watches.enter_context(watched_by(self))
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._watches.close()
        self._over.set()
        self._thread.join()

    def began(self, activity: Activity) -> None:
        """Show an activity that is announced: it may hold Python's lock, so that the thread cannot."""
        if activity.announced:
            with self._lock:
                self._show(f"{activity.what} ...")

    def ended(self) -> None:
        """Remove the line on a terminal: whatever is printed next has one of its own."""
        with self._lock:
            self._erase()

    def _run(self) -> None:
        seen, next_word, shown = None, 0.0, 0
        while not self._over.wait(_LOOK_EVERY_S):
            with self._lock:
                doing, now = current_activity(), time.monotonic()
                if doing is not seen:
                    seen, next_word, shown = doing, now + FIRST_AFTER_S, 0
                if doing is None or now < next_word:
                    continue
                self._show(f"{doing.what} ({now - doing.since:.0f} s{'' if self._is_terminal else ' so far'})")
                wait = AGAIN_AFTER_S[min(shown, len(AGAIN_AFTER_S) - 1)]
                next_word, shown = now + (0.5 if self._is_terminal else wait), shown + 1
        self.ended()

    def _show(self, text: str) -> None:
        self._write(f"\r\x1b[K{text}" if self._is_terminal else f"{text}\n")
        self._drawn = self._is_terminal

    def _erase(self) -> None:
        if self._drawn:
            self._write("\r\x1b[K")
            self._drawn = False

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
            sys.stderr.write(text)
            sys.stderr.flush()
