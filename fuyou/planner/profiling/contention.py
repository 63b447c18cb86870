"""Measure how much work slows down next to other work: each kind runs alone, then with the others."""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from common.errors import FinetuneError
from fuyou.planner.rates import Contention
from fuyou.schedule.tasks import Resource

WINDOW_SECONDS = 0.5  # Each combination is measured for this long, or until each kind of work has been done twice
WARM_SECONDS = 0.1  # Time for caches and threads to warm up
_MAX_SECONDS = 60.0


class Load(Protocol):
    """Work that can be repeated."""

    ends: list[float]  # Times at which its pieces were done since :meth:`start`, on :func:`time.monotonic`'s clock
    failure: BaseException | None  # Error because of which no more of it will be done; :meth:`stop` raises it

    def start(self) -> None:
        """Begin, and repeat the work until :meth:`stop`."""
        ...

    def stop(self) -> None: ...


class RepeatedCall:
    """A load that calls a function again and again in a thread."""

    def __init__(self, work: Callable[[], object]):
        self.ends: list[float] = []
        self.failure: BaseException | None = None
        self._work = work
        self._running = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self.ends, self._running = [], True
        self._thread = threading.Thread(target=self._run, name="repeated work", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._running = False
        if self._thread is not None:
            self._thread.join()
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            while self._running:
                self._work()
                self.ends.append(time.monotonic())
        except BaseException as error:
            self.failure = error


def pieces_per_second(loads: Sequence[Load]) -> list[float]:
    """Return the pieces of work per second of each of ``loads`` while all of them run."""
    start = time.monotonic() + WARM_SECONDS

    def ends(load: Load) -> list[float]:
        return [end for end in list(load.ends) if end >= start]

    with contextlib.ExitStack() as running:  # all are stopped, even if one of them has failed
        for load in loads:
            running.callback(load.stop)
            load.start()
        time.sleep(WARM_SECONDS + WINDOW_SECONDS)
        while any(len(ends(load)) < 2 and load.failure is None for load in loads):
            if time.monotonic() - start > _MAX_SECONDS:
                raise FinetuneError(
                    f"A piece of work that is being measured has taken {_MAX_SECONDS:.0f} s: a drive hangs, or the "
                    "machine is overloaded."
                )
            time.sleep(WARM_SECONDS / 20)
        counted = [ends(load) for load in loads]
    return [(len(times) - 1) / max(times[-1] - times[0], 1e-9) for times in counted]


def measure_contention(loads: Mapping[Resource, Load]) -> tuple[dict[Resource, float], Contention]:
    """Measure the speed of each load alone, and its remaining fraction in every combination of loads."""
    alone = {resource: pieces_per_second([load])[0] for resource, load in loads.items()}
    speeds = {}
    for size in range(2, len(loads) + 1):
        for combination in itertools.combinations(loads, size):
            rates = pieces_per_second([loads[resource] for resource in combination])
            speeds[frozenset(combination)] = {
                resource: min(1.0, rate / alone[resource]) for resource, rate in zip(combination, rates, strict=True)
            }
    return alone, Contention(speeds)
