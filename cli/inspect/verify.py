"""``finetune --verify DIR...``: whether what runs have on their drives is what was written there."""

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from cli.options.settings import COMMITS
from common.units import format_bytes
from fuyou.checkpoint.verify import find_runs, verify_run


def run_verify(places: Sequence[str]) -> int:
    """Verify all runs in ``places``, and print what was found.

    Returns:
        The exit status: 1 if anything is damaged.
    """
    status = 0
    start_time = time.monotonic()
    for where, step, parts, nbytes, damage in _verify([Path(place).expanduser() for place in places]):
        result = f"{len(damage)} damaged" if damage else "all as written"
        seconds = time.monotonic() - start_time
        print(
            f"verify   {where}: step {step:,}, {parts}, {format_bytes(nbytes)} in {seconds:.1f} s: {result}", flush=True
        )
        for sentence in damage:
            status = 1
            print(f"finetune: error: {sentence}", file=sys.stderr)
        start_time = time.monotonic()
    return status


def _verify(places: Sequence[Path]) -> Iterator[tuple[str, int, str, int, list[str]]]:
    """Yield where each run is, its committed step, what and how many bytes of it were read, and what is damaged."""
    from fcdp.checkpoint.commits import ShardedCheckpoints, has_commits

    commits = {place: [each for each in (place, place / COMMITS) if has_commits(each)] for place in places}
    stores = find_runs(places, [place for place, found in commits.items() if found])
    for directory in dict.fromkeys(each for found in commits.values() for each in found):
        checked = ShardedCheckpoints(directory).verify()
        yield str(directory), checked.step, f"{checked.parts:,} parts of tensors", checked.nbytes, checked.damage
    for directories in stores:
        seen = verify_run(directories)
        where = ", ".join(map(str, seen.directories))
        yield where, seen.step, f"{seen.records:,} parts of records", seen.nbytes, seen.damage
