"""The memory meter, against allocations of known size in this and in other processes."""

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from common import memory_meter
from common.memory_meter import PeakMeter, proportional_set_bytes

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
    """A spawned process that takes memory when told to."""

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


def test_agrees_with_psutil() -> None:
    assert proportional_set_bytes([os.getpid()]) == pytest.approx(psutil.Process().memory_full_info().pss, abs=SLACK)


def test_private_memory_counts_in_full_and_the_dead_count_nothing(child: Child) -> None:
    before = proportional_set_bytes([os.getpid(), child.pid])
    child.tell("private", 50 * MIB)
    assert proportional_set_bytes([os.getpid(), child.pid, child.pid]) - before == pytest.approx(50 * MIB, abs=SLACK)
    alone = proportional_set_bytes([os.getpid()])
    child.end()
    assert proportional_set_bytes([child.pid, 2**22 + 1]) == 0
    assert proportional_set_bytes([os.getpid(), child.pid]) == pytest.approx(alone, abs=SLACK)


def test_shared_memory_counts_once() -> None:
    fd = os.memfd_create("shared")
    os.ftruncate(fd, 40 * MIB)
    child = Child((fd,))
    pids = [os.getpid(), child.pid]
    with PeakMeter(lambda: pids) as meter, mmap.mmap(fd, 0) as ours:
        ours[:] = bytes(len(ours))
        child.tell("shared", fd)
        time.sleep(0.05)
        assert meter.sample() - meter.baseline_bytes == pytest.approx(40 * MIB, abs=SLACK)
        # The zeros were private memory for a moment, and then the child's pattern: never more than 40 + 40 together.
        assert meter.peak_bytes - meter.baseline_bytes == pytest.approx(80 * MIB, abs=SLACK)
    child.end()
    os.close(fd)


def test_remembers_a_peak_that_is_over(child: Child) -> None:
    with PeakMeter(lambda: [os.getpid(), child.pid]) as meter:
        child.tell("private", 60 * MIB)
        time.sleep(0.1)
        child.tell("private", 0)
    assert meter.peak_bytes - meter.baseline_bytes == pytest.approx(60 * MIB, abs=SLACK)
    after = meter.peak_bytes
    child.tell("private", 200 * MIB)
    time.sleep(0.05)
    assert meter.peak_bytes == after, "it has stopped"


def test_sees_a_spike_that_no_sample_fell_into(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_meter, "_SHORTEST_PAUSE_S", 0.5)
    with PeakMeter(lambda: [os.getpid(), child.pid]) as meter:
        time.sleep(0.1)
        child.tell("spike", 70 * MIB)
        assert meter.peak_bytes - meter.baseline_bytes < SLACK, "nobody has looked yet"
        time.sleep(1.0)
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
    own = 20 * MIB  # what an interpreter takes by itself, libraries shared with us aside
    assert 30 * MIB - SLACK <= meter.peak_bytes - meter.baseline_bytes <= 30 * MIB + own + SLACK


def test_costs_little() -> None:
    held = bytes(range(256)) * (2 * MIB)  # 512 MiB in small pages, most likely
    with PeakMeter(lambda: [os.getpid()]) as meter:
        time.sleep(0.1)
        cpu, wall = time.process_time(), time.perf_counter()
        time.sleep(1.5)
        share = (time.process_time() - cpu) / (time.perf_counter() - wall)
    assert meter.baseline_bytes > len(held)
    assert share < 0.06, "meant to be under 0.03; the rest is for a busy machine"


def test_starts_afresh_and_stops_twice() -> None:
    meter = PeakMeter(lambda: [os.getpid()])
    meter.stop()
    held = b"x" * (50 * MIB)
    meter.start()
    meter.stop()
    first = meter.peak_bytes
    del held
    meter.start()
    meter.stop()
    meter.stop()
    assert first - meter.peak_bytes == pytest.approx(50 * MIB, abs=SLACK)
