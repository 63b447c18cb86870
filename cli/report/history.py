"""A file with one JSON line for each step, to plot and to compare runs by."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

from common.files.atomic import replace_file
from common.store.errors import described

# File in the output directory with what was learnt, which is the same whenever the run is repeated.
HISTORY_FILE = "losses.jsonl"


class History:
    """A history appends to a file, from which lines of steps that were lost are removed first.

    Args:
        path: the file.
        committed: steps that the run has behind it: later lines are removed. 0 begins a new file.

    Raises:
        StoreError: the system refused.
    """

    def __init__(self, path: Path, committed: int) -> None:
        kept = [line for line in _lines(path) if _step(line) <= committed] if committed else []
        self._path = path
        with described("writing", path):
            replace_file(path, "".join(f"{line}\n" for line in kept))
            self._file = path.open("a", buffering=1)

    def append(self, step: int, values: Mapping[str, float]) -> None:
        """Append the values of a step; null stands for what is not finite, for which JSON has no number.

        They are with the operating system when this returns.

        Raises:
            StoreError: the system refused.
        """
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        with described("writing", self._path):
            self._file.write(json.dumps({"step": step, **finite}) + "\n")

    def __enter__(self) -> "History":
        return self

    def __exit__(self, *exception: object) -> None:
        with described("writing", self._path):
            self._file.close()


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def _step(line: str) -> float:
    """Return the step of a line; infinity for a line that a crash has cut off, or that is damaged."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return float("inf")
