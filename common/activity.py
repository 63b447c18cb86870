"""Activities that take long: libraries name them, and the command shows them."""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import truediv
from typing import Protocol, TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class Activity:
    """Something that takes long."""

    what: str  # What it is, as people read it: `reading the data`
    announced: bool = False  # Whether it is shown before it begins, as it may block all other threads
    since: float = field(default_factory=time.monotonic)  # When it began (`time.monotonic`)
    share: Callable[[], float] = lambda: 0.0  # Returns the part that is done; 0 if that is not known


class Watcher(Protocol):
    """Somebody who shows activities."""

    def began(self, activity: Activity) -> None:
        """Take note that an activity begins, in its own thread."""

    def ended(self) -> None:
        """Take note that one is over, before anything else is printed."""


_open: list[Activity] = []
_watchers: list[Watcher] = []


@contextmanager
def activity(what: str, announced: bool = False) -> Iterator[Activity]:
    """Let :func:`current_activity` return this activity, whose text may change, while the context is open."""
    mine = Activity(what, announced)
    _open.append(mine)
    for watcher in list(_watchers):
        watcher.began(mine)
    try:
        yield mine
    finally:
        _open.remove(mine)
        for watcher in list(_watchers):
            watcher.ended()


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Tell somebody of all activities while this context is open."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def current_activity() -> Activity | None:
    """Return the current activity, if any."""
    return next(reversed(_open), None)


def advancing(items: Collection[T]) -> Iterator[T]:
    """Yield ``items``, and let the current activity tell which part of them is done."""
    doing = current_activity() or Activity("")
    for done, item in enumerate(items):
        doing.share = partial(truediv, done, len(items))
        yield item
