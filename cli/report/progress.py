"""One line that says how the run is doing: drawn over and over on a terminal, written out now and then elsewhere."""

import sys
from collections import deque
from statistics import median

from tqdm import tqdm

from cli.report.results import StepMetrics
from common.units import format_seconds

_RECENT = 20  # Steps whose median duration tells the time that is left


class Progress:
    """Progress shows steps as they are done: on standard error if that is a terminal, else line by line on standard
    output.

    Args:
        total: steps of the whole run.
        done: steps that are behind it.
        every: steps from one line to the next, where there is no terminal; the last step always has one.
        quiet: whether no step is shown at all.
    """

    def __init__(self, total: int, done: int, every: int = 1, quiet: bool = False) -> None:
        self._total, self._every, self._quiet = total, every, quiet
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._bar = None
        if sys.stderr.isatty() and not quiet:
            self._bar = tqdm(total=total, initial=done, dynamic_ncols=True, bar_format="{desc}{postfix}")

    def show(self, metrics: StepMetrics) -> None:
        """Show a step that is done."""
        self._recent.append(metrics.seconds)
        left = (self._total - metrics.step) * median(self._recent)  # evaluations and checkpoints delay a few steps
        ends = [f"{format_seconds(left)} left"] if metrics.step < self._total else []
        line = ", ".join([f"step {metrics.step}/{self._total}: {metrics}", *ends])
        if self._bar is not None:
            self._bar.set_description_str(line, refresh=False)
            self._bar.update()
        elif not self._quiet and (metrics.step % self._every == 0 or metrics.step == self._total):
            print(line, flush=True)

    def say(self, text: str) -> None:
        """Show text on a line of its own."""
        if self._bar is None:
            print(text, flush=True)
        else:
            self._bar.write(text, file=sys.stderr)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()
