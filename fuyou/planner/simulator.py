"""Simulate a list of tasks.

The lists and rules are the engine's: one lane per kind of task, first in, first out, each task when its dependencies
are done; two pools of I/O threads that share the drives; an optimizer that reads ahead into a ring of chunk buffers,
updates chunk by chunk, and writes each back. Durations come from rates; work that shares cores slows down.
"""

import gc
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from fuyou.layout.model_layout import FULL_RECOMPUTATION, ModelLayout, Recomputation
from fuyou.layout.record import Record
from fuyou.planner.rates import TaskRates
from fuyou.planner.simulated_machine import OptimizerProcess, SimulatedClock, SimulatedLink, Simulation
from fuyou.schedule.memory_plan import MemoryPlan
from fuyou.schedule.scheduler import Scheduler
from fuyou.schedule.tasks import EXCHANGES, SSD_READS, ComputeTask, Op, Resource, StepList, Task, known

_LINKS = (Resource.HOST_TO_DEVICE, Resource.DEVICE_TO_HOST, Resource.INTRA_NODE, Resource.INTER_NODE)


class Simulator:
    """Simulates consecutive steps.

    Args:
        ring_chunks, chunk_elements: number and size of the optimizer's state buffers.
    """

    def __init__(self, records: Sequence[Record], rates: TaskRates, ring_chunks: int, chunk_elements: int):
        self._rates = rates
        self._clock = SimulatedClock(rates.contention)
        self._links = {resource: SimulatedLink(self._clock, resource) for resource in _LINKS}
        self._optimizer = OptimizerProcess(self._clock, rates, records, ring_chunks, chunk_elements, self._finish)
        self._drives = self._optimizer.drives
        self._lanes: dict[Op, deque[Task]] = {op: deque() for op in Op}
        self._running: set[Op] = set()
        self._remaining: dict[Task, int] = {}  # how many tasks each one still waits for
        self._waiting: dict[Task, list[Task]] = {}  # the tasks that wait for each one
        self._steps: deque[StepList] = deque()

    def run(self, steps: Sequence[StepList]) -> Simulation:
        """Simulate ``steps``, each submitted when the caller has ended the one before.

        Sets ``started_at`` and ``finished_at`` of all tasks.
        """
        self._steps = deque(steps)
        self._hand_over()
        self._clock.run()
        assert not self._steps and not self._remaining, "some task waits for one that never comes"
        return self._clock.result

    def _hand_over(self) -> None:
        if not self._steps:
            return
        for task in self._steps.popleft().tasks:
            waits = [earlier for earlier in task.after if not earlier.done]  # for some of them twice: as often as done
            self._remaining[task] = len(waits)
            for earlier in waits:
                if earlier in self._waiting:
                    self._waiting[earlier].append(task)
                else:
                    self._waiting[earlier] = [task]
            self._lanes[self._lane(task.op)].append(task)
        for op in Op:
            self._advance(op)

    def _lane(self, op: Op) -> Op:
        if self._rates.exchanges_in_one_order and op in EXCHANGES:
            return EXCHANGES[0]
        return Op.COMPUTE if op is Op.STEP else op  # the caller ends the step after its last computation

    def _advance(self, op: Op) -> None:
        lane = self._lane(op)
        queue = self._lanes[lane]
        while queue and lane not in self._running and not self._remaining[queue[0]]:
            task = queue.popleft()
            task.started_at = self._clock.now
            self._start(task, lane)

    def _start(self, task: Task, lane: Op) -> None:
        rates = self._rates
        match task.op:
            case Op.COMPUTE:
                assert isinstance(task, ComputeTask)
                self._occupy(lane, task, Resource.GPU, rates.compute_seconds(task))
            case Op.STEP:
                self._clock.call_later(0.0, lambda: self._finish(task))
            case Op.COMMIT:
                self._occupy(lane, task, Resource.NONE, rates.commit_seconds)
            case Op.STATE_READ:
                self._optimizer.announce(known(task.record), resident=not task.nbytes)
                self._clock.call_later(0.0, lambda: self._finish(task))
            case Op.UPDATE:
                self._optimizer.update(task)
            case Op.STATE_WRITE:
                self._optimizer.finish_when_written(task)
            case _ if task.op.resource is Resource.HOST_TO_DEVICE:
                self._copy(lane, task, rates.upload_bytes_per_second)
            case _ if task.op.resource is Resource.INTRA_NODE:
                self._copy(lane, task, rates.intra_node_bytes_per_second, rates.message_seconds)
            case _ if task.op.resource is Resource.INTER_NODE:
                self._copy(lane, task, rates.inter_node_bytes_per_second, rates.message_seconds)
            case _ if task.op.resource is Resource.DEVICE_TO_HOST:
                self._copy(lane, task, rates.download_bytes_per_second)
            case Op.PARAMETER_READ_DEVICE:
                self._read_to_device(task)
            case Op.RESIDENT_WRITE:
                self._drives.submit(1, False, task.nbytes, lambda: self._finish(task))
            case _:
                self._drives.submit(0, task.op in SSD_READS, task.nbytes, lambda: self._finish(task))

    def _copy(self, lane: Op, task: Task, bytes_per_second: float, start_seconds: float = 0.0) -> None:
        self._running.add(lane)
        seconds = task.nbytes / bytes_per_second + start_seconds
        self._links[task.op.resource].copy(task, seconds, lambda: self._leave(lane, task))

    def _read_to_device(self, task: Task) -> None:
        moving = 2

        def end() -> None:
            nonlocal moving
            moving -= 1
            if not moving:
                self._finish(task)

        self._drives.submit(0, True, task.nbytes, end)
        seconds = task.nbytes / self._rates.upload_bytes_per_second
        self._links[Resource.HOST_TO_DEVICE].copy(task, seconds, end)

    def _occupy(self, lane: Op, task: Task, resource: Resource, seconds: float) -> None:
        self._running.add(lane)
        self._clock.work(resource, seconds, lambda: self._leave(lane, task))

    def _leave(self, lane: Op, task: Task) -> None:
        self._running.discard(lane)
        self._finish(task)
        self._advance(lane)

    def _finish(self, task: Task) -> None:
        task.finished_at, task.done = self._clock.now, True
        remaining = self._remaining
        del remaining[task]
        for later in self._waiting.pop(task, ()):
            remaining[later] -= 1
            if not remaining[later]:
                self._advance(later.op)
        if task.op is Op.STEP:
            self._clock.result.step_ends.append(self._clock.now)
            self._hand_over()


