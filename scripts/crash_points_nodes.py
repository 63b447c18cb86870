"""Kill nodes that train out of core together, at every single call to their drives; continue, compare bit for bit.

Stories: two nodes from their first weights through three steps, all commits included; and a run of two nodes that goes
on with one, of one that goes on with two, from the first look at the drives to the last commit. Every call is tried in
four ways: all processes are killed before it; only the one that makes it is; it is torn in half and the power goes; the
power goes before it. What must hold afterwards: ``tests/crash/ranks.py``.

    python scripts/crash_points_nodes.py --workers 3 --every 5
"""

import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.crash.drives import Fault
from tests.crash.points import Reference
from tests.crash.ranks import ENDINGS, STORIES, crash, reference


@click.command()
@click.option("--workers", default=2, show_default=True, help="Runs at once.")
@click.option(
    "--every", default=1, show_default=True, help="Try every N-th call only, each in one of the ways in turn."
)
@click.option("--first", default=1, show_default=True, help="Begin with this call: with --every, another subset.")
@click.option("--story", type=click.Choice(list(STORIES)), multiple=True, help="Only these.")
@click.option("--seconds", type=float, help="Begin no crash after so long, and say how far it came.")
@click.option("--directory", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Default: temporary.")
def main(
    workers: int, every: int, first: int, story: tuple[str, ...], seconds: float | None, directory: Path | None
) -> None:
    """Print crashes tried and failures; exit with 1 if there was one."""
    failures, end = 0, time.monotonic() + (seconds or float("inf"))
    with tempfile.TemporaryDirectory(prefix="crash-nodes-", dir=directory) as folder:
        for name in story or STORIES:
            failures += _try(name, Path(folder), workers, every, first, end)
    sys.exit(1 if failures else 0)


def _try(name: str, folder: Path, workers: int, every: int, first: int, end: float) -> int:
    began = time.monotonic()
    expected = reference(folder / "undisturbed", STORIES[name])
    points = range(first, expected.calls + 1, every)
    jobs = [
        (number, *ENDINGS[way]) for turn, number in enumerate(points)
        for way in (range(len(ENDINGS)) if every == 1 else [turn % len(ENDINGS)])
    ]  # fmt: skip

    def attempt(job: tuple[int, str, bool]) -> str | None:
        return "" if time.monotonic() > end else _attempt(name, folder, expected, *job)

    with ThreadPoolExecutor(workers) as pool:
        told = list(pool.map(attempt, jobs))
    failed, left = [text for text in told if text], told.count("")
    print(
        f"{name}: {len(points)} of {expected.calls} calls, {len(jobs) - left} crashes"
        f"{f' ({left} more not tried)' if left else ''}, {len(failed)} failures, {time.monotonic() - began:.0f} s",
        flush=True,
    )
    for text in failed:
        print(f"  {text}", flush=True)
    return len(failed)


def _attempt(name: str, folder: Path, expected: Reference, number: int, action: str, power: bool) -> str | None:
    """One crash; None if all held, else what did not."""
    root = folder / f"{list(STORIES).index(name)}-{number}-{action.replace(' ', '-')}-{power}"
    try:
        crash(root, STORIES[name], Fault(number, action), expected, power=number if power else None)
    except AssertionError as error:
        return f"call {number}, {action}{', power cut' if power else ''}: {error}"
    return None


if __name__ == "__main__":
    main()
