"""The precise memory meter, against allocations of known size in this and in other processes."""

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import memory_meter
import pytest
from memory_meter import PeakMeter, proportional_set_bytes

MIB = 1 << 20
SLACK = 6 * MIB
"""Python's own allocations, and the lag of the kernel's counters."""

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="needs Linux's smaps_rollup")

CHILD = """
import mmap, sys
shared = None
for line in sys.stdin:
    verb, number = line.split()
    if verb == "private":
        private = b"x" * int(number)
    elif verb == "spike":
        b"x" * int(number)
    elif verb == "shared":
        shared = mmap.mmap(int(number), 0)
        shared[:] = b"y" * len(shared)
    print("done", flush=True)
"""


class Child:
    """A spawned process that takes memory on request."""

    def __init__(self, fds: tuple[int, ...] = ()) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=fds
        )
        self.pid = self.process.pid
        self.tell("ready", 0)

    def tell(self, verb: str, number: int) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(verb, number, file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "done\n"

    def end(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child()
    yield child
    child.end()


@pytest.fixture
def two() -> Iterator[tuple[Child, Child, int]]:
    """Two processes and a shared file of 40 MiB that both can map."""
    fd = os.memfd_create("shared")
    os.ftruncate(fd, 40 * MIB)
    first, second = Child((fd,)), Child((fd,))
    yield first, second, fd
    first.end()
    second.end()
    os.close(fd)


def test_private_memory_counts_in_full_and_the_dead_count_nothing(two: tuple[Child, Child, int]) -> None:
    first, second, _ = two
    before = proportional_set_bytes([first.pid, second.pid])
    first.tell("private", 50 * MIB)
    assert proportional_set_bytes([first.pid, second.pid, first.pid]) - before == pytest.approx(50 * MIB, abs=SLACK)
    first.end()
    assert proportional_set_bytes([first.pid, 2**22 + 1]) == 0
    assert 0 < proportional_set_bytes([first.pid, second.pid]) < before + SLACK


def test_shared_memory_counts_once(two: tuple[Child, Child, int]) -> None:
    first, second, fd = two
    with PeakMeter(lambda: [first.pid, second.pid]) as meter:
        for child in (first, second):
            child.tell("shared", fd)
            assert meter.sample() - meter.baseline_bytes == pytest.approx(40 * MIB, abs=SLACK)
            # What was written into it was private memory for a moment: 40 + 40, never three times 40.
            assert meter.peak_bytes - meter.baseline_bytes == pytest.approx(80 * MIB, abs=SLACK)


def test_shared_memory_counts_in_full_though_outsiders_map_it(two: tuple[Child, Child, int]) -> None:
    first, outsider, fd = two
    with PeakMeter(lambda: [first.pid]) as meter:
        first.tell("shared", fd)
        alone = meter.sample()
        outsider.tell("shared", fd)
        assert proportional_set_bytes([first.pid]) < alone - 15 * MIB
        assert meter.sample() == pytest.approx(alone, abs=SLACK)


def test_remembers_a_peak_that_is_over(child: Child) -> None:
    with PeakMeter(lambda: [child.pid]) as meter:
        child.tell("private", 60 * MIB)
        time.sleep(0.1)
        child.tell("private", 0)
    assert meter.peak_bytes - meter.baseline_bytes == pytest.approx(60 * MIB, abs=SLACK)
    after = meter.peak_bytes
    child.tell("private", 200 * MIB)
    time.sleep(0.05)
    assert meter.peak_bytes == after, "it has stopped"


def test_sees_a_spike_that_no_sample_fell_into(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_meter, "_SHORTEST_PAUSE_S", 1.5)
    with PeakMeter(lambda: [child.pid]) as meter:
        time.sleep(0.1)
        child.tell("spike", 70 * MIB)
        assert meter.peak_bytes - meter.baseline_bytes < SLACK, "nobody has looked yet"
        deadline = time.monotonic() + 60
        while meter.peak_bytes - meter.baseline_bytes < SLACK and time.monotonic() < deadline:
            time.sleep(0.05)
        assert meter.peak_bytes - meter.baseline_bytes == pytest.approx(70 * MIB, abs=SLACK)


def test_a_process_that_comes_and_goes_counts_while_it_is_there() -> None:
    pids = [os.getpid()]
    with PeakMeter(lambda: list(pids)) as meter:
        first = Child()
        pids.append(first.pid)
        first.tell("private", 30 * MIB)
        time.sleep(0.1)
        first.end()
        second = Child()
        pids[1:] = [second.pid]
        second.tell("private", 30 * MIB)
        time.sleep(0.1)
        second.end()
    own = 20 * MIB  # what an interpreter takes alone, libraries shared with us aside
    assert 30 * MIB - SLACK <= meter.peak_bytes - meter.baseline_bytes <= 30 * MIB + own + SLACK


def test_starts_afresh_and_stops_twice() -> None:
    meter = PeakMeter(lambda: [os.getpid()])
    meter.stop()
    held = mmap.mmap(-1, 50 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # a heap may keep what is freed
    held[:: mmap.PAGESIZE] = b"x" * (50 * MIB // mmap.PAGESIZE)
    meter.start()
    meter.stop()
    first = meter.peak_bytes
    held.close()
    meter.start()
    meter.stop()
    meter.stop()
    assert first - meter.peak_bytes == pytest.approx(50 * MIB, abs=SLACK)
