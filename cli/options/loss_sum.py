"""A hash over the losses of a run's steps, which each commit holds: it tells whether a file of losses is the run's.

An evaluation is made after the commit of its step, so its line has a hash of itself."""

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from common.files import check_regular

LOSSES = "losses"  # Key in the user state of a commit, and in the description of a run that is done
# Names of a step's loss in lines of either file
_LOSS = "loss"
_LOSS_IN_METRICS = "loss_metrics/global_avg_loss"
EVALUATION = "validation_metrics/loss"  # Name of the loss in a line of an evaluation
LINE_SUM = "checksum"  # Name of the hash of such a line, in it


@dataclass(frozen=True)
class LossSum:
    """The hash over the steps after ``since``, up to ``step``."""

    since: int
    step: int
    digest: str = ""

    @classmethod
    def committed(cls, user_state: Mapping[str, Any]) -> "LossSum | None":
        """Return what a commit has; None where an earlier version has written it."""
        with contextlib.suppress(KeyError, TypeError, ValueError):
            since, step, digest = user_state[LOSSES]
            return cls(int(since), int(step), str(digest))
        return None

    def put(self, user_state: dict[str, Any]) -> None:
        """Have the next commit hold the hash."""
        user_state[LOSSES] = list(astuple(self))

    def add(self, step: int, loss: float, grad_norm: float, lr: float) -> "LossSum":
        """Return the hash over one more step, as a line has it: null for what is not finite."""
        values = [value if math.isfinite(value) else None for value in (loss, grad_norm, lr)]
        return LossSum(self.since, step, _extended(self.digest, step, values))

    def fault(self, file: Path) -> str:
        """Return what is wrong with the lines that a file has for these steps, after its name; empty if nothing is."""
        lines = _lines(file)
        digest = ""
        for step in range(self.since + 1, self.step + 1):
            if step not in lines:
                return f"has no line for step {step:,}" if file.exists() else "is missing"
            digest = _extended(digest, step, lines[step])
        return "" if digest == self.digest else "has other losses than this run"

    def is_of_another(self, file: Path) -> bool:
        """Return whether a file has lines for all of these steps, with other losses."""
        return self.fault(file).startswith("has other")


def differing_steps(file: Path, other: Path) -> list[int]:
    """Return the steps of which two files have lines with other losses: a hash does not tell where lines are lost."""
    lines = _lines(file)
    others = _lines(other)
    return [step for step in lines if lines[step] != others.get(step, lines[step])]


def line_sum(line: Mapping[str, Any]) -> int:
    """Return a hash of what a line has besides it and times, as a number: that of a repeated run is the same."""
    content = {name: value for name, value in line.items() if name != LINE_SUM and "throughput" not in name}
    return int(hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12], 16)


def edited_lines(file: Path) -> list[int]:
    """Return the steps of evaluations whose newest lines are not what the run wrote; one that was cut off is none."""
    newest = dict[Any, dict[str, Any]]()
    for line in _parsed(file):
        # Earlier versions wrote no hash: none follows a line that has one
        if LINE_SUM in line or (newest and EVALUATION in line):
            newest[line.get("step")] = line
    return [
        step
        for step, line in newest.items()
        if isinstance(step, int) and line.get(LINE_SUM) != line_sum(line)
    ]


def evaluated_steps(file: Path) -> set[Any]:
    """Return the steps of which a file has an evaluation."""
    return {line.get("step") for line in _parsed(file) if EVALUATION in line}


def later_steps(file: Path, last: int) -> list[int]:
    """Return the steps after the ``last`` of a run of which a file has lines."""
    steps = [line.get("step") for line in _parsed(file)]
    return [step for step in steps if isinstance(step, int) and step > last]


def _extended(digest: str, step: int, values: list[Any]) -> str:
    return hashlib.sha256(json.dumps([digest, step, *values]).encode()).hexdigest()[:32]


def _lines(file: Path) -> dict[int, list[Any]]:
    """Return loss, norm, and learning rate of each step that has a line."""
    lines = dict[int, list[Any]]()
    for line in _parsed(file):
        with contextlib.suppress(TypeError, KeyError):
            loss = line[_LOSS] if _LOSS in line else line[_LOSS_IN_METRICS]
            lines[line["step"]] = [loss, line["grad_norm"], line["lr"]]
    return lines


def _parsed(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file that can be read."""
    with contextlib.suppress(OSError):
        check_regular(file)
        for text in file.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError, TypeError, RecursionError):
                yield dict(json.loads(text))
