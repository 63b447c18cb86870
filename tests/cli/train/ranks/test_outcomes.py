"""What ranks tell their launcher, and that nothing of it is in any directory."""

import subprocess
import sys
from pathlib import Path

import pytest

from cli.train.ranks.outcomes import Outcome, OwnOutcome, RankOutcomes

RANK = "from cli.train.ranks.outcomes import *; own = OwnOutcome(); own.leave(Outcome(2, f'start {own.restarts}'))"


def test_only_the_outcome_of_the_last_start_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    with RankOutcomes(3) as outcomes:
        for name, value in outcomes.variables.items():
            monkeypatch.setenv(name, value)
        assert not outcomes.read()
        monkeypatch.setenv("LOCAL_RANK", "1")
        for _ in range(2):
            subprocess.run([sys.executable, "-c", RANK], cwd=Path(__file__).parents[4], check=True)
        assert outcomes.read() == [Outcome(2, "start 1")]
        monkeypatch.setenv("LOCAL_RANK", "2")
        OwnOutcome().leave(Outcome(0))
        assert outcomes.read() == [Outcome(2, "start 1"), Outcome(0)]
        monkeypatch.setenv("LOCAL_RANK", "1")
        again = OwnOutcome()
        assert again.restarts == 2 and outcomes.read() == [Outcome(0)]
