"""Kill a small training run at every single call that it makes to its drives, continue it, and compare bit for bit.

For each way of training, every call is tried in four ways: engine and optimizer process are killed before it; only the
process that makes it is killed; it is torn in half, and the power goes; the power goes before it. A power cut keeps
any subset of what no sync had covered, drawn anew for each point. What must hold afterwards: ``tests/crash/points.py``.

    python scripts/crash_points.py --workers 3
"""

import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.crash.drives import Fault
from tests.crash.points import Reference, crash, reference

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
#: What happens at a call: action, and whether the power goes as well.
ENDINGS = (("kill all", False), ("kill self", False), ("tear", True), ("kill all", True))


@click.command()
@click.option("--workers", default=2, show_default=True, help="Runs at once.")
@click.option("--every", default=1, show_default=True, help="Try every N-th call only.")
@click.option("--first", default=1, show_default=True, help="Begin with this call: with --every, another subset.")
@click.option("--way", type=click.Choice(list(WAYS)), multiple=True, help="Only these ways of training.")
@click.option("--directory", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Default: temporary.")
def main(workers: int, every: int, first: int, way: tuple[str, ...], directory: Path | None) -> None:
    """Print points tried and failures; exit with 1 if there was one."""
    failures = 0
    with tempfile.TemporaryDirectory(prefix="crash-points-", dir=directory) as folder:
        for name in way or WAYS:
            failures += _try_way(name, Path(folder), workers, every, first)
    sys.exit(1 if failures else 0)


def _try_way(name: str, folder: Path, workers: int, every: int, first: int) -> int:
    began = time.monotonic()
    expected = reference(folder / "undisturbed", WAYS[name])
    points = range(first, expected.calls + 1, every)
    jobs = [(number, action, power) for number in points for action, power in ENDINGS]

    def attempt(job: tuple[int, str, bool]) -> str | None:
        return _attempt(folder, WAYS[name], expected, *job)

    with ThreadPoolExecutor(workers) as pool:
        failed = [text for text in pool.map(attempt, jobs) if text is not None]
    print(
        f"{name}: {len(points)} of {expected.calls} calls, {len(jobs)} crashes, {len(failed)} failures, "
        f"{time.monotonic() - began:.0f} s",
        flush=True,
    )
    for text in failed:
        print(f"  {text}", flush=True)
    return len(failed)


def _attempt(
    folder: Path, options: dict[str, Any], expected: Reference, number: int, action: str, power: bool
) -> str | None:
    """One crash; None if all held, else what did not."""
    root = folder / f"{number}-{action.replace(' ', '-')}-{power}"
    try:
        crash(root, options, Fault(number, action), expected, power=number if power else None)
    except AssertionError as error:
        return f"call {number}, {action}{', power cut' if power else ''}: {error}"
    return None


if __name__ == "__main__":
    main()
