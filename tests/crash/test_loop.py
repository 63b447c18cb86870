"""A short run of tests/crash/loop.py, with a seed: real kills at random moments."""

from pathlib import Path

import pytest

from tests.crash import loop as crash_loop
from tests.crash.loop import Loop


@pytest.mark.slow
def test_random_kills_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crash_loop, "STEPS", 5)
    loop = Loop(tmp_path, seed=3)
    while loop.tally.kills.total() < 2 and loop.tally.runs.total() < 12:  # now and then a run comes through
        loop.run()
    assert loop.tally.mismatches == []
    assert loop.tally.kills.total() >= 2
