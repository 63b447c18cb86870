"""Kills and power cuts of two ranks, at calls drawn from a whole run; tests/crash/all_points.py tries every one."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.crash.cluster import ClusterRun, crash, make_model
from tests.helpers.crash.drives import Fault
from tests.helpers.crash.points import ENDINGS, Reference, reference
from tests.helpers.crash.runs import execute

Begun = tuple[dict[str, Any], Reference]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Begun:
    """Options, and the run that nothing happens to."""
    folder = tmp_path_factory.mktemp("ranks")
    options = {"model": make_model(folder / "model")}
    return options, reference(ClusterRun(folder / "undisturbed", options))


def test_a_crash_at_any_call_loses_no_commit(begun: Begun, tmp_path: Path) -> None:
    options, expected = begun
    draw = random.Random(5)
    faults = [(Fault(draw.randrange(1, expected.calls + 1), action), power) for action, power in ENDINGS[1:]]
    faults.append((Fault(draw.randrange(1, 9), "kill all", kind="rename"), True))

    def attempt(number: int) -> bool:
        fault, power = faults[number]
        return crash(
            ClusterRun(tmp_path / str(number), options, fault=fault), expected, number if power else None
        )

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(attempt, range(len(faults))))


def test_a_full_file_system_is_reported_by_all_ranks_and_the_run_continues(
    begun: Begun, tmp_path: Path
) -> None:
    options, expected = begun
    full = execute(ClusterRun(tmp_path / "run", options, fault=Fault(90, "enospc", "write", forever=True)))
    assert full.status == 1 and full.expected_error and "No space left on device" in full.error, full.error
    assert list(full.losses) == [1]
    again = execute(ClusterRun(tmp_path / "run", {**options, "resume": True}))
    assert (again.status, again.final) == (0, expected.outcome.final), again.error
