"""Work is counted while it runs alone and next to other work."""

import threading
import time
from collections.abc import Callable

import pytest

from fuyou.planner.profiling import contention
from fuyou.planner.profiling.contention import RepeatedCall, measure_contention, pieces_per_second
from fuyou.schedule.tasks import Resource


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contention, "WINDOW_SECONDS", 0.1)
    monkeypatch.setattr(contention, "WARM_SECONDS", 0.02)


def taking_turns(lock: threading.Lock, seconds: float) -> Callable[[], None]:
    """Work of this length of which only one piece continues at a time."""

    def work() -> None:
        with lock:
            time.sleep(seconds)
        time.sleep(0)  # or the other one would not get the lock

    return work


def test_what_shares_nothing_keeps_its_speed_and_what_takes_turns_loses_half() -> None:
    apart = {
        Resource.GPU: RepeatedCall(lambda: time.sleep(0.005)),
        Resource.ADAM: RepeatedCall(lambda: time.sleep(0.01)),
        Resource.SSD: RepeatedCall(lambda: time.sleep(0.004)),
    }
    alone, contention = measure_contention(apart)
    assert alone[Resource.GPU] > 1.2 * alone[Resource.ADAM]
    assert len(contention.speeds) == 4
    assert all(0.3 < speed <= 1 for speeds in contention.speeds.values() for speed in speeds.values())
    lock = threading.Lock()
    shared = {one: RepeatedCall(taking_turns(lock, 0.005)) for one in (Resource.GPU, Resource.ADAM)}
    _, contention = measure_contention(shared)
    (speeds,) = contention.speeds.values()
    assert sum(speeds.values()) < 1.6


def test_work_that_fails_is_reported_at_once_and_the_other_work_ends() -> None:
    def fail() -> None:
        raise ValueError("no room")

    other = RepeatedCall(lambda: time.sleep(0.005))
    began = time.monotonic()
    with pytest.raises(ValueError, match="no room"):
        pieces_per_second([other, RepeatedCall(fail)])
    assert time.monotonic() - began < 60
    done = len(other.ends)
    time.sleep(0.05)
    assert len(other.ends) == done
