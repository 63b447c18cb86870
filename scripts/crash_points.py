"""Kill a small training run at every single call that it makes to its drives, continue it, and compare bit for bit.

For each way of training, every call is tried in four ways: engine and optimizer process are killed before it; only the
process that makes it is killed; it is torn in half, and the power goes; the power goes before it. A power cut keeps
any subset of what no sync had covered, drawn anew for each point. The same is done to a run whose records move to more
or to fewer drives, where every other one is first tried on its old drives again. What must hold afterwards:
``tests/crash/points.py``.

All of it takes an hour of two cores, and can be done in pieces: with ``--log``, what that file lists is not done again.

    python scripts/crash_points.py --workers 3 --log points.log --seconds 250
"""

import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.crash.drives import Fault
from tests.crash.points import Move, crash, crash_move, move_reference, reference

#: Ways of training, by the options of the engine.
WAYS: dict[str, dict[str, Any]] = {
    "states in host memory": {},
    "everything streamed": {"host_cache": 0},
    "clipping (all updates deferred)": {"max_grad_norm": 0.5},
    "clipping (two steps of three updated again)": {
        "max_grad_norm": 1.55, "clip_by": "speculation", "host_cache": 0,
    },
    "half of the updates deferred": {"deferred_fraction": 0.5, "host_cache": 0},
    "commit every 2 steps": {"commit_every": 2},
    "fp32": {"dtype": "fp32", "host_cache": 0},
}  # fmt: skip
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

    def of(self, way: str) -> list[str]:
        """The outcomes of all crashes in a way of training or moving."""
        return [outcome for crash, outcome in self._found.items() if crash.startswith(f"{way}, ")]

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
    with tempfile.TemporaryDirectory(prefix="crash-points-", dir=directory) as folder:
        for name in way or (*MOVES, *WAYS):
            if time.monotonic() > end:
                left += 1
                break
            left += _try_way(name, Path(folder), workers, range(first, 1 << 30, every), tried, end)
    for text in tried.failures():
        print(f"  {text}")
    sys.exit(1 if tried.failures() else 3 if left else 0)


def _try_way(name: str, folder: Path, workers: int, points: range, tried: Log, end: float) -> int:
    """Returns how many crashes are left to be tried."""
    calls, attempt, endings = _moving(name, folder) if name in MOVES else _training(name, folder)
    numbers = points[: -(-(calls + 1 - points.start) // points.step)]
    jobs = [(number, action, power) for number in numbers for action, power in endings]
    with ThreadPoolExecutor(workers) as pool:
        done = sum(pool.map(partial(_attempt, name, folder, attempt, tried, end), jobs))
    outcomes = tried.of(name)
    held, late = outcomes.count("held"), outcomes.count("not reached")
    print(
        f"{name}: {done} of {len(jobs)} crashes at {len(numbers)} of {calls} calls: {held} held, {late} came after "
        f"the end, {len(outcomes) - held - late} failures",
        flush=True,
    )
    return len(jobs) - done


def _training(name: str, folder: Path) -> tuple[int, Attempt, tuple[tuple[str, bool], ...]]:
    """Calls that a run makes, how to disturb one, and how it may end."""
    options = WAYS[name]
    expected = reference(folder / "undisturbed", options)

    def attempt(root: Path, number: int, action: str, power: bool) -> bool:
        return crash(root, options, Fault(number, action), expected, power=number if power else None)

    return expected.calls, attempt, ENDINGS


def _moving(name: str, folder: Path) -> tuple[int, Attempt, tuple[tuple[str, bool], ...]]:
    move = MOVES[name]
    expected = move_reference(folder / name, move)

    def attempt(root: Path, number: int, action: str, power: bool) -> bool:
        return crash_move(root, move, Fault(number, action), expected, number if power else None, number % 2 == 0)

    # One process makes all calls.
    return expected.calls, attempt, tuple(ending for ending in ENDINGS if ending[0] != "kill self")


def _attempt(name: str, folder: Path, attempt: Attempt, tried: Log, end: float, job: tuple[int, str, bool]) -> bool:
    """One crash, unless it was tried before or there is no time. Returns whether it is done."""
    number, action, power = job
    crash = f"{name}, call {number}, {action}{', power cut' if power else ''}"
    if crash in tried:
        return True
    if time.monotonic() > end:
        return False
    try:
        came = attempt(folder / f"{number}-{action.replace(' ', '-')}-{power}", number, action, power)
    except AssertionError as error:
        tried.add(crash, str(error))
    else:
        tried.add(crash, "held" if came else "not reached")
    return True


if __name__ == "__main__":
    main()
