"""Measure the host memory that a few processes hold together, and return free memory of the heap.

The measure is the proportional set size: a page that n processes share counts 1/n in each.
"""

import ctypes
import threading
import time
from collections.abc import Callable

import psutil


def return_free_memory() -> None:
    """Return free memory of the heap to the system, where the C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


_LOOK_S = 0.05


class Heap:
    """Keeps free memory in this process's heap from piling up.

    Tensors of a few MiB that come and go leave holes that glibc does not return: 100 to 200 MiB while a hundred blocks
    compute one after the other in 35 MiB. Returning them costs page faults, so it is done only when they are many.

    Args:
        slack: bytes by which the process may grow in between. Memory that stays must be allocated before.
    """

    def __init__(self, slack: int) -> None:
        self._slack = slack
        self._process = psutil.Process()
        self._least = self._resident()
        self._next_look = 0.0

    def trim(self) -> None:
        """Return free memory to the system, if the process has grown by more than the slack. Looks at most every 50 ms:
        a look takes 20 to 90 us."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_S
        if self._resident() > self._least + self._slack:
            return_free_memory()
            self._least = self._resident()

    def _resident(self) -> int:
        return int(self._process.memory_info().rss)


_SHORTEST_PAUSE_S = 0.1


class PeakMeter:
    """Samples from a daemon thread, 2% of the time at most, so a peak between two samples is not seen."""

    def __init__(self, pids: Callable[[], list[int]]) -> None:
        self._pids = pids
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.baseline_bytes = self.current_bytes = self.peak_bytes = 0

    def start(self) -> None:
        """Take the baseline and begin to watch."""
        self.peak_bytes = 0
        self.baseline_bytes = self._sample()
        self._stopping.clear()
        self._thread = threading.Thread(target=self._watch, name="memory-meter", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching, after a last sample. Does nothing if the meter was not started."""
        if self._thread is not None:
            self._stopping.set()
            self._thread.join()
            self._thread = None
            self._sample()

    def _watch(self) -> None:
        pause = _SHORTEST_PAUSE_S
        while not self._stopping.wait(pause):
            start = time.perf_counter()
            self._sample()
            pause = max(_SHORTEST_PAUSE_S, 50 * (time.perf_counter() - start))

    def _sample(self) -> int:
        self.current_bytes = sum(_proportional_set_bytes(pid) for pid in set(self._pids()))
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        return self.current_bytes


def _proportional_set_bytes(pid: int) -> int:
    """Return the proportional set size of a process; 0 if it has ended, its resident set where the kernel hides it."""
    try:
        process = psutil.Process(pid)
        try:
            return int(process.memory_full_info().pss)
        except psutil.AccessDenied:
            return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0
