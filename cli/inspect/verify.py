"""``finetune --verify DIR...``: whether what runs have on their drives is what was written there."""

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from cli.options.settings import COMMITS
from common.units import format_bytes
from fuyou.checkpoint.verify import find_runs, verify_run


def run_verify(places: Sequence[str]) -> int:
    """Look at all runs in ``places``. Returns the exit status: 1 if anything is damaged."""
    status = 0
    began = time.monotonic()
    for where, step, parts, nbytes, damage in _look([Path(place).expanduser() for place in places]):
        result = f"{len(damage)} damaged" if damage else "all as written"
        print(
            f"verify   {where}: step {step:,}, {parts}, {format_bytes(nbytes)} in {time.monotonic() - began:.1f} s: "
            f"{result}",
            flush=True,
        )
        for sentence in damage:
            status = 1
            print(f"finetune: error: {sentence}", file=sys.stderr)
        began = time.monotonic()
    return status


def _look(places: Sequence[Path]) -> Iterator[tuple[str, int, str, int, list[str]]]:
    """Where each run is, its committed step, what was read of it, how much that was, and what is damaged."""
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
