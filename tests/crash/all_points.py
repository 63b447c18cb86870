"""Kill a small run at every single call that it makes to its drives, continue it, and compare bit for bit.

For each way of running (``tests/helpers/crash/ways.py``: one machine, records that move to other drives, ranks in host
memory, nodes out of core that become more or fewer), every call is tried in four ways: all processes are killed before
it; only the process that makes it is killed; it is torn in half, and the power goes; the power goes before it. A power
cut keeps any subset of what no sync had covered, drawn again for each point. What must hold afterwards:
``tests/helpers/crash/points.py`` and, for ranks, ``cluster.py`` and ``ranks.py`` next to it. The ways that begin with
"files" try every call outside the store, by which the command changes any other file (``outputs.py``).

All of it takes hours, and can be done in pieces: with ``--log``, what that file lists is not done again. Each call is
tried in one of the four ways first, then each in the next.

    python -m tests.crash.all_points --way training --workers 3 --log points.log --seconds 250
"""

import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import click

from tests.helpers.crash.ways import WAYS, Way

Crash = tuple[str, int, str]
"""Way of running, call, and what happens at it."""
HELD, LATE = "held", "came after the end"
_BETWEEN = " | "


class Log:
    """What has been tried, and what came of it: a line for each crash.

    Args:
        file: keeps it from one call of this script to the next; None: nothing does.
    """

    def __init__(self, file: Path | None):
        self._file, self._found = file, dict[Crash, str]()
        for line in file.read_text().splitlines() if file is not None and file.exists() else []:
            name, call, ending, outcome = line.split(_BETWEEN, 3)
            self._found[name, int(call), ending] = outcome

    def __contains__(self, crash: Crash) -> bool:
        return crash in self._found

    def add(self, crash: Crash, outcome: str) -> None:
        """``outcome``: :data:`HELD`, :data:`LATE`, or what did not hold."""
        self._found[crash] = outcome = " ".join(outcome.split())
        if self._file is not None:
            with self._file.open("a") as file:
                file.write(_line(crash, outcome) + "\n")

    def describe(self, name: str) -> str:
        """The outcomes of all crashes in a way of running."""
        tried = {crash: outcome for crash, outcome in self._found.items() if crash[0] == name}
        calls = len({number for _, number, _ in tried})
        held, late = (list(tried.values()).count(outcome) for outcome in (HELD, LATE))
        return (
            f"{len(tried)} crashes tried at {calls} calls: {held} held, {late} {LATE}, {len(tried) - held - late} "
            "failures"
        )

    def failures(self) -> list[str]:
        """A line for each, of all ways."""
        return [
            _line(crash, outcome) for crash, outcome in self._found.items() if outcome not in (HELD, LATE)
        ]


def _line(crash: Crash, outcome: str) -> str:
    return _BETWEEN.join((*map(str, crash), outcome))


def _ways(context: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> list[str]:
    """All whose names begin with one of the words; all that there are, for none."""
    for word in given:
        if not any(name.startswith(word) for name in WAYS):
            raise click.BadParameter(f"{word!r} begins none of: {', '.join(WAYS)}")
    return [name for name in WAYS if not given or name.startswith(given)]


@click.command()
@click.option("--workers", default=2, show_default=True, help="Runs at once.")
@click.option("--every", default=1, show_default=True, help="Try every N-th call only.")
@click.option(
    "--first", default=1, show_default=True, help="Begin with this call: with --every, another subset."
)
@click.option(
    "--way", "ways", multiple=True, callback=_ways, help="Only ways of running that begin with this word."
)
@click.option(
    "--log", type=click.Path(dir_okay=False, path_type=Path), help="What was tried; continues after that."
)
@click.option("--seconds", type=float, default=float("inf"), help="Begin no crash after this time.")
@click.option(
    "--directory", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Default: temporary."
)
def main(
    workers: int,
    every: int,
    first: int,
    ways: list[str],
    log: Path | None,
    seconds: float,
    directory: Path | None,
) -> None:
    """Print points tried and failures; exit with 1 if there was one, with 3 if some are left to be tried."""
    end, tried, left = time.monotonic() + seconds, Log(log), 0
    with tempfile.TemporaryDirectory(prefix="crash-points-", dir=directory) as place:
        folders = {name: Path(place) / str(number) for number, name in enumerate(ways)}
        found = {}
        for name, folder in folders.items():
            folder.mkdir()
            found[name] = WAYS[name](folder)
        for turn in range(max(len(way.endings) for way in found.values())):
            for name, way in found.items():
                attempt = partial(_attempt, name, folders[name], way, tried, end)
                jobs = _jobs(way, first, every, turn)
                with ThreadPoolExecutor(workers) as pool:
                    try:
                        left += len(jobs) - sum(pool.map(attempt, jobs))
                    except KeyboardInterrupt:
                        # Those in progress come to their end, and are logged
                        pool.shutdown(cancel_futures=True)
                        sys.exit(130)
    for name, way in found.items():
        print(f"{name}: {way.calls} calls; {tried.describe(name)}")
    for text in tried.failures():
        print(f"  {text}")
    sys.exit(1 if tried.failures() else 3 if left else 0)


def _jobs(way: Way, first: int, every: int, turn: int) -> list[tuple[int, str, bool]]:
    """The crashes of a turn: in each, another ending for each call."""
    count = len(way.endings)
    numbers = range(first, way.calls + 1, every) if turn < count else ()
    return [(number, *way.endings[(number + turn) % count]) for number in numbers]


def _attempt(name: str, folder: Path, way: Way, tried: Log, end: float, job: tuple[int, str, bool]) -> bool:
    """One crash, unless it was tried before or there is no time. Returns whether it is done."""
    number, action, power = job
    crash = name, number, f"{action}, power cut" if power else action
    if crash in tried:
        return True
    if time.monotonic() > end:
        return False
    try:
        came = way.attempt(folder / f"{number}-{action.replace(' ', '-')}-{power}", number, action, power)
    except AssertionError as error:
        tried.add(crash, str(error) or "an assertion failed")
    else:
        tried.add(crash, HELD if came else LATE)
    return True


if __name__ == "__main__":
    main()
