"""One line that says how the run is doing: drawn over and over on a terminal, written out once per step elsewhere."""

import sys

from tqdm import tqdm

from cli.report.results import StepMetrics


class Progress:
    """Progress shows steps as they are done: on standard error if that is a terminal, else line by line on standard
    output.

    Args:
        total: steps of the whole run.
        done: steps that are behind it.
    """

    def __init__(self, total: int, done: int) -> None:
        self._total = total
        self._bar = None
        if sys.stderr.isatty():
            layout = "step {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}"
            self._bar = tqdm(total=total, initial=done, dynamic_ncols=True, bar_format=layout)

    def show(self, metrics: StepMetrics) -> None:
        """Show a step that is done."""
        if self._bar is None:
            print(f"step {metrics.step}/{self._total}: {metrics}", flush=True)
            return
        self._bar.set_postfix_str(str(metrics), refresh=False)
        self._bar.update()

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
