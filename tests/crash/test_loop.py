"""A short run of scripts/crash_loop.py, with a seed: real kills at random moments."""

from pathlib import Path

import pytest

from scripts import crash_loop
from scripts.crash_loop import Loop


def test_random_kills_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crash_loop, "STEPS", 5)
    loop = Loop(tmp_path, seed=3)
    while loop.tally.kills.total() < 2 and loop.tally.runs.total() < 12:  # now and then a run comes through
        loop.run()
    assert loop.tally.mismatches == []
    assert loop.tally.kills.total() >= 2
