"""Progress of a run: one line per step or, on a terminal, one line that is redrawn; and signs of life."""

import contextlib
import os
import shutil
import sys
import threading
import time
from collections import deque
from contextlib import AbstractContextManager
from statistics import median
from typing import Any, TextIO

from tqdm import tqdm

from common.activity import Activity, current_activity, watched_by
from common.errors import printable
from common.units import format_seconds


def draws_on(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that can erase and redraw a line."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


BOLD = 1
FAINT = 2
RED = 31
GREEN = 32


def has_colors() -> bool:
    """Return whether standard output is a terminal, and ``NO_COLOR`` is not set (no-color.org)."""
    return draws_on(sys.stdout) and not os.environ.get("NO_COLOR")


def painted(text: str, code: int) -> str:
    """Return a text in a color, where there are any."""
    return f"\x1b[{code}m{text}\x1b[0m" if has_colors() else text


_BAR = 10  # Columns of the bar
_RECENT = 20  # Steps whose median duration tells the time that is left


class Progress:
    """Shows steps: a bar on standard error if that is a terminal, else ``every`` N and the last on standard output."""

    def __init__(self, total: int, every: int = 1) -> None:
        self._total = total
        self._every = every
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._bar = tqdm(
            total=total,
            file=sys.stderr,
            disable=not draws_on(sys.stderr),
            bar_format=f"{{bar:{_BAR}}} {{desc}}",  # with a bar in it, tqdm cuts the line to the terminal
            dynamic_ncols=True,
            delay=1e-9,  # nothing before the first step
        )

    def show(self, step: int, seconds: float, text: str) -> None:
        """Show a step, which took ``seconds``, and what there is to say about it."""
        self._recent.append(seconds)
        left = (self._total - step) * median(self._recent)  # evaluations and checkpoints delay a few steps
        wait = f", {format_seconds(left)} left" if step < self._total else ""  # first: lines may be cut
        progress = f"step {step}/{self._total}{wait}"
        if not self._bar.disable:
            self._bar.n = step
            room = (self._bar.format_dict["ncols"] or 80) - _BAR - 1
            parts = [progress, *printable(text).split(", ")]
            while len(parts) > 1 and len(", ".join(parts)) > room:
                parts.pop()  # whole figures: "3.4 K tokens/s" cut to "3.4 K tokens" is another one
            with _may_be_gone():
                self._bar.set_description_str(", ".join(parts))
        elif step % self._every == 0 or step == self._total:
            print(f"{progress}: {printable(text)}", flush=True)

    def say(self, text: str) -> None:
        """Print a line that stays."""
        if self._bar.disable:
            print(printable(text), flush=True)
        else:
            with _may_be_gone():
                self._bar.write(printable(text), file=sys.stderr)

    def close(self) -> None:
        """Leave the line of the last step."""
        with _may_be_gone():
            self._bar.close()


def _may_be_gone() -> AbstractContextManager[None]:
    """Return a context in which a terminal that has been closed is no error."""
    return contextlib.suppress(OSError, ValueError)


def _described(doing: Activity, now: float) -> str:
    """Return what is done and for how long, up to the closing parenthesis; if known, what part and the time left."""
    seconds = now - doing.since
    share = doing.share()
    part = f": {share:.0%}, {format_seconds(seconds / share - seconds)} left" if share else ""
    return f"{doing.what}{part} ({seconds:.0f} s"


FIRST_AFTER_S = 2.0  # Seconds that an activity may take without a word
AGAIN_AFTER_S = (8.0, 20.0, 30.0)  # Seconds between lines about it in a log; the last applies to all others
_LOOK_EVERY_S = 0.25


class _Output:
    """A stream before whose output the line of the heartbeat is erased."""

    def __init__(self, stream: Any, heartbeat: "Heartbeat") -> None:
        self._stream = stream
        self._heartbeat = heartbeat

    def write(self, text: str) -> int:
        self._heartbeat.ended()
        return int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Heartbeat:
    """Shows activities: announced ones when they begin, others after two seconds.

    A thread draws a single line on a terminal, erased before other output; elsewhere it prints a line now and then.
    """

    def __init__(self) -> None:
        self._stream = sys.stderr
        self._is_terminal = draws_on(sys.stderr)
        self._over = threading.Event()
        self._lock = threading.RLock()  # a signal's handler may print
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._watches = contextlib.ExitStack()
        self._drawn = False
        os.register_at_fork(after_in_child=self._begin_in_child)

    def _begin_in_child(self) -> None:
        """Draw nothing in a forked process: the thread, which may hold the lock, is not there."""
        self._lock = threading.RLock()
        self._drawn = False

    def __enter__(self) -> "Heartbeat":
        if self._is_terminal:
            self._watches.enter_context(contextlib.redirect_stdout(_Output(sys.stdout, self)))
            self._watches.enter_context(contextlib.redirect_stderr(_Output(sys.stderr, self)))
        self._watches.enter_context(watched_by(self))
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()
        self._watches.close()

    def began(self, activity: Activity) -> None:
        """Show an announced activity now: it may hold Python's lock, so that the thread cannot."""
        if activity.announced:
            with self._lock:
                self._show(f"{activity.what} ...")

    def ended(self) -> None:
        """Erase the line."""
        if not self._drawn:
            return
        with self._lock:
            self._write("\r\x1b[K")
            self._drawn = False

    def _run(self) -> None:
        seen = None
        next_word = 0.0
        shown = 0
        while not self._over.wait(_LOOK_EVERY_S):
            with self._lock:
                doing = current_activity()
                now = time.monotonic()
                if doing is not seen:
                    seen = doing
                    next_word = now + FIRST_AFTER_S
                    shown = 0
                if doing is None or now < next_word:
                    continue
                self._show(f"{_described(doing, now)}{'' if self._is_terminal else ' so far'})")
                wait = AGAIN_AFTER_S[min(shown, len(AGAIN_AFTER_S) - 1)]
                next_word = now + (0.5 if self._is_terminal else wait)
                shown = shown + 1
        self.ended()

    def _show(self, text: str) -> None:
        text = printable(text)
        if self._is_terminal:
            text = f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}"
        self._write(text if self._is_terminal else f"{text}\n")
        self._drawn = self._is_terminal

    def _write(self, text: str) -> None:
        with _may_be_gone():
            self._stream.write(text)
            self._stream.flush()
