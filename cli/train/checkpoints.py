"""Checkpoints on the way: every N steps the newest few, and the best one by the loss on held-out data."""

import json
import math
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

FOLDER, BEST = "checkpoints", "best"
_STEP = "step-"
_PARTIAL = ".partial"  # End of a folder's name until everything is in it


@dataclass
class BestEvaluation:
    """The lowest loss on held-out data so far, and how long ago that was. The same on all ranks."""

    loss: float = math.inf
    step: int = 0
    since: int = 0  # Evaluations since then, none of which was better

    @classmethod
    def of_history(cls, metrics: Path, done: int) -> "BestEvaluation":
        """Return what evaluations up to step ``done`` have found, from the run's own file."""
        best = cls()
        lines: Iterable[str] = metrics.read_text(errors="replace").splitlines() if done and metrics.exists() else ()
        for line in lines:
            try:
                entry = json.loads(line)
                step, loss = int(entry["step"]), entry.get("validation_metrics/loss")
            except (ValueError, KeyError, TypeError):  # cut off by a crash
                continue
            if loss is not None and step <= done:
                best.take(step, float(loss))
        return best

    def take(self, step: int, loss: float) -> bool:
        """Take in an evaluation; return whether it is the best so far."""
        if loss < self.loss:
            self.loss, self.step, self.since = loss, step, 0
            return True
        self.since += 1
        return False


class Checkpoints:
    """Checkpoints writes exported models next to the result, each whole or not at all.

    Args:
        output: output directory of the run.
        keep: how many of the regular ones stay.
        is_rank0: whether this process renames and removes; all ranks export together.
        export: writes the model to a directory; collective.
    """

    def __init__(self, output: Path, keep: int, is_rank0: bool, export: Callable[[Path], None]) -> None:
        self.folder = output / FOLDER
        self._keep, self._is_rank0, self._export = keep, is_rank0, export

    def save(self, step: int) -> Path:
        """Write the checkpoint of a step, the last one, and remove the oldest beyond those to keep."""
        path = self._write(f"{_STEP}{step}")
        if self._is_rank0:
            for old in self.regular()[: -self._keep]:
                shutil.rmtree(old)
        return path

    def save_best(self, step: int, loss: float) -> Path:
        """Write the checkpoint of a step, the last one, as the best one, with the step and its loss next to it."""
        path = self._write(BEST)
        if self._is_rank0:
            (path / "evaluation.json").write_text(json.dumps({"step": step, "loss": loss}) + "\n")
        return path

    def regular(self) -> list[Path]:
        """Return the checkpoints of every N steps, the oldest first."""
        found = [path for path in self.folder.glob(f"{_STEP}*") if path.name.removeprefix(_STEP).isdigit()]
        return sorted(found, key=lambda path: int(path.name.removeprefix(_STEP)))

    def _write(self, name: str) -> Path:
        path, partial = self.folder / name, self.folder / f"{name}{_PARTIAL}"
        if self._is_rank0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        self._export(partial)
        if self._is_rank0:
            shutil.rmtree(path, ignore_errors=True)
            partial.rename(path)
        return path
