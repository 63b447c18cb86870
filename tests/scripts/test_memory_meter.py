"""The precise memory meter, against allocations of known size in this and in other processes."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from memory_meter import PeakMeter

MIB = 1 << 20
SLACK = 6 * MIB
"""Python's own allocations, and the lag of the kernel's counters."""

pytestmark = pytest.mark.skipif(
    not os.path.exists("/proc/self/smaps_rollup"), reason="needs Linux's smaps_rollup"
)

CHILD = """
import mmap, sys
shared = None
for line in sys.stdin:
    verb, number = line.split()
    if verb == "private":
        private = b"x" * int(number)
    elif verb == "shared":
        shared = mmap.mmap(int(number), 0)
        shared[:] = b"y" * len(shared)
    print("done", flush=True)
"""


class Child:
    """A spawned process that takes memory on request."""

    def __init__(self, fds: tuple[int, ...] = ()) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=fds,
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
def two() -> Iterator[tuple[Child, Child, int]]:
    """Two processes and a shared file of 40 MiB that both can map."""
    fd = os.memfd_create("shared")
    os.ftruncate(fd, 40 * MIB)
    first, second = Child((fd,)), Child((fd,))
    yield first, second, fd
    first.end()
    second.end()
    os.close(fd)


def test_shared_memory_counts_once(two: tuple[Child, Child, int]) -> None:
    first, second, fd = two
    with PeakMeter(lambda: [first.pid, second.pid]) as meter:
        for child in (first, second):
            child.tell("shared", fd)
            assert meter.sample() - meter.baseline_bytes == pytest.approx(40 * MIB, abs=SLACK)
            # What was written into it was private memory for a moment: 40 + 40, never three times 40.
            assert meter.peak_bytes - meter.baseline_bytes == pytest.approx(80 * MIB, abs=SLACK)
