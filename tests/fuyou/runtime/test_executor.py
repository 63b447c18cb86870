"""Lanes run in order, each task after what it waits for; a failure stops everything; nothing is left behind."""

import gc
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from fuyou.runtime.executor import ELSEWHERE, Executor
from fuyou.schedule.tasks import Op, Task

LANES = [Op.PARAMETER_READ, Op.PARAMETER_UPLOAD, Op.UPDATE, Op.STATE_WRITE]
Made = Callable[..., Executor]


@pytest.fixture
def made() -> Iterator[Made]:
    """Makes executors, and closes them; afterwards none of their threads may be left."""
    before = set(threading.enumerate())
    executors: list[Executor] = []

    def make(
        handlers: dict, wait_event: Callable = lambda task, event: None, shared: tuple[Op, ...] = ()
    ) -> Executor:
        executors.append(Executor(handlers, wait_event, shared))
        return executors[-1]

    yield make
    for executor in executors:
        executor.close()
    assert not [
        thread for thread in threading.enumerate() if thread not in before and thread.name.startswith("fuyou")
    ]


@pytest.mark.parametrize("shared", [(), (Op.PARAMETER_READ, Op.PARAMETER_UPLOAD, Op.STATE_WRITE)], ids=len)
def test_tasks_run_after_what_they_wait_for_and_in_order(made: Made, shared: tuple[Op, ...]) -> None:
    """Random lists, with handlers that return at once, return a future, or leave it to somebody else."""
    for seed in range(20):
        chance = random.Random(seed)
        log: list[tuple[str, Task]] = []
        lock = threading.Lock()
        waits: dict[int, list[Task]] = {}

        def note(what: str, task: Task, log=log, lock=lock) -> None:
            with lock:
                log.append((what, task))

        pool = ThreadPoolExecutor(4)
        executor: Executor

        def at_once(task: Task, note=note) -> None:
            note("start", task)
            note("end", task)

        def later(task: Task, note=note, pool=pool) -> Future:
            note("start", task)

            def work() -> None:
                time.sleep(0.0005)
                note("end", task)

            return pool.submit(work)

        def elsewhere(task: Task, note=note, pool=pool) -> object:
            note("start", task)

            def work() -> None:
                note("end", task)
                executor.finish(task, started_at=1.0)  # noqa: B023 - drained before the next round

            pool.submit(work)
            return ELSEWHERE

        executor = made(
            {
                Op.PARAMETER_READ: later,
                Op.PARAMETER_UPLOAD: at_once,
                Op.UPDATE: elsewhere,
                Op.STATE_WRITE: later,
            },
            shared=shared,
        )
        tasks: list[Task] = []
        for _ in range(60):
            after = chance.sample(tasks, min(len(tasks), chance.randrange(4)))
            tasks.append(Task(chance.choice([*LANES, Op.COMPUTE]), after))
            waits[id(tasks[-1])] = after[:]
        half = len(tasks) // 2
        executor.submit(tasks[:half])
        executor.submit(tasks[half:])
        for task in tasks:
            if task.op is Op.COMPUTE:
                executor.start(task)
                note("start", task)
                note("end", task)
                executor.finish(task)
        executor.drain()
        executor.wait(tasks)
        assert all(task.done and task.finished_at >= task.started_at for task in tasks)
        assert all(task.started_at == 1.0 for task in tasks if task.op is Op.UPDATE)
        place = {(what, id(task)): index for index, (what, task) in enumerate(log)}
        assert len(place) == 2 * len(tasks)
        for task in tasks:
            for earlier in waits[id(task)]:
                assert place["end", id(earlier)] < place["start", id(task)]
        for lane in [(op,) for op in LANES] + [shared]:
            starts = [place["start", id(task)] for task in tasks if task.op in lane]
            assert starts == sorted(starts)
        pool.shutdown()


def test_device_events_are_waited_for(made: Made) -> None:
    waited: list[tuple[Task, object]] = []

    def queue(task: Task) -> None:
        task.event = f"event of {task.record}"

    executor = made({Op.PARAMETER_UPLOAD: queue}, lambda task, event: waited.append((task, event)))
    uploads = [Task(Op.PARAMETER_UPLOAD, [], record=record) for record in (0, 1)]
    plain = Task(Op.COMPUTE, [])
    compute = Task(Op.COMPUTE, [*uploads, plain])
    executor.submit([*uploads, plain, compute])
    executor.finish(plain)
    executor.start(compute)
    assert waited == [(compute, "event of 0"), (compute, "event of 1")]


class Broken(Exception):
    pass


def breaks(task: Task) -> None:
    raise Broken("read failed")


def breaks_later(task: Task) -> Future:
    future: Future = Future()
    threading.Timer(0.01, lambda: future.set_exception(Broken("write failed"))).start()
    return future


@pytest.mark.parametrize("handler", [breaks, breaks_later])
def test_a_failure_reaches_everyone_who_waits(made: Made, handler: Callable) -> None:
    started: list[Task] = []
    executor = made({Op.PARAMETER_READ: handler, Op.UPDATE: started.append})
    read = Task(Op.PARAMETER_READ, [])
    update, compute, other = Task(Op.UPDATE, [read]), Task(Op.COMPUTE, [read]), Task(Op.COMPUTE, [])
    errors: list[BaseException] = []

    def wait(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    calls = [lambda: executor.wait([update]), lambda: executor.start(compute), executor.drain]
    threads = [threading.Thread(target=wait, args=(call,)) for call in calls]
    executor.submit([read, update, compute])
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert len(errors) == 3 and len(set(map(id, errors))) == 1 and isinstance(errors[0], Broken)
    assert executor.failure is errors[0]
    assert not started and not read.done
    with pytest.raises(Broken):
        executor.wait([other])


def test_closing_drops_what_has_not_begun_and_wakes_who_waits(made: Made) -> None:
    began = threading.Event()
    release = threading.Event()
    ran: list[int] = []

    def handler(task: Task) -> None:
        began.set()
        release.wait(60)
        ran.append(task.record)

    executor = made({Op.UPDATE: handler})
    tasks = [Task(Op.UPDATE, [], record=number) for number in range(3)]
    executor.submit(tasks)
    assert began.wait(60)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            executor.wait(tasks)
        except RuntimeError as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    closer = threading.Thread(target=executor.close)
    closer.start()
    waiter.join(60)
    assert errors and "closed" in str(errors[0])
    assert closer.is_alive()  # what runs is waited for
    release.set()
    closer.join(60)
    assert not closer.is_alive() and ran == [0]
    executor.close()
    with pytest.raises(RuntimeError, match="closed"):
        executor.drain()


def test_finished_tasks_are_let_go(made: Made) -> None:
    """A run of many steps must not keep the tasks of all of them."""

    class Payload:
        pass

    executor = made({Op.UPDATE: lambda task: None, Op.PARAMETER_READ: lambda task: None})
    payloads: list[weakref.ref] = []
    last: Task | None = None
    for step in range(20):
        payload = Payload()
        payloads.append(weakref.ref(payload))
        task = Task([Op.UPDATE, Op.PARAMETER_READ][step % 2], [last] if last else [], event=payload)
        executor.submit([task])
        last = task
    executor.drain()
    executor.submit([Task(op, []) for op in (Op.UPDATE, Op.PARAMETER_READ)])  # lanes hold on to their latest
    executor.drain()
    del task, last, payload
    gc.collect()
    assert sum(payload() is not None for payload in payloads) <= 2
