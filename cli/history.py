"""What every step gave, one JSON line each, in the output directory: to plot, and to compare runs by."""

import json
from pathlib import Path
from types import TracebackType

HISTORY_FILE = "losses.jsonl"


class History:
    """Appends to ``losses.jsonl``; what is in it beyond ``committed`` belongs to steps that were lost, and goes.

    Args:
        directory: where the file is.
        committed: steps that the run has behind it; 0 begins a new file.
    """

    def __init__(self, directory: Path, committed: int) -> None:
        path = directory / HISTORY_FILE
        kept = [line for line in _lines(path) if _step(line) <= committed] if committed else []
        beside = path.with_suffix(".tmp")
        beside.write_text("".join(f"{line}\n" for line in kept))
        beside.replace(path)
        self._file = path.open("a", buffering=1)

    def append(self, step: int, loss: float, grad_norm: float, lr: float) -> None:
        """Add a step; it is with the system when this returns."""
        self._file.write(json.dumps({"step": step, "loss": loss, "grad_norm": grad_norm, "lr": lr}) + "\n")

    def __enter__(self) -> "History":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _step(line: str) -> float:
    """The step of a line; infinity for one that a crash has cut off."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
