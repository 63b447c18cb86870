"""Kills and power cuts at calls spread over a whole run; tests/crash/all_points.py tries every one of them."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.helpers.crash.drives import Fault
from tests.helpers.crash.points import ENDINGS, Reference, crash, reference
from tests.helpers.crash.runs import Run
from tests.helpers.crash.ways import PIECES, WAYS

CLIPPED = {"max_grad_norm": 0.5, "host_cache": 0}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return reference(Run(tmp_path_factory.mktemp("undisturbed") / "run", CLIPPED))


@pytest.mark.parametrize(("action", "power"), ENDINGS[:3])
def test_a_crash_at_any_call_loses_at_most_the_step_in_flight(
    action: str, power: bool, expected: Reference, tmp_path: Path
) -> None:
    # Another residue each time, so that the three together see more of the calls.
    points = range(5 + 7 * len(action) % 13, expected.calls, 60)
    assert len(points) >= 4

    def attempt(number: int) -> bool:
        run = Run(tmp_path / str(number), CLIPPED, fault=Fault(number, action))
        return crash(run, expected, number if power else None)

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(attempt, points))


@pytest.mark.slow
def test_power_that_goes_right_after_a_commit(expected: Reference, tmp_path: Path) -> None:
    """The instants around each rename are where an order of syncs that is not quite right shows."""

    def attempt(number: int) -> bool:
        fault = Fault(number, "kill all", kind="rename")
        return crash(Run(tmp_path / str(number), CLIPPED, fault=fault), expected, number)

    with ThreadPoolExecutor(2) as pool:
        came = list(pool.map(attempt, range(6, 14)))
    assert came[0] and not came[-1]  # from before the first state is there to after the last step


def test_a_crash_while_drives_and_device_pass_host_memory(expected: Reference, tmp_path: Path) -> None:
    """The CPU plays the device. It ends as if everything had gone through host memory, and makes more calls."""
    options = {**CLIPPED, "io": "kvikio"}
    past = reference(Run(tmp_path / "run", options))
    assert past.outcome.final == expected.outcome.final
    assert past.calls > expected.calls
    points = [(number, ENDINGS[number % 4]) for number in range(50, past.calls, past.calls // 5)]

    def attempt(point: tuple[int, tuple[str, bool]]) -> bool:
        number, (action, power) = point
        run = Run(tmp_path / str(number), options, fault=Fault(number, action))
        return crash(run, past, number if power else None)

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(attempt, points))


def test_a_crash_while_a_clipped_step_is_updated_again(expected: Reference, tmp_path: Path) -> None:
    """Every step is clipped, so all is written twice before it counts; it ends as if it had been deferred."""
    options = {**CLIPPED, "clip_by": "speculation"}
    again = reference(Run(tmp_path / "run", options))
    assert again.outcome.final == expected.outcome.final
    assert again.calls > expected.calls
    points = [(number, ENDINGS[number % 4]) for number in range(50, again.calls, 61)]
    assert len(points) >= 4

    def attempt(point: tuple[int, tuple[str, bool]]) -> bool:
        number, (action, power) = point
        run = Run(tmp_path / str(number), options, fault=Fault(number, action))
        return crash(run, again, number if power else None)

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(attempt, points))


@pytest.mark.parametrize("way", [*(f"pieces: {name}" for name in PIECES), "training: rows in chunks"])
@pytest.mark.slow
def test_a_crash_of_blocks_in_pieces_or_rows_in_chunks(way: str, tmp_path: Path) -> None:
    found = WAYS[way](tmp_path)
    draw = random.Random(way)
    points = [(draw.randrange(1, found.calls + 1), *ENDINGS[turn]) for turn in (0, 2)]
    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(lambda point: found.attempt(tmp_path / str(point[0]), *point), points))
