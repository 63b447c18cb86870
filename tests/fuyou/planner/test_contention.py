"""Work next to other work goes at the speeds that were measured, and the simulator's clock follows them."""

import pytest

from fuyou.planner.rates import Contention
from fuyou.planner.simulator import SimulatedClock
from fuyou.schedule.tasks import Resource

GPU, ADAM, SSD, UP = Resource.GPU, Resource.ADAM, Resource.SSD, Resource.HOST_TO_DEVICE
MEASURED = Contention(
    {
        frozenset({GPU, ADAM}): {GPU: 0.5, ADAM: 0.25},
        frozenset({GPU, SSD}): {GPU: 0.8, SSD: 0.9},
        frozenset({GPU, ADAM, SSD}): {GPU: 0.4, ADAM: 0.2, SSD: 0.7},
    }
)


@pytest.mark.parametrize(("resource", "running", "speed"), [
    (GPU, {GPU}, 1.0),
    (ADAM, {GPU, ADAM}, 0.25),
    (SSD, {GPU, ADAM, SSD}, 0.7),
    (GPU, {GPU, ADAM, SSD, UP}, 0.4),  # copies were not measured next to other work
    (UP, {GPU, ADAM, UP}, 1.0),
    (ADAM, {ADAM, SSD}, 1.0),
])  # fmt: skip
def test_speeds(resource: Resource, running: set[Resource], speed: float) -> None:
    assert MEASURED.speed(resource, running) == pytest.approx(speed)


def test_each_piece_goes_as_fast_as_what_runs_next_to_it_lets_it() -> None:
    clock = SimulatedClock(MEASURED)
    ended: dict[Resource, float] = {}

    def start(resource: Resource, seconds: float) -> None:
        clock.work(resource, seconds, lambda: ended.setdefault(resource, clock.now))

    start(GPU, 1.0)
    clock.call_later(1.0, lambda: start(SSD, 0.9))
    start(ADAM, 1.0)
    clock.run()
    # After a second half of the computing and a quarter of Adam are done; then all three are at work, until the
    # computing ends; Adam next to the drives was not measured: both are at full speed.
    computed = 1 + 0.5 / 0.4
    assert ended[GPU] == pytest.approx(computed)
    assert ended[SSD] == pytest.approx(computed + 0.9 - 0.7 * (computed - 1))
    assert ended[ADAM] == pytest.approx(computed + 1 - 0.25 - 0.2 * (computed - 1))
    assert clock.result.busy[GPU] == pytest.approx(computed)
