"""What work costs beside other work: each kind runs alone, then with the others, and is counted in between."""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from common.errors import FinetuneError
from fuyou.planner.rates import Contention
from fuyou.schedule.tasks import Resource

#: Each combination is watched for this long, or until each kind of work has been done twice.
WINDOW_SECONDS = 0.5
#: Until then caches and threads warm up.
WARM_SECONDS = 0.1
_LONGEST_SECONDS = 60.0


class Worker(Protocol):
    """Work that can be repeated for as long as anybody wants."""

    ends: list[float]
    """When each piece of it was done since :meth:`start`, on :func:`time.monotonic`'s clock."""
    failure: BaseException | None
    """Why no more of it will be done, if that is so; :meth:`stop` raises it."""

    def start(self) -> None:
        """Begin with the first piece and go on with the next."""
        ...

    def stop(self) -> None:
        """Return when the last piece is done."""
        ...


class Repeated:
    """A function that is called again and again, in a thread of its own."""

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


def pieces_per_second(workers: Sequence[Worker]) -> list[float]:
    """How many pieces each of ``workers`` does in a second while all of them are at work."""
    began = time.monotonic() + WARM_SECONDS

    def counted(worker: Worker) -> list[float]:
        return [end for end in list(worker.ends) if end >= began]

    with contextlib.ExitStack() as running:  # all are stopped, whatever one of them has met
        for worker in workers:
            running.callback(worker.stop)
            worker.start()
        time.sleep(WARM_SECONDS + WINDOW_SECONDS)
        while any(len(counted(worker)) < 2 and worker.failure is None for worker in workers):
            if time.monotonic() - began > _LONGEST_SECONDS:
                raise FinetuneError(
                    f"A piece of work that is being measured has taken {_LONGEST_SECONDS:.0f} s: a drive hangs, or the "
                    "machine is overloaded."
                )
            time.sleep(WARM_SECONDS / 20)
        ends = [counted(worker) for worker in workers]
    return [(len(one) - 1) / max(one[-1] - one[0], 1e-9) for one in ends]


def measure_contention(workers: Mapping[Resource, Worker]) -> tuple[dict[Resource, float], Contention]:
    """Pieces per second of each of ``workers`` alone, and what is left of that in every combination of them."""
    alone = {resource: pieces_per_second([worker])[0] for resource, worker in workers.items()}
    speeds = {}
    for size in range(2, len(workers) + 1):
        for combination in itertools.combinations(workers, size):
            rates = pieces_per_second([workers[resource] for resource in combination])
            speeds[frozenset(combination)] = {
                resource: min(1.0, rate / alone[resource]) for resource, rate in zip(combination, rates, strict=True)
            }
    return alone, Contention(speeds)
