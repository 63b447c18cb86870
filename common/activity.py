"""What is going on while nothing is printed: libraries name what takes long, and the command shows it."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(eq=False)
class Activity:
    """Something that takes long."""

    what: str
    """What it is, as people read it: ``reading the data``."""
    since: float = field(default_factory=time.monotonic)
    """When it began (``time.monotonic``)."""


_lock = threading.Lock()
_open: list[Activity] = []


@contextmanager
def activity(what: str) -> Iterator[Activity]:
    """Let :func:`current_activity` return ``what`` while this context is open, unless another begins inside it.

    Yields:
        The activity, whose words may change while it goes on.
    """
    mine = Activity(what)
    with _lock:
        _open.append(mine)
    try:
        yield mine
    finally:
        with _lock:
            _open.remove(mine)


def current_activity() -> Activity | None:
    """Return what is going on; None: nothing that was named."""
    with _lock:
        return _open[-1] if _open else None
