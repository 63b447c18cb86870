"""The memory meter, against allocations of known size in other processes."""

import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from common.memory.meter import PeakMeter

MIB = 1 << 20
SLACK = 8 * MIB
INTERPRETER = 20 * MIB

CHILD = """
import mmap, sys
private = b"x" * (60 << 20)
shared = mmap.mmap(int(sys.argv[1]), 0)
shared[:] = b"y" * len(shared)
print("there", flush=True)
sys.stdin.read()
"""


def _start(fd: int) -> subprocess.Popen[bytes]:
    """Start a process that holds 60 MiB, and 40 MiB of shared memory."""
    command = [sys.executable, "-c", CHILD, str(fd)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[fd])
    assert child.stdout is not None and child.stdout.readline() == b"there\n"
    return child


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert condition()


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="needs Linux's smaps_rollup")
def test_shared_memory_counts_once_and_a_peak_is_remembered() -> None:
    fd = os.memfd_create("shared")
    os.ftruncate(fd, 40 * MIB)
    pids: list[int] = []
    meter = PeakMeter(lambda: list(pids))
    meter.start()
    with _start(fd) as first, _start(fd) as second:
        pids += [first.pid, second.pid]
        least = 160 * MIB
        _wait_until(lambda: least - SLACK <= meter.current_bytes <= least + 2 * INTERPRETER)
        second.communicate()
        _wait_until(lambda: 100 * MIB - SLACK <= meter.current_bytes <= 100 * MIB + INTERPRETER)
        first.communicate()
    meter.stop()
    meter.stop()
    os.close(fd)
    assert meter.baseline_bytes == meter.current_bytes == 0, "processes that have ended hold nothing"
    assert least - SLACK <= meter.peak_bytes <= least + 2 * INTERPRETER
