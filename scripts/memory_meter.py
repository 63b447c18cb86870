"""How much host memory a few processes hold together, and the most they ever held.

The measure is the proportional set size (PSS): private pages count in full, a page mapped by n processes counts 1/n in
each. Summed over our processes it is the memory they really take, with shared buffers counted once. The kernel works it
out by walking the page tables, 22 ms per GiB in 4 KiB pages, so PSS alone would miss most peaks; and the memory checks
compare peaks with plans to within MiB. :class:`PeakMeter` therefore adds two cheap counters of ``/proc/PID/status``:

* *Full samples* of PSS are taken as often as they may take 2% of the time.
* *Estimates* between them, up to 100 per second, use the resident-set counters: private memory as it is now, plus the
  last full sample's shared and file-backed memory, less what has been unmapped since. Memory that has been mapped since
  may be new, or already counted in another process: it counts as far as one process alone maps that much, and calls
  for a full sample if it could make a new peak.
* *High-water marks* (``VmHWM``) are kept by the kernel at every change. Where one rises between two estimates and the
  resident set does not stay there, the excess was a spike too short to see, and is added.

One deviation from PSS: processes of other people that map the same libraries make our share of them smaller, and larger
again when they end, by 200 MB for PyTorch's. What the largest of our processes maps of files, and of shared memory,
therefore counts in full.

The meter may miss shared memory that comes and goes between two full samples, and a private spike between two estimates
that stays below the process's earlier high-water mark. It may overstate spikes of two processes within one pause, which
count as simultaneous. The kernel's counters themselves lag by up to some MiB on machines with many processors.
"""

import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

_FULL_SAMPLE_SHARE = 0.02  # Part of the time that full samples may take
_ESTIMATE_SHARE = 0.01  # Part of the time that estimates may take
_SHORTEST_PAUSE_S = 0.01
_STEADY_BYTES = 1 << 20
"""Bytes by which shared and file-backed memory of a process may change while a full sample is taken."""
_ATTEMPTS = 10


class _Counters(NamedTuple):
    """Bytes that one process holds."""

    anonymous: int = 0
    shared: int = 0  # Bytes of shared memory (memfd, /dev/shm, anonymous shared mappings)
    file: int = 0  # Bytes of memory that is backed by files
    high_water: int = 0  # The most bytes that were ever resident; 0 in counters of the proportional set size

    @property
    def total(self) -> int:
        return self.anonymous + self.shared + self.file


def proportional_set_bytes(pids: Iterable[int]) -> int:
    """Return the proportional set size of these processes together, in bytes; one that has ended counts nothing."""
    return sum(_proportional(pid).total for pid in set(pids))


def _proportional(pid: int) -> _Counters:
    """Read the proportional set size of a process; its resident set where the kernel does not tell (before 5.9)."""
    try:
        return _Counters(*_read(pid, "smaps_rollup", ("Pss_Anon", "Pss_Shmem", "Pss_File")))
    except ProcessLookupError:
        return _Counters()
    except (OSError, KeyError):
        return _resident(pid)


def _resident(pid: int) -> _Counters:
    """Read the resident-set counters of a process; all are zero if it has ended."""
    try:
        return _Counters(*_read(pid, "status", ("RssAnon", "RssShmem", "RssFile", "VmHWM")))
    except (OSError, KeyError):
        return _Counters()


def _read(pid: int, file: str, keys: tuple[str, ...]) -> list[int]:
    with open(f"/proc/{pid}/{file}") as lines:
        pairs = (line.partition(":") for line in lines)
        counters = {key: int(value.split()[0]) * 1024 for key, _, value in pairs if key in keys}
    return [counters[key] for key in keys]


