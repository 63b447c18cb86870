"""Paced drives: their rates are those requested, whichever process shares them."""

import multiprocessing
import pickle
import threading
import time
from concurrent.futures import wait

import pytest
from emulated import throttle as pacing
from emulated.throttle import DriveClock, IoThrottle, clock_file

from common.errors import UserError
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


def test_pace_is_a_value():
    assert pickle.loads(pickle.dumps(PACE)) == PACE
    assert (PACE.seconds("read", 10**8), PACE.seconds("write", 10**8)) == (0.5, 1.0)
    for rates in [(0, 1), (1, -1), (float("nan"), 1)]:
        with pytest.raises(UserError, match="positive"):
            IoThrottle(*rates)


@pytest.mark.parametrize("threads", [1, 2, 4, 7])
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


def test_idle_time_is_lost_and_a_stale_clock_is_reset(tmp_path, monkeypatch):
    clock = DriveClock(tmp_path / "clock")
    use(clock, 0.01, 1)
    time.sleep(0.1)
    begin = time.monotonic()
    use(clock, 0.02, 2)
    assert time.monotonic() - begin >= 0.04
    monkeypatch.setattr(pacing, "_STALE", 0.5e9)
    clock._reserve(10**12)
    begin = time.monotonic()
    use(clock, 0.01, 1)
    assert 0.01 <= time.monotonic() - begin < 100  # of the 1000 s that are reserved
    clock.close()


def test_failed_work_raises_at_once(tmp_path):
    clock = DriveClock(tmp_path / "clock")
    with pytest.raises(ZeroDivisionError):
        clock.during(20, lambda: 1 / 0)
    clock.close()


def test_the_clock_is_removed_by_its_maker_only(tmp_path):
    first, second = DriveClock(tmp_path / "clock"), DriveClock(tmp_path / "clock")
    second.close()
    assert (tmp_path / "clock").exists()
    first.close()
    assert not list(tmp_path.iterdir())


def make(paths, nbytes, **options):
    """A store with two extents of ``nbytes`` bytes, and these."""
    layout = Layout(len(paths))
    extents = [layout.allocate("weights.0", nbytes) for _ in range(2)]
    return Store.create(paths, layout, io="posix", **options), extents


@pytest.mark.parametrize("directories", [1, 3])
@pytest.mark.parametrize("what", ["read", "write", "mixed"])
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


def write_elsewhere(paths, both, goes_on, seconds):
    with Store.open(paths, io="posix", throttle=PACE) as store:
        extent = store.layout.extents("weights.0")[1]
        data = memory(extent.nbytes)
        while True:
            both.wait(300)
            if not goes_on.value:
                return
            begin = time.monotonic()
            store.write(extent, data).result()
            seconds.value = time.monotonic() - begin
            both.wait(300)


def test_two_processes_share_a_drive(make_directories):
    paths, nbytes = make_directories(1), 32 * MIB
    context = multiprocessing.get_context("spawn")
    both, goes_on, theirs = context.Barrier(2), context.Value("b", True), context.Value("d", 0.0)
    store, (one, _) = make(paths, nbytes, throttle=PACE)
    taken = []
    with store:
        child = context.Process(target=write_elsewhere, args=(paths, both, goes_on, theirs))
        child.start()
        got = memory(nbytes)
        while not taken or (len(taken) < 8 and not shared(*taken[-1], nbytes)):  # one may begin late on a busy machine
            both.wait(300)
            begin = time.monotonic()
            store.read_now(one, got)
            mine = time.monotonic() - begin
            both.wait(300)
            taken.append((mine, theirs.value))
        goes_on.value = False
        both.wait(300)
        child.join()
        assert child.exitcode == 0
        assert shared(*taken[-1], nbytes), taken
        assert clock_file(paths[0]).exists()
    assert not clock_file(paths[0]).exists()


def shared(mine, theirs, nbytes):
    """Whether both took their shares at the same time, and together no longer than they had to."""
    expected = nbytes / 200e6 + nbytes / 100e6
    return expected - LATE <= max(mine, theirs) <= expected * 1.05 + LATE and mine > nbytes / 200e6 * 1.4


def test_scratch_files_share_the_drives_of_their_store(make_directories):
    paths, nbytes = make_directories(1), 20 * MIB
    (paths[0] / "scratch").mkdir()
    store, (one, _) = make(paths, nbytes, throttle=PACE)
    scratch, (there, _) = make([paths[0] / "scratch"], nbytes, throttle=PACE)
    with store, scratch:
        takes(
            lambda: wait([store.read(one, memory(nbytes)), scratch.write(there, memory(nbytes))]),
            nbytes / 200e6 + nbytes / 100e6,
        )
