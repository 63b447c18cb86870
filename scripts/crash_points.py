"""Kill a small training run at every single call that it makes to its drives, continue it, and compare bit for bit.

For each way of training, every call is tried in four ways: engine and optimizer process are killed before it; only the
process that makes it is killed; it is torn in half, and the power goes; the power goes before it. A power cut keeps
any subset of what no sync had covered, drawn anew for each point. The same is done to a run whose records move to more
or to fewer drives, where every other one is first tried on its old drives again. What must hold afterwards:
``tests/crash/points.py``.

All of it takes an hour of two cores, and can be done in pieces: with ``--log``, what that file lists is not done again.
Each call is tried in one of the four ways first, then each in the next.

    python scripts/crash_points.py --workers 3 --log points.log --seconds 250
"""

import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.crash.drives import Fault
from tests.crash.points import Move, crash, crash_move, move_reference, reference
from tests.crash.runs import Run

#: Ways of training, by the options of the engine.
WAYS: dict[str, dict[str, Any]] = {
    "states in host memory": {},
    "everything streamed": {"host_cache": 0},
    "clipping (all updates deferred)": {"max_grad_norm": 0.5},
    "clipping (two steps of three updated again)": {
        "max_grad_norm": 1.55,
        "clip_by": "speculation",
        "host_cache": 0,
    },
    "half of the updates deferred": {"deferred_fraction": 0.5, "host_cache": 0},
    "commit every 2 steps": {"commit_every": 2},
    "fp32": {"dtype": "fp32", "host_cache": 0},
}
#: Ways of moving.
MOVES = {
    "one drive more": Move((0, 1), (0, 1, 2)),
    "one drive fewer": Move((0, 1, 2), (1, 2)),
    "other drives": Move((0, 1), (2,)),
}
#: What happens at a call: action, and whether the power goes as well.
ENDINGS = (("kill all", False), ("kill self", False), ("tear", True), ("kill all", True))

Attempt = Callable[[Path, int, str, bool], bool]
"""One crash, in a directory to be made: at a call, by an action, with a power cut or without."""


class Log:
    """What has been tried, and what came of it: a line for each crash.

    Args:
        file: keeps it from one call of this script to the next; None: nothing does.
    """

    def __init__(self, file: Path | None):
        self._file, self._found = file, dict[str, str]()
        for line in file.read_text().splitlines() if file is not None and file.exists() else []:
            crash, _, outcome = line.partition(": ")
            self._found[crash] = outcome

    def __contains__(self, crash: str) -> bool:
        return crash in self._found

    def add(self, crash: str, outcome: str) -> None:
        """``outcome``: ``held``, ``not reached``, or what did not hold."""
        self._found[crash] = outcome = outcome.replace("\n", " ")
        if self._file is not None:
            with self._file.open("a") as file:
                file.write(f"{crash}: {outcome}\n")

    def describe(self, way: str) -> str:
        """The outcomes of all crashes in a way of training or moving."""
        tried = {crash: outcome for crash, outcome in self._found.items() if crash.startswith(f"{way}, ")}
        calls = len({crash.split(", ")[1] for crash in tried})
        held, late = (list(tried.values()).count(outcome) for outcome in ("held", "not reached"))
        return (
            f"{len(tried)} crashes tried at {calls} calls: {held} held, {late} came after the run's end, "
            f"{len(tried) - held - late} failures"
        )

    def failures(self) -> list[str]:
        return [
            f"{crash}: {outcome}" for crash, outcome in self._found.items() if outcome not in ("held", "not reached")
        ]


@click.command()
@click.option("--workers", default=2, show_default=True, help="Runs at once.")
@click.option("--every", default=1, show_default=True, help="Try every N-th call only.")
@click.option("--first", default=1, show_default=True, help="Begin with this call: with --every, another subset.")
@click.option("--way", type=click.Choice([*MOVES, *WAYS]), multiple=True, help="Only these ways of training or moving.")
@click.option("--log", type=click.Path(dir_okay=False, path_type=Path), help="What was tried; goes on after that.")
@click.option("--seconds", type=float, default=float("inf"), help="Begin no crash after this time.")
@click.option("--directory", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Default: temporary.")
def main(
    workers: int, every: int, first: int, way: tuple[str, ...], log: Path | None, seconds: float, directory: Path | None
) -> None:
    """Print points tried and failures; exit with 1 if there was one, with 3 if some are left to be tried."""
    end, tried, left = time.monotonic() + seconds, Log(log), 0
    ways = way or (*MOVES, *WAYS)
    with tempfile.TemporaryDirectory(prefix="crash-points-", dir=directory) as place:
        references = {name: _reference(name, Path(place)) for name in ways}
        for turn in range(len(ENDINGS)):
            for name in ways:
                jobs = _jobs(references[name], first, every, turn)
                with ThreadPoolExecutor(workers) as pool:
                    done = pool.map(partial(_attempt, name, Path(place), references[name], tried, end), jobs)
                    left += len(jobs) - sum(done)
    for name in ways:
        print(f"{name}: {references[name].calls} calls; {tried.describe(name)}")
    for text in tried.failures():
        print(f"  {text}")
    sys.exit(1 if tried.failures() else 3 if left else 0)


@dataclass(frozen=True)
class Way:
    """One way of training, or of moving."""

    calls: int
    """That it makes to its drives."""
    attempt: Attempt
    endings: tuple[tuple[str, bool], ...] = ENDINGS


def _reference(name: str, folder: Path) -> Way:
    """Train, or move, without a crash."""
    if name in WAYS:
        trained, options = reference(Run(folder / "undisturbed", WAYS[name])), WAYS[name]

        def crash_training(root: Path, number: int, action: str, power: bool) -> bool:
            return crash(Run(root, options, fault=Fault(number, action)), trained, number if power else None)

        return Way(trained.calls, crash_training)
    moved, move = move_reference(folder / name, MOVES[name]), MOVES[name]

    def crash_moving(root: Path, number: int, action: str, power: bool) -> bool:
        return crash_move(root, move, Fault(number, action), moved, number if power else None, number % 2 == 0)

    # One process makes all calls.
    return Way(moved.calls, crash_moving, tuple(ending for ending in ENDINGS if ending[0] != "kill self"))


def _jobs(way: Way, first: int, every: int, turn: int) -> list[tuple[int, str, bool]]:
    """The crashes of a turn: in each, another ending for each call."""
    count = len(way.endings)
    numbers = range(first, way.calls + 1, every) if turn < count else ()
    return [(number, *way.endings[(number + turn) % count]) for number in numbers]


def _attempt(name: str, folder: Path, way: Way, tried: Log, end: float, job: tuple[int, str, bool]) -> bool:
    """One crash, unless it was tried before or there is no time. Returns whether it is done."""
    number, action, power = job
    crash = f"{name}, call {number}, {action}{', power cut' if power else ''}"
    if crash in tried:
        return True
    if time.monotonic() > end:
        return False
    try:
        came = way.attempt(folder / f"{name}-{number}-{action.replace(' ', '-')}-{power}", number, action, power)
    except AssertionError as error:
        tried.add(crash, str(error))
    else:
        tried.add(crash, "held" if came else "not reached")
    return True


if __name__ == "__main__":
    main()