class PeakMeter:
    """Watches the memory of some processes from a daemon thread; see the module for what it can and cannot see.

    ``pids`` is called again for every sample, so processes may come and go. They should be spawned, not forked: memory
    that stays shared with a parent until it is written counts as private in the estimates.
    """

    def __init__(self, pids: Callable[[], list[int]]) -> None:
        self._pids = pids
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._shared = self._file = 0
        """Proportional bytes of shared and of file-backed memory in the last full sample, and the counters then."""
        self._sampled: dict[int, _Counters] = {}
        self._last: dict[int, _Counters] = {}
        self._next_full = 0.0
        self._baseline = 0
        self._peak = 0

    @property
    def baseline_bytes(self) -> int:
        """Bytes that the processes held together when :meth:`start` was called."""
        return self._baseline

    @property
    def peak_bytes(self) -> int:
        return self._peak

    def sample(self) -> int:
        """Take a full sample now and bring the peak up to date. Costs 22 ms per GiB in 4 KiB pages.

        Returns: what the processes hold together, in bytes.
        """
        with self._lock:
            self._estimate()
            return self._full_sample(_ATTEMPTS)

    def start(self) -> None:
        """Take the baseline and begin to watch."""
        with self._lock:
            self._peak = 0
            self._baseline = self._full_sample(_ATTEMPTS)
            self._last = self._sampled
        self._stopping.clear()
        self._thread = threading.Thread(target=self._watch, name="memory-meter", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching, after a last full sample. Does nothing if the meter was not started."""
        if self._thread is None:
            return
        self._stopping.set()
        self._thread.join()
        self._thread = None
        self.sample()

    def __enter__(self) -> "PeakMeter":
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _watch(self) -> None:
        pause = _SHORTEST_PAUSE_S
        while not self._stopping.wait(pause):
            with self._lock:
                start_time = time.perf_counter()
                full_sample_wanted = self._estimate()
                cost = time.perf_counter() - start_time
                # Without news, look again once in a while: sharing changes too.
                quiet = self._next_full + 50 * _SHORTEST_PAUSE_S
                if time.perf_counter() > (self._next_full if full_sample_wanted else quiet):
                    self._full_sample(attempts=1)
            pause = max(_SHORTEST_PAUSE_S, cost / _ESTIMATE_SHARE)

    def _full_sample(self, attempts: int) -> int:
        """Read all processes one after the other; with one attempt only, drop what moved meanwhile.

        A page that a second process maps between the readings counts in full in the first and by half in the second.
        """
        start_time = time.perf_counter()
        pids = set(self._pids())
        for attempt in range(attempts):
            if attempt:
                time.sleep(_SHORTEST_PAUSE_S)
            before = {pid: _resident(pid) for pid in pids}
            sets = [_proportional(pid) for pid in pids]
            now = {pid: _resident(pid) for pid in pids}
            moved = (abs(now[p].shared - before[p].shared) + abs(now[p].file - before[p].file) for p in pids)
            steady = all(change < _STEADY_BYTES for change in moved)
            if steady:
                break
        shared, file = sum(sample.shared for sample in sets), sum(sample.file for sample in sets)
        held = (
            sum(sample.anonymous for sample in sets)
            + max([shared, *(counters.shared for counters in now.values())])
            + max([file, *(counters.file for counters in now.values())])
        )
        if steady or attempts > 1:
            self._shared, self._file, self._sampled = shared, file, now
            self._peak = max(self._peak, held)
        end_time = time.perf_counter()
        self._next_full = end_time + (end_time - start_time) / _FULL_SAMPLE_SHARE
        return held

    def _estimate(self) -> bool:
        """Account for what the counters show now; return whether that calls for a full sample."""
        now = {pid: _resident(pid) for pid in self._pids()}
        before = {pid: self._sampled.get(pid, _Counters()) for pid in now}
        shared = [now[pid].shared - before[pid].shared for pid in now]
        file = [now[pid].file - before[pid].file for pid in now]
        least = (
            sum(counters.anonymous for counters in now.values())
            + max(
                [
                    self._shared + sum(min(change, 0) for change in shared),
                    *(sample.shared for sample in now.values()), 0,
                ]
            )
            + max([self._file + sum(min(change, 0) for change in file), *(item.file for item in now.values()), 0])
        )  # fmt: skip
        most = least + sum(max(change, 0) for change in (*shared, *file))
        for pid, counters in now.items():
            last = self._last.get(pid)
            if last is not None and counters.high_water > last.high_water:
                least += max(0, counters.high_water - counters.total)
        self._last = now
        full_sample_wanted = most > self._peak or now.keys() != self._sampled.keys()
        self._peak = max(self._peak, least)
        return full_sample_wanted
