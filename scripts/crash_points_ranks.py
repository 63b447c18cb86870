"""Kill two ranks that train in host memory at every call to their file system, continue, and compare bit for bit.

As scripts/crash_points.py, with the commits that ``finetune --nodes`` makes without ``--ssd``. "kill self" ends only
the rank that makes the call; the other one has to notice.

    python scripts/crash_points_ranks.py --workers 3
"""

import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.crash.cluster import ENDINGS, ClusterRun, crash, make_model
from tests.crash.drives import Fault
from tests.crash.points import reference

#: States cut over both ranks; whole on each of them, which take turns in writing.
STRATEGIES = ("fcdp", "N/N/N")


@click.command()
@click.option("--workers", default=2, show_default=True, help="Runs at once.")
@click.option("--every", default=1, show_default=True, help="Try every N-th call only.")
@click.option("--first", default=1, show_default=True, help="Begin with this call: with --every, another subset.")
@click.option("--strategy", default=STRATEGIES[0], type=click.Choice(STRATEGIES), show_default=True)
@click.option("--directory", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Default: temporary.")
def main(workers: int, every: int, first: int, strategy: str, directory: Path | None) -> None:
    """Print points tried and failures; exit with 1 if there was one."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="crash-ranks-", dir=directory) as folder:
        root = Path(folder)
        options = {"model": make_model(root / "model"), "strategy": strategy}
        expected = reference(ClusterRun(root / "undisturbed", options))
        points = range(first, expected.calls + 1, every)
        jobs = [(number, action, power) for number in points for action, power in ENDINGS]

        def attempt(job: tuple[int, str, bool]) -> str | None:
            number, action, power = job
            place = root / f"{number}-{action.replace(' ', '-')}-{power}"
            try:
                run = ClusterRun(place, options, fault=Fault(number, action))
                crash(run, expected, number if power else None)
            except AssertionError as error:
                return f"call {number}, {action}{', power cut' if power else ''}: {error}"
            return None

        with ThreadPoolExecutor(workers) as pool:
            failed = [text for text in pool.map(attempt, jobs) if text is not None]
    print(
        f"{strategy}: {len(points)} of {expected.calls} calls, {len(jobs)} crashes, {len(failed)} failures, "
        f"{time.monotonic() - began:.0f} s"
    )
    for text in failed:
        print(f"  {text}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
