"""A transfer is one future for many I/O calls, each of which may be made to take longer."""

import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, Literal, Protocol


class Clock(Protocol):
    """The time of one drive."""

    def during(
        self, direction: Literal["read", "write"], nbytes: int, work: Callable[..., None], *arguments: Any
    ) -> None:
        """Run ``work(*arguments)``, and return when the drive has had time to move ``nbytes`` bytes."""
        ...

    def close(self) -> None: ...


class Throttle(Protocol):
    """Slows drives down, for benchmarks. The optimizer process gets a pickled copy."""

    def clock(self, directory: Path) -> Clock:
        """Return the clock of the drive that ``directory``, a store's, lies on."""
        ...


class Transfer:
    """Pieces of work on executors, with a future that completes when *all* of them have ended, also after a failure.

    So whoever sees the future done may reuse or free the buffer, because nothing writes into it any more. The pieces
    hold the buffer until then, and release it afterwards even if the future is kept.
    """

    def __init__(self, pieces: int) -> None:
        self.future: Future[None] = Future()
        self.future.set_running_or_notify_cancel()  # from here on it cannot be cancelled: the drives would not notice
        self._remaining = pieces
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def submit(self, executor: Executor, work: Callable[..., None], *arguments: Any) -> None:
        """Run ``work(*arguments)`` as one of the pieces; exactly as many calls must be made as were announced."""
        try:
            executor.submit(self._run, [work, arguments])
        except BaseException as error:  # an executor that was shut down: this piece will never run
            self._ended(error)

    def _run(self, piece: list[Any]) -> None:
        work, arguments = piece
        piece.clear()  # the executor holds it until after the future is done
        error = None
        if self._error is None:  # after a failure the rest is pointless
            try:
                work(*arguments)
            except BaseException as caught:
                error = caught
                _forget_locals(error)
        del work, arguments
        self._ended(error)

    def _ended(self, error: BaseException | None) -> None:
        with self._lock:
            self._error = self._error or error
            self._remaining -= 1
            last = self._remaining == 0
        if not last:
            return
        if self._error is not None:
            self.future.set_exception(self._error)
        else:
            self.future.set_result(None)


def _forget_locals(error: BaseException | None) -> None:
    """Clear the variables in the traceback of ``error``: they would keep the buffer alive as long as the error."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
