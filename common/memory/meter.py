"""How much host memory a few processes hold together, and the most they ever held.

The measure is the proportional set size (PSS): private pages count in full, a page mapped by n processes counts 1/n
in each. Summed over our processes it is the memory they really take, with shared buffers counted once. The kernel
works it out by walking the page tables: about 22 ms per GiB mapped in 4 KiB pages, much less on huge pages. So a peak
cannot be had by asking often, and :class:`PeakMeter` combines three sources:

* *Full samples* of PSS, as often as they may take 2% of the time.
* *Estimates* between them, up to 100 per second, from the resident-set counters in ``/proc/PID/status`` (0.1 ms):
  private memory as it is now, plus the last full sample's shared and file-backed memory, less what has been unmapped
  since. What has been mapped since may be new, or already counted in another process: what the largest process maps
  counts in any case; the rest counts for nothing until a full sample has told, but calls for one, as soon as the cost
  allows, if it could make a new peak.
* *High-water marks*: ``VmHWM`` in the same file is kept by the kernel at every change. Where it rises between two
  estimates and the resident set does not stay there, the excess was a spike too short to see, and is added.

One deviation from PSS: processes of other people that map the same libraries make our share of them smaller, and larger
again when they end, by 200 MB for PyTorch's. What the largest of our processes maps of files, and of shared memory,
therefore counts in full. Where nobody else shares, this is PSS; elsewhere it is more, and steady.

What may be missed: shared and file-backed memory that comes and goes between two full samples (with 4 GiB in small
pages these are 5 s apart, with 200 GiB minutes); and a private spike shorter than the pause between estimates that
stays below the process's own earlier high-water mark, while the other processes stand higher than they did then. What
may be overstated: spikes of two processes within one pause count as simultaneous. The kernel's counters themselves
lag by up to some MiB on machines with many processors.
"""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import psutil

_FULL_SAMPLE_SHARE = 0.02
"""Part of the time that full samples may take."""
_ESTIMATE_SHARE = 0.01
"""Part of the time that estimates may take."""
_SHORTEST_PAUSE_S = 0.01
_STEADY_BYTES = 1 << 20
"""How far shared and file-backed memory may move in a process while a full sample is taken."""
_ATTEMPTS = 10


def proportional_set_bytes(pids: Iterable[int]) -> int:
    """Proportional set size of these processes together, in bytes; one that has ended counts nothing.

    Where the kernel does not tell it (old kernels, other systems, another user's process), a process counts with its
    private memory, or else with its resident set, which includes all it shares.
    """
    return sum(_proportional_set(pid).total for pid in set(pids))


@dataclass
class _ProportionalSet:
    """What one process holds, in bytes, with shared pages in proportion."""

    total: int
    shared: int
    """Of that, shared memory (memfd, /dev/shm, anonymous shared mappings)."""
    file: int
    """Of that, memory backed by files."""


def _proportional_set(pid: int) -> _ProportionalSet:
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as rollup:
            found = {line.split(b":")[0]: int(line.split()[1]) * 1024 for line in rollup if line.startswith(b"Pss")}
        return _ProportionalSet(*(found.get(key, 0) for key in (b"Pss", b"Pss_Shmem", b"Pss_File")))
    except ProcessLookupError:
        return _ProportionalSet(0, 0, 0)
    except OSError:
        resident = _resident(pid)
        return _ProportionalSet(_substitute(pid), resident.shared, resident.file)


def _substitute(pid: int) -> int:
    """The next best thing that this system has for a process."""
    try:
        process = psutil.Process(pid)
        try:
            full = process.memory_full_info()
            return int(getattr(full, "pss", full.uss))
        except psutil.AccessDenied:
            return int(process.memory_info().rss)
    except psutil.Error:
        return 0


@dataclass
class _Resident:
    """The resident-set counters of one process at one time, in bytes; all zero where the kernel has none."""

    anonymous: int = 0
    shared: int = 0
    file: int = 0
    high_water: int = 0

    @property
    def total(self) -> int:
        return self.anonymous + self.shared + self.file


_FIELDS = {b"RssAnon": "anonymous", b"RssShmem": "shared", b"RssFile": "file", b"VmHWM": "high_water"}


def _resident(pid: int) -> _Resident:
    found = _Resident()
    try:
        with open(f"/proc/{pid}/status", "rb") as status:
            for line in status:
                key, _, value = line.partition(b":")
                if key in _FIELDS:
                    setattr(found, _FIELDS[key], int(value.split()[0]) * 1024)
    except OSError:
        pass
    return found


