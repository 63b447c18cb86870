"""Notices whether others need the processors, and lets OpenMP's threads sleep early as long as they do.

How it is noticed: the kernel counts how long a thread ran, and how long it could have and had no processor. A thread
that computes on one of two processors, beside the engine's own threads and its optimizer process, waits a sixth of the
time that it wants to run; with one busy process beside them a third, with two half of it.

How threads are made to sleep: before each time that one spins, GNU's library (libgomp) compares how many it has with
the processors that it found when it was loaded, and spins briefly if they are more. An idle team of threads makes them
more, until it is ended. Nothing that computes is changed, and so no bit of any result.
"""

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from common.openmp import PROCESSORS, spins_long

import torch

PERIOD_SECONDS = 0.5
"""Time between two looks."""
SHARED_WAITING = 0.25
"""Waiting as a part of the time that a computing thread wants to run, from which on processors count as shared."""
CALM_SECONDS = 5.0
"""Time since processors were last shared, after which threads spin long again."""
_RARELY = 0.1
"""Part of a period that a thread must have wanted to run, for its waiting to mean anything."""
_starting = threading.Lock()
_watching: threading.Thread | None = None


def watch_processors() -> None:
    """Watch the calling thread, which computes, until it ends. Once in a process is enough; more do no harm.

    Does nothing where threads do not spin long (see :func:`common.openmp.decide_waiting`), or with another library than
    GNU's. Until the first look threads sleep early.
    """
    global _watching
    with _starting:
        if not spins_long() or (_watching is not None and _watching.is_alive()):
            return
        libraries = _gnu_libraries()
        if libraries:
            times = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
            _watching = threading.Thread(target=_watch, args=(times, libraries), name="processors", daemon=True)
            _watching.start()


def is_shared(ran: float, waited: float) -> bool | None:
    """Return whether a processor was shared by a thread that ran and waited for so many seconds of a period.

    None if it hardly wanted to run.
    """
    wanted = ran + waited
    return None if wanted < _RARELY * PERIOD_SECONDS else waited > SHARED_WAITING * wanted


class IdleTeam:
    """A team of OpenMP's threads that sleep. With PyTorch's own they are one more than there are processors.

    Args:
        libraries: GNU's, in each of which there is to be one.

    Raises:
        RuntimeError: the system allows no more threads.
    """

    def __init__(self, libraries: list[ctypes.CDLL]) -> None:
        self._libraries, self._ending, self._made = libraries, threading.Event(), threading.Event()
        self._size = max(2, PROCESSORS + 2 - torch.get_num_threads())  # who makes it is one, and was there before
        _start_and_end(self._size * len(libraries))
        self._thread = threading.Thread(target=self._hold, name="idle OpenMP team", daemon=True)
        self._thread.start()
        self._made.wait()

    def end(self) -> None:
        """End its threads."""
        self._ending.set()
        self._thread.join()

    def _hold(self) -> None:
        for library in self._libraries:
            # What compilers make of "#pragma omp parallel", around a function that does nothing.
            nothing = ctypes.cast(library.omp_get_thread_num, ctypes.c_void_p)
            library.GOMP_parallel(nothing, None, ctypes.c_uint(self._size), ctypes.c_uint(0))
        self._made.set()
        self._ending.wait()  # a team ends with the thread that made it


def _watch(times: Path, libraries: list[ctypes.CDLL]) -> None:
    team = _idle_team(libraries)
    calm_at = 0.0
    for before, now in pairwise(_looks(times)):
        shared = is_shared(now[0] - before[0], now[1] - before[1])
        if shared:
            calm_at = time.monotonic() + CALM_SECONDS
            team = team or _idle_team(libraries)
        elif shared is False and team is not None and time.monotonic() >= calm_at:
            team.end()
            team = None
    if team is not None:
        team.end()


def _idle_team(libraries: list[ctypes.CDLL]) -> IdleTeam | None:
    try:
        return IdleTeam(libraries)
    except RuntimeError:  # threads spin long, as they would without us
        return None


def _start_and_end(count: int) -> None:
    """See that the system allows ``count`` more threads: where it does not, GNU's library would end the process.

    Raises:
        RuntimeError: it does not.
    """
    end = threading.Event()
    started = []
    try:
        for _ in range(count):
            started.append(threading.Thread(target=end.wait, daemon=True))
            started[-1].start()
    finally:
        end.set()
        for thread in started:
            if thread.ident is not None:
                thread.join()


def _looks(times: Path) -> Iterator[tuple[float, float]]:
    """Yield the seconds that a thread has run, and waited for a processor, once in a period until it has ended."""
    with suppress(OSError):  # it has ended
        while True:
            ran, waited, _ = times.read_text().split()
            yield int(ran) / 1e9, int(waited) / 1e9
            time.sleep(PERIOD_SECONDS)


def _gnu_libraries() -> list[ctypes.CDLL]:
    """Return GNU's OpenMP libraries that this process has loaded: PyTorch's, and what other packages brought."""
    try:
        mapped = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[5] for line in mapped if "/libgomp" in line}
    return [ctypes.CDLL(path) for path in sorted(paths)]
