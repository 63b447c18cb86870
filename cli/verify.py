"""``finetune --verify DIR...``: whether what runs have on their drives is what was written there."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from common.units import format_bytes
from fuyou.verify import find_runs, verify_run


def run_verify(places: Sequence[str]) -> int:
    """Look at all runs in ``places``. Returns the exit status: 1 if anything is damaged."""
    status = 0
    for directories in find_runs([Path(place).expanduser() for place in places]):
        began = time.monotonic()
        found = verify_run(directories)
        where = ", ".join(map(str, found.directories))
        result = f"{len(found.damage)} damaged" if found.damage else "all as written"
        print(
            f"verify   {where}: step {found.step:,}, {found.records:,} parts of records, "
            f"{format_bytes(found.nbytes)} in {time.monotonic() - began:.1f} s: {result}",
            flush=True,
        )
        for sentence in found.damage:
            status = 1
            print(f"finetune: error: {sentence}", file=sys.stderr)
    return status
