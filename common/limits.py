"""Limits on the time and memory that work on a foreign file may take."""

import contextlib
import os
import resource
import signal
import threading
from collections.abc import Iterator
from functools import partial
from types import FrameType
from typing import Any

from common.units import format_bytes


class LimitExceeded(BaseException):
    """Work took more than it may. Not an ``Exception``, so that code which tries other ways after one ends as well."""


@contextlib.contextmanager
def limited(seconds: float | None, memory: int | None) -> Iterator[None]:
    """Interrupt what runs in this context once it has taken ``seconds``, or ``memory`` more bytes than before.

    Only the main thread can be interrupted; in others there is no limit. The memory is that of the process: where
    other threads allocate much at the same time, or libraries end the process without memory, give None. Contexts
    cannot be nested.

    Raises:
        LimitExceeded: the message completes a sentence such as ``the template ...``.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    addresses = resource.getrlimit(resource.RLIMIT_AS)
    handler: Any = None
    try:
        if memory is not None:
            most = [_address_space() + memory, *(limit for limit in addresses if limit >= 0)]
            resource.setrlimit(resource.RLIMIT_AS, (min(most), addresses[1]))
        if seconds is not None:
            handler = signal.signal(signal.SIGALRM, partial(_interrupt, seconds))
            # Again each second: an exception that is raised inside of a finalizer is lost.
            signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
        yield
    except MemoryError as error:
        raise LimitExceeded(f"takes more than {format_bytes(memory or 0)} of memory") from error
    finally:
        if seconds is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler or signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_AS, addresses)


def _interrupt(seconds: float, number: int, frame: FrameType | None) -> None:
    raise LimitExceeded(f"takes longer than {seconds:g} s")


def _address_space() -> int:
    """Return the bytes of addresses that this process uses."""
    file = os.open("/proc/self/statm", os.O_RDONLY)  # each rendering comes here
    try:
        return int(os.read(file, 32).split()[0]) * resource.getpagesize()
    finally:
        os.close(file)
