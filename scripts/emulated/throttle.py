"""Drives made to look slower, so that a machine can stand in for one with other drives.

Each drive has one clock, shared by all processes that use the drive: the time until which the drive is reserved. An I/O
call of n bytes reserves the next n / rate seconds on that clock, does its real I/O, and sleeps until these have passed.
Reads and writes share the clock, so r bytes read and w written take r / R + w / W together, in any process.
Times are absolute: a sleep that ends late delays its caller, but not the drive.
"""

import contextlib
import fcntl
import hashlib
import math
import mmap
import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from common.errors import UserError
from common.store.folders import SCRATCH

_CLOCK = struct.Struct("=qq")  # Time until which the drive is reserved, and bytes written
_STALE = 60 * 10**9
"""Nanoseconds by which a clock is ahead if it was left behind before the machine started: no queue is so long."""
_WAKE_UP = 200_000
"""Nanoseconds by which a caller may wake up late without losing them: they count as time of the drive. A single caller
would otherwise see 5% less than the rate with calls of 2 ms."""


@dataclass(frozen=True)
class IoThrottle:
    """The rates that a drive is slowed down to; rates above the real ones change nothing."""

    read_bytes_per_second: float
    """Rate of a drive that does nothing but read; ``math.inf`` leaves reads as they are."""
    write_bytes_per_second: float
    """Rate of a drive that does nothing but write, into its fast cache if it has one."""
    cache_bytes: float = math.inf
    """Bytes that are written at that rate."""
    full_bytes_per_second: float = math.inf
    """Rate of writing once the fast cache is full."""

    def __post_init__(self) -> None:
        for rate in (self.read_bytes_per_second, self.write_bytes_per_second, self.full_bytes_per_second):
            if not rate > 0 or math.isnan(rate):
                raise UserError(f"A drive's rate must be positive, in bytes per second, and {rate} is not.")

    def seconds(self, direction: Literal["read", "write"], nbytes: int, written: int = 0) -> float:
        """Return how long the drive is busy with ``nbytes`` bytes, after ``written`` bytes were written."""
        if direction == "read":
            return nbytes / self.read_bytes_per_second
        return nbytes / (
            self.write_bytes_per_second if written < self.cache_bytes else self.full_bytes_per_second
        )

    def clock(self, directory: Path) -> "PacedClock":
        """Return the clock of the drive of ``directory``, a store's; its scratch files are on the same drive."""
        return PacedClock(self, DriveClock(clock_file(directory)))


def clock_file(directory: Path) -> Path:
    """Return the file of the clock of the drive that a store's directory stands for."""
    drive = directory.parent if directory.name == SCRATCH else directory
    return (
        Path(tempfile.gettempdir())
        / f"drive-clock-{hashlib.sha256(str(drive.resolve()).encode()).hexdigest()[:16]}"
    )


class DriveClock:
    """The clock of a drive, in nanoseconds of ``time.monotonic_ns``, and the bytes written to it: a file that every
    process maps.

    Any number of threads and processes may use it, each process (or store) with a separate object.
    """

    def __init__(self, path: Path) -> None:
        """Join the clock in the file ``path``, or make it.

        Raises:
            OSError: the file cannot be made.
        """
        self._path = path
        try:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self._made_here = True
        except FileExistsError:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            self._made_here = False
        try:
            os.ftruncate(self._descriptor, _CLOCK.size)  # again if the maker has: that changes nothing
            self._time = mmap.mmap(self._descriptor, _CLOCK.size)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._lock = threading.Lock()  # flock is the descriptor's, and so does not part threads

    def during(self, seconds: float, work: Callable[..., None], *arguments: Any) -> None:
        """Reserve the drive's next ``seconds``, run ``work(*arguments)``, and return when both have ended."""
        end, _ = self._reserve(round(seconds * 1e9))
        work(*arguments)
        while (left := end - time.monotonic_ns()) > 0:
            time.sleep(left * 1e-9)

    def count(self, nbytes: int) -> int:
        """Count ``nbytes`` as written, and return how many were written before."""
        return self._reserve(0, nbytes)[1]

    def _reserve(self, nanoseconds: int, nbytes: int = 0) -> tuple[int, int]:
        """Reserve the drive's next ``nanoseconds``, and count bytes; return their end, and the bytes before."""
        with self._lock:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            try:
                now = time.monotonic_ns()
                busy_until, written = _CLOCK.unpack_from(self._time)
                if not now - _WAKE_UP <= busy_until <= now + _STALE:
                    busy_until = now  # idle time is lost, not saved up
                end: int = busy_until + nanoseconds
                _CLOCK.pack_into(self._time, 0, end, written + nbytes)
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return end, written

    def close(self) -> None:
        """Leave the clock, and remove its file if it was made here: others who have it keep using it."""
        if self._made_here:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
        self._time.close()
        os.close(self._descriptor)


class PacedClock:
    """A drive's clock and its rates, as a store wants them."""

    def __init__(self, throttle: IoThrottle, clock: DriveClock) -> None:
        self._throttle, self._clock = throttle, clock

    def during(
        self, direction: Literal["read", "write"], nbytes: int, work: Callable[..., None], *arguments: Any
    ) -> None:
        """Reserve the time that the drive needs, run ``work(*arguments)``, and return when both have ended."""
        written = self._clock.count(nbytes) if direction == "write" else 0
        self._clock.during(self._throttle.seconds(direction, nbytes, written), work, *arguments)

    def close(self) -> None:
        """Leave the clock."""
        self._clock.close()
