"""Paced drives: their rates are those requested, whichever process shares them."""

import threading
import time
from concurrent.futures import wait

import pytest
from emulated.throttle import DriveClock, IoThrottle

from common.store import Layout, Store
from tests.common.store.conftest import memory, noise

MIB = 1 << 20
PACE = IoThrottle(200e6, 100e6)
"""Far below what any drive does, so that nothing but the pace is measured."""
LATE = 0.03
"""Seconds that the last sleep of a measurement may end late on a busy machine."""


def do_nothing(*arguments):
    pass


def takes(attempt, expected, most=1.15):
    """Each attempt takes ``expected`` seconds at least, and one of a few not more than ``most`` times as long.

    Only the best one counts: next to other work, a thread that wakes late has lost its turn. On an idle machine, all
    take within 1% of what is expected.
    """
    taken = []
    while len(taken) < 8:
        begin = time.monotonic()
        attempt()
        taken.append(time.monotonic() - begin)
        assert taken[-1] >= expected
        if taken[-1] <= expected * most + LATE:
            return
    pytest.fail(f"took {taken} s and should take {expected}")


def use(clock, seconds, calls):
    for _ in range(calls):
        clock.during(seconds, do_nothing)


@pytest.mark.parametrize("threads", [1, 7])
def test_a_drive_is_never_faster_than_its_pace_and_hardly_slower(tmp_path, threads):
    clock = DriveClock(tmp_path / "clock")

    def work():
        workers = [threading.Thread(target=use, args=(clock, 0.0021, 250 // threads)) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    takes(work, 0.0021 * (250 // threads) * threads)
    clock.close()


def make(paths, nbytes, **options):
    """A store with two extents of ``nbytes`` bytes, and these."""
    layout = Layout(len(paths))
    extents = [layout.allocate("weights.0", nbytes) for _ in range(2)]
    return Store.create(paths, layout, io="posix", **options), extents


@pytest.mark.parametrize(("what", "directories"), [("read", 1), ("write", 1), ("mixed", 3)])
def test_a_paced_store_moves_its_bytes_at_the_pace(make_directories, directories, what):
    nbytes = 20 * MIB * directories + 13
    store, (one, other) = make(make_directories(directories), nbytes, throttle=PACE)
    data, got = memory(nbytes), memory(nbytes)
    with store:
        data[:] = noise(nbytes)
        store.write(one, data).result()

        def move():
            futures = []
            if what != "write":
                futures.append(store.read(one, got))
            if what != "read":
                futures.append(store.write(other, data))
            wait(futures)

        per_directory = nbytes / directories
        takes(move, (what != "write") * per_directory / 200e6 + (what != "read") * per_directory / 100e6)
        if what != "write":
            assert (got == data).all()
