"""Runs a list of tasks: one lane per kind of task, first in, first out, each task when what it waits for is done.

Compute tasks run in the caller's thread (it is the caller's autograd that runs them); every other kind has a thread.
Each task waits only for tasks that stand before it in the list and every lane keeps the list's order, so the
earliest unfinished task can always run: there is no deadlock to detect. Kinds may share a lane: NCCL wants all ranks to
launch on their communicators in one order, and the list is the same on all ranks.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from functools import partial

from fuyou.schedule.tasks import Op, Task

# Does a task's work. Returns None if it is done (or queued on the device: `task.event` is set), a future if it is still
# running, or :data:`ELSEWHERE` if other code calls :meth:`Executor.finish`.
Handler = Callable[[Task], "Future | object | None"]
ELSEWHERE = object()


class Executor:
    """The lanes of tasks, and what each task waits for.

    Args:
        handlers: what to do for each kind of task that has a lane.
        wait_event: makes the calling thread's work wait for a finished task's device event. Given the waiting task
            and the event.
        in_one_order: kinds that share a lane.
    """

    def __init__(
        self,
        handlers: Mapping[Op, Handler],
        wait_event: Callable[[Task, object], None],
        in_one_order: Collection[Op] = (),
    ):
        self._handlers = handlers
        self._wait_event = wait_event
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # Tasks are there, all are done, or lanes end
        # Wakes those who wait for a task, and no other thread
        self._awaited: dict[Task, threading.Condition] = {}
        shared: deque[Task] = deque()
        self._queues: dict[Op, deque[Task]] = {
            op: shared if op in in_one_order else deque() for op in handlers
        }
        self._failure: BaseException | None = None
        self._unfinished = 0
        lanes = {id(queue): (op.label, queue) for op, queue in self._queues.items()}
        self._threads = [
            threading.Thread(target=self._run_lane, args=(queue,), name=f"fuyou {label}", daemon=True)
            for label, queue in lanes.values()
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, tasks: Iterable[Task]) -> None:
        """Append tasks to their lanes. Kinds without a lane are left to the caller."""
        with self._changed:
            for task in tasks:
                queue = self._queues.get(task.op)
                if queue is not None:
                    queue.append(task)
                    self._unfinished += 1
            self._changed.notify_all()

    def wait(self, tasks: Iterable[Task]) -> None:
        """Block until all of ``tasks`` are done.

        Raises:
            BaseException: if any task has failed.
        """
        with self._lock:
            for task in reversed(list(tasks)):  # When the last one is done, most are
                while not task.done and self._failure is None:
                    self._awaited.setdefault(task, threading.Condition(self._lock)).wait()
            if self._failure is not None:
                raise self._failure

    def start(self, task: Task) -> None:
        """Block until what ``task`` waits for is done, on the device as well, and note the time."""
        self.wait(task.after)
        for earlier in task.after:
            if earlier.event is not None:
                self._wait_event(task, earlier.event)
        task.started_at = time.monotonic()

    def finish(self, task: Task, started_at: float | None = None) -> None:
        with self._lock:
            if started_at is not None:
                task.started_at = started_at
            task.finished_at = time.monotonic()
            self._end(task)
            if task.op in self._queues:
                self._unfinished -= 1
                if not self._unfinished:
                    self._changed.notify_all()

    def finish_all(self, tasks: Iterable[Task]) -> None:
        """Mark tasks without a lane done that will not run, and wake all who wait."""
        with self._lock:
            for task in tasks:
                self._end(task)

    def _end(self, task: Task) -> None:
        task.done = True
        awaited = self._awaited.pop(task, None)
        if awaited is not None:
            awaited.notify_all()

    def fail(self, error: BaseException) -> None:
        """Stop everything: every waiting thread raises ``error``. The first failure is the one that counts."""
        with self._lock:
            if self._failure is None:
                self._failure = error
            for condition in (self._changed, *self._awaited.values()):
                condition.notify_all()

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    def drain(self) -> None:
        """Block until every submitted task is done."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or not self._unfinished)
            if self._failure is not None:
                raise self._failure

    def close(self) -> None:
        """End the lanes; what has not begun is dropped."""
        self.fail(RuntimeError("the engine has been closed"))
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _run_lane(self, queue: deque[Task]) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: queue or self._failure is not None)
                if self._failure is not None:
                    return
                task = queue.popleft()
            try:
                self.start(task)
                result = self._handlers[task.op](task)
                if result is None:
                    self.finish(task)
                elif isinstance(result, Future):
                    result.add_done_callback(partial(self._finish_future, task))
            except BaseException as error:
                self.fail(error)
                return

    def _finish_future(self, task: Task, future: Future) -> None:
        error = future.exception()
        if error is not None:
            self.fail(error)
        else:
            self.finish(task)