@dataclass
class _Anchor:
    """What is taken over from the last full sample."""

    shared: int = 0
    """Proportional set size of shared memory, in bytes."""
    file: int = 0
    """The same of file-backed memory."""
    counters: dict[int, _Resident] = field(default_factory=dict)
    """Of every process at that time."""

    def estimate(self, now: dict[int, _Resident]) -> tuple[int, int]:
        """The least and the most that ``now`` can stand for, in bytes of proportional set size."""
        before = {pid: self.counters.get(pid, _Resident()) for pid in now}
        shared = [now[pid].shared - before[pid].shared for pid in now]
        file = [now[pid].file - before[pid].file for pid in now]
        least = (
            sum(counters.anonymous for counters in now.values())
            + max(self.shared + _sum_below_zero(shared), *(counters.shared for counters in now.values()), 0)
            + max(self.file + _sum_below_zero(file), *(counters.file for counters in now.values()), 0)
        )
        return least, least + sum(change for change in (*shared, *file) if change > 0)


def _sum_below_zero(changes: Iterable[int]) -> int:
    return sum(change for change in changes if change < 0)


class PeakMeter:
    """Watches the memory of some processes from a daemon thread; see the module for what it can and cannot see.

    ``pids`` is asked anew for every look, so processes may come and go. They should be spawned, not forked: memory that
    stays shared with a parent until it is written counts as private in the estimates.
    """

    def __init__(self, pids: Callable[[], list[int]]) -> None:
        self._pids = pids
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._anchor = _Anchor()
        self._last: dict[int, _Resident] = {}
        self._next_full = 0.0
        self._baseline = 0
        self._peak = 0

    @property
    def baseline_bytes(self) -> int:
        """What the processes held together when :meth:`start` was called."""
        return self._baseline

    @property
    def peak_bytes(self) -> int:
        """The most they held since."""
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
            self._last = self._anchor.counters
        self._stopping.clear()
        self._thread = threading.Thread(target=self._watch, name="memory-meter", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching, after a last full sample. Harmless when not started."""
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
                started = time.perf_counter()
                fresh = self._estimate()
                cost = time.perf_counter() - started
                # Without news, look again once in a while: sharing changes too.
                quiet = self._next_full + 50 * _SHORTEST_PAUSE_S
                if time.perf_counter() > (self._next_full if fresh else quiet):
                    self._full_sample(attempts=1)
            pause = max(_SHORTEST_PAUSE_S, cost / _ESTIMATE_SHARE)

    def _full_sample(self, attempts: int) -> int:
        """Read all processes one after the other; with one attempt only, drop what moved meanwhile.

        A page that a second process maps between the readings counts in full in the first and by half in the second.
        """
        started = time.perf_counter()
        pids = set(self._pids())
        for attempt in range(attempts):
            if attempt:
                time.sleep(_SHORTEST_PAUSE_S)
            before = {pid: _resident(pid) for pid in pids}
            sets = [_proportional_set(pid) for pid in pids]
            counters = {pid: _resident(pid) for pid in pids}
            moved = (abs(counters[p].shared - before[p].shared) + abs(counters[p].file - before[p].file) for p in pids)
            steady = all(change < _STEADY_BYTES for change in moved)
            if steady:
                break
        shared, file = sum(one.shared for one in sets), sum(one.file for one in sets)
        held = (
            sum(one.total for one in sets)
            + max([0, *(counters[pid].shared - shared for pid in pids)])
            + max([0, *(counters[pid].file - file for pid in pids)])
        )
        if steady or attempts > 1:
            self._anchor = _Anchor(shared, file, counters)
            self._peak = max(self._peak, held)
        ended = time.perf_counter()
        self._next_full = ended + (ended - started) / _FULL_SAMPLE_SHARE
        return held

    def _estimate(self) -> bool:
        """Account for what the counters show now; True if that calls for a full sample."""
        now = {pid: _resident(pid) for pid in self._pids()}
        least, most = self._anchor.estimate(now)
        for pid, counters in now.items():
            before = self._last.get(pid)
            if before is not None and counters.high_water > before.high_water:
                least += max(0, counters.high_water - counters.total)
        self._last = now
        news = most > self._peak or now.keys() != self._anchor.counters.keys()
        self._peak = max(self._peak, least)
        return news