def simulate(
    shape: ModelLayout,
    plan: MemoryPlan,
    rates: TaskRates,
    deferred: Collection[int] = (),
    steps: int = 6,
    *,
    hold: bool = False,
    recomputation: Recomputation = FULL_RECOMPUTATION,
    clipped: bool | None = None,
    direct_reads: bool = False,
    chunk_flops: tuple[float, ...] = (),
) -> tuple[Simulation, StepList]:
    """Simulate steps of a model with a memory plan; return also the task list of the last step.

    Args:
        deferred, hold, recomputation, direct_reads: as in :class:`fuyou.schedule.scheduler.Scheduler`.
        chunk_flops: as in :class:`fuyou.schedule.batch.BatchShape`.
        clipped: with speculative updates, whether every step is clipped and updates again, or none is; else None.
    """
    scheduler = Scheduler(
        shape,
        plan.counts,
        deferred=deferred,
        hold=hold,
        speculate=clipped is not None,
        resident=plan.resident,
        recomputation=recomputation,
        direct_reads=direct_reads,
    )
    batch = replace(plan.batch_shape(plan.batch), chunk_flops=chunk_flops)
    lists: list[StepList] = []
    resolved: list[Task] = []
    with _no_garbage_collection():
        for step in range(1, steps + 1):
            lists.append(scheduler.training_step(step, batch))
            lists[-1].tasks[:0] = resolved
            resolved = scheduler.resolve_speculation(step, clipped).tasks if clipped is not None else []
        simulator = Simulator(shape.records, rates, plan.ring_chunks, plan.chunk_elements)
        return simulator.run(lists), lists[-1]


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection: scanning hundreds of thousands of live tasks takes a third of all time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
