"""Work is counted while it runs alone and next to other work."""

import pytest

from fuyou.planner.profiling.measure import RepeatedWork, measure_contention, pieces_per_second
from fuyou.schedule.tasks import Resource


class Machine:
    """A clock that only sleeping moves, and the loads that run meanwhile."""

    def __init__(self) -> None:
        self.now, self.running = 0.0, list[ScriptedLoad]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for load in self.running:
            load.continue_until(self.now)


class ScriptedLoad:
    """Work in pieces of this length, in seconds; of loads with one ``lock``, only one continues at a time."""

    failure = None

    def __init__(self, machine: Machine, seconds: float, lock: str = "") -> None:
        self.ends: list[float] = []
        self._machine, self._seconds, self._lock = machine, seconds, lock

    def start(self) -> None:
        self.ends, self._last = [], self._machine.now
        self._machine.running.append(self)

    def stop(self) -> None:
        self._machine.running.remove(self)

    def continue_until(self, now: float) -> None:
        sharers = sum(other is self or other._lock == self._lock != "" for other in self._machine.running)
        while (end := self._last + self._seconds * sharers) <= now:
            self.ends.append(end)
            self._last = end


def test_what_shares_nothing_keeps_its_speed_and_what_takes_turns_loses_half(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    monkeypatch.setattr("fuyou.planner.profiling.measure.time", machine)
    pieces = {Resource.GPU: 0.005, Resource.ADAM: 0.01, Resource.SSD: 2.0}  # the last is waited for
    apart = {resource: ScriptedLoad(machine, seconds) for resource, seconds in pieces.items()}
    alone, found = measure_contention(apart)
    assert alone == pytest.approx({resource: 1 / seconds for resource, seconds in pieces.items()})
    assert len(found.speeds) == 4
    assert all(speed == pytest.approx(1.0) for speeds in found.speeds.values() for speed in speeds.values())
    shared = {resource: ScriptedLoad(machine, 0.005, "lock") for resource in (Resource.GPU, Resource.ADAM)}
    (speeds,) = measure_contention(shared)[1].speeds.values()
    assert speeds == pytest.approx({Resource.GPU: 0.5, Resource.ADAM: 0.5})


def test_work_that_fails_is_reported_at_once_and_the_other_work_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise ValueError("no room")

    monkeypatch.setattr("fuyou.planner.profiling.measure.WINDOW_SECONDS", 0.0)
    other = RepeatedWork(lambda _: None)
    with pytest.raises(ValueError, match="no room"):
        pieces_per_second([other, RepeatedWork(fail)])
    assert other._threads and not any(thread.is_alive() for thread in other._threads)
