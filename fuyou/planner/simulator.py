"""Runs a list of tasks on a clock instead of on a machine.

The same lists that the engine runs, by the same rules: one lane per kind of task, first in, first out, each task when
what it waits for is done; two pools of I/O threads that share the drives; an optimizer that reads ahead into a ring of
chunk buffers, updates chunk by chunk in order, and writes each back. Only how long a piece of work takes comes from
rates instead of from doing it; and where work shares cores, each piece goes as fast as what runs beside it lets it.
"""

import gc
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from common.intervals import Interval
from fuyou.layout.model_layout import FULL_RECOMPUTATION, BatchShape, ModelLayout, Recomputation
from fuyou.layout.record import Precision, Record
from fuyou.layout.visits import Phase
from fuyou.planner.contention import Contention
from fuyou.schedule.memory_plan import MemoryPlan
from fuyou.schedule.scheduler import Scheduler
from fuyou.schedule.tasks import SSD_READS, Op, Resource, StepList, Task

#: I/O moves in pieces of at most this size: the stripe of the store.
_PIECE_BYTES = 4 << 20
#: Coarser for large records: a simulation cuts none into more chunks than this, nor a chunk's states into more than
#: two pieces, so that plans of the largest presets take seconds.
_MOST_CHUNKS, _CHUNK_PIECES = 8, 2


@dataclass(frozen=True)
class TaskRates:
    """What a machine can do, in the units of tasks' costs."""

    flops_per_second: float
    """Of the device, on blocks of the model."""
    upload_bytes_per_second: float
    """Host to device."""
    download_bytes_per_second: float
    """Device to host, at the same time."""
    read_bytes_per_second: float
    """All SSDs together, reading only."""
    write_bytes_per_second: float
    """All SSDs together, writing only; mixed traffic takes the sum of both times."""
    adam_parameters_per_second: float
    commit_seconds: float = 0.005
    """``fdatasync`` and manifest."""
    non_block_seconds: tuple[tuple[Phase, float], ...] = ()
    """Per token, of phases outside the blocks, where they were measured; others take their FLOPs' time."""
    finish_seconds: float = 0.0
    """At the end of each block's backward visit: its gradient's part of the norm."""
    inside_bytes_per_second: float = float("inf")
    """From one rank of a node to the others."""
    across_bytes_per_second: float = float("inf")
    """From one rank to other nodes, at the same time as the other ranks of its node."""
    message_seconds: float = 0.0
    """What every exchange between ranks takes beside its bytes."""
    keep_seconds: float = 0.0
    """Per token, by which the forward pass of a block takes longer where it keeps outputs of its operators."""
    backward_flops_per_second: float | None = None
    """Of the device, on blocks in the backward pass; None: the same as in the forward pass."""
    contention: Contention | None = None
    """How much slower work gets beside other work; None: not at all."""

    def compute_seconds(self, task: Task) -> float:
        """How long a compute task takes."""
        assert task.visit is not None
        for phase, seconds in self.non_block_seconds:
            if phase is task.visit.phase:
                return seconds * task.tokens
        if task.visit.phase is not Phase.BLOCK_BACKWARD:
            return task.flops / self.flops_per_second + (self.keep_seconds * task.tokens if task.kept >= 0 else 0.0)
        finish = self.finish_seconds if task.last else 0.0
        return task.flops / (self.backward_flops_per_second or self.flops_per_second) + finish


@dataclass
class Simulation:
    """When everything happened, in seconds since the start."""

    step_ends: list[float] = field(default_factory=list)
    """When the caller ended each step."""
    busy: dict[Resource, float] = field(default_factory=dict)
    """Seconds of work that each resource did in all."""
    intervals: dict[Resource, list[Interval]] = field(default_factory=dict)
    """When each resource worked; spans that touch are one."""

    def step_seconds(self) -> float:
        """Of the last step, from the end of the one before: what a run settles to."""
        return self.step_ends[-1] - self.step_ends[-2]


@dataclass
class _Chunk:
    task: int
    """Index of the record."""
    elements: int
    precision: Precision
    first: bool
    last: bool
    resident: bool = False
    """Whether its states are in host memory, and need no buffer of the ring."""
    whole: bool = True
    """Whether its parameters are written with it; else other nodes have a part in them, and it happens elsewhere."""


class _Drives:
    """All SSDs as one server: two pools of threads queue at it, and it takes a piece of each in turn."""

    def __init__(self, simulator: "Simulator"):
        self._simulator = simulator
        self._queues: tuple[deque, deque] = (deque(), deque())
        self._turn = 0
        self._busy = False

    def submit(self, pool: int, read: bool, nbytes: int, done: Callable[[], None]) -> None:
        """Move ``nbytes``, then call ``done``."""
        pieces = max(1, -(-nbytes // self._simulator.piece_bytes))
        rates = self._simulator.rates
        seconds = nbytes / (rates.read_bytes_per_second if read else rates.write_bytes_per_second) / pieces
        for number in range(pieces):
            self._queues[pool].append((seconds, done if number == pieces - 1 else None))
        self._serve()

    def _serve(self) -> None:
        if self._busy:
            return
        queue = self._queues[self._turn] or self._queues[1 - self._turn]
        if not queue:
            return
        self._turn = 1 - self._turn if queue is self._queues[self._turn] else self._turn
        seconds, done = queue.popleft()
        self._busy = True

        def finished() -> None:
            self._busy = False
            if done is not None:
                done()
            self._serve()

        self._simulator.work(Resource.SSD, seconds, finished)


class _Cores:
    """What is at work on cores that are shared: at most one piece of each resource, each at its speed beside others."""

    def __init__(self, simulator: "Simulator", contention: Contention):
        self._simulator, self._contention = simulator, contention
        self._left: dict[Resource, float] = {}
        self._ended: dict[Resource, Callable[[], None]] = {}
        self._since = 0.0
        self._changes = 0

    def start(self, resource: Resource, seconds: float, ended: Callable[[], None]) -> None:
        """Work that would take ``seconds`` alone, then call ``ended``."""
        assert resource not in self._left
        self._advance()
        self._left[resource], self._ended[resource] = seconds, ended
        self._expect()

    def _speed(self, resource: Resource) -> float:
        return self._contention.speed(resource, self._left.keys())

    def _advance(self) -> None:
        """Take off what has been done since the last change."""
        passed, self._since = self._simulator.now - self._since, self._simulator.now
        if passed:
            for resource in self._left:
                self._left[resource] -= passed * self._speed(resource)

    def _expect(self) -> None:
        """Look at what ends first, unless something changes before that."""
        self._changes += 1
        if not self._left:
            return
        waits = {resource: max(0.0, left) / self._speed(resource) for resource, left in self._left.items()}
        first = min(waits, key=lambda resource: waits[resource])
        changes = self._changes

        def over() -> None:
            if changes != self._changes:
                return
            self._advance()
            del self._left[first]
            ended = self._ended.pop(first)
            self._expect()
            ended()

        self._simulator.later(waits[first], over)


class _Link:
    """One direction between host and device: one copy after the other, of whatever lane."""

    def __init__(self, simulator: "Simulator", resource: Resource):
        self._simulator, self._resource = simulator, resource
        self._waiting: deque[tuple[Task, float, Callable[[], None]]] = deque()
        self._busy = False

    def copy(self, task: Task, seconds: float, ended: Callable[[], None]) -> None:
        self._waiting.append((task, seconds, ended))
        self._serve()

    def _serve(self) -> None:
        if self._busy or not self._waiting:
            return
        task, seconds, ended = self._waiting.popleft()
        task.began = self._simulator.now
        self._busy = True

        def copied() -> None:
            self._busy = False
            self._serve()
            ended()

        self._simulator.work(self._resource, seconds, copied)


class _Optimizer:
    """The optimizer process: announced records are read ahead, updates come in the same order."""

    def __init__(self, simulator: "Simulator", ring_chunks: int):
        self._simulator = simulator
        self._free = ring_chunks
        self._to_read: deque[_Chunk] = deque()
        self._in_order: deque[tuple[_Chunk, list[bool]]] = deque()
        self._updates: deque[Task] = deque()
        self._unwritten: dict[int, int] = {}
        self._writing: dict[int, Task] = {}
        self._computing = False

    def announce(self, record: Record, resident: bool) -> None:
        """``resident``: its states are in host memory already."""
        self._to_read.extend(replace(chunk, resident=resident) for chunk in self._simulator.chunks(record))
        self._read()

    def update(self, task: Task) -> None:
        self._updates.append(task)
        if task.target >= 0:
            self._unwritten[task.record] = len(self._simulator.chunks(self._simulator.records[task.record]))
        self._compute()

    def written(self, task: Task) -> None:
        """``task`` is done when everything of its record is written, which may have happened already."""
        if self._unwritten.get(task.record):
            self._writing[task.record] = task
        else:
            self._simulator.finish(task)

    def _read(self) -> None:
        while self._to_read and (self._free or self._to_read[0].resident):
            chunk = self._to_read.popleft()
            ready = [chunk.resident]
            self._in_order.append((chunk, ready))
            if chunk.resident:
                self._compute()
                continue
            self._free -= 1

            def arrived(ready: list[bool] = ready) -> None:
                ready[0] = True
                self._compute()

            self._simulator.drives.submit(1, True, chunk.elements * chunk.precision.state_bytes, arrived)

    def _compute(self) -> None:
        if self._computing or not self._updates or not self._in_order or not self._in_order[0][1][0]:
            return
        chunk, _ = self._in_order.popleft()
        task = self._updates[0]
        if chunk.first:
            task.began = self._simulator.now
        self._computing = True
        seconds = chunk.elements / self._simulator.rates.adam_parameters_per_second

        def updated() -> None:
            self._computing = False
            if task.target >= 0:
                width = chunk.precision.state_bytes + (chunk.precision.parameter_bytes if chunk.whole else 0)
                nbytes = chunk.elements * width
                self._simulator.drives.submit(1, False, nbytes, lambda: self._wrote(chunk))
            elif not chunk.resident:  # states that stay in host memory and were read the first time: nothing to write
                self._free += 1
                self._read()
            if chunk.last:
                self._updates.popleft()
                self._simulator.finish(task)
            self._compute()

        self._simulator.work(Resource.ADAM, seconds, updated)

    def _wrote(self, chunk: _Chunk) -> None:
        self._free += not chunk.resident
        self._unwritten[chunk.task] -= 1
        if not self._unwritten[chunk.task]:
            task = self._writing.pop(chunk.task, None)
            if task is not None:
                self._simulator.finish(task)
        self._read()


class Simulator:
    """Simulates consecutive steps.

    Args:
        records: of the model.
        rates: of the machine.
        ring_chunks, chunk_elements: the optimizer's state buffers.
    """

    def __init__(self, records: Sequence[Record], rates: TaskRates, ring_chunks: int, chunk_elements: int):
        self.records, self.rates = records, rates
        largest = max(record.owned for record in records)
        scale = max(1, -(-largest // (chunk_elements * _MOST_CHUNKS)))
        self._chunk_elements = chunk_elements * scale
        state_bytes = max(record.precision.state_bytes for record in records)
        self.piece_bytes = max(_PIECE_BYTES, self._chunk_elements * state_bytes // _CHUNK_PIECES)
        self.drives = _Drives(self)
        self._optimizer = _Optimizer(self, ring_chunks if scale == 1 else max(2, -(-ring_chunks // scale)))
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._lanes: dict[Op, deque[Task]] = {op: deque() for op in Op}
        self._running: set[Op] = set()
        self._remaining: dict[Task, int] = {}
        self._after: dict[Task, list[Task]] = {}
        self._links = {
            way: _Link(self, way)
            for way in (
                Resource.HOST_TO_DEVICE, Resource.DEVICE_TO_HOST, Resource.INTRA_NODE, Resource.INTER_NODE
            )
        }  # fmt: skip
        self._cores = _Cores(self, rates.contention) if rates.contention is not None else None
        self._result = Simulation()

    def run(self, steps: Sequence[StepList]) -> Simulation:
        """Simulate ``steps`` one after the other, each handed over when the caller has ended the one before.

        Tasks' ``began`` and ``ended`` are set.
        """
        self._coming = deque(steps)
        self._hand_over()
        while self._events:
            self._now, _, action = heapq.heappop(self._events)
            action()
        assert not self._coming and not self._remaining, "some task waits for one that never comes"
        return self._result

    # -- for the parts --------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return self._now

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Call ``action`` when ``seconds`` have passed."""
        heapq.heappush(self._events, (self._now + seconds, next(self._number), action))

    def work(self, resource: Resource, seconds: float, ended: Callable[[], None]) -> None:
        """Let ``resource`` work for what takes ``seconds`` with nothing beside it, then call ``ended``."""
        began = self._now

        def over() -> None:
            self._count(resource, began)
            ended()

        if self._cores is not None and resource is not Resource.NONE:
            self._cores.start(resource, seconds, over)
        else:
            self.later(seconds, over)

    def _count(self, resource: Resource, began: float) -> None:
        """``resource`` has worked since ``began``."""
        self._result.busy[resource] = self._result.busy.get(resource, 0.0) + self._now - began
        spans = self._result.intervals.setdefault(resource, [])
        if spans and spans[-1][1] >= began:
            spans[-1] = (spans[-1][0], max(spans[-1][1], self._now))
        else:
            spans.append((began, self._now))

    def finish(self, task: Task) -> None:
        """``task`` is done: start what waited for it."""
        task.ended, task.done = self._now, True
        remaining = self._remaining
        del remaining[task]
        for later in self._after.pop(task, ()):
            remaining[later] -= 1
            if not remaining[later]:
                self._advance(later.op)
        if task.op is Op.STEP:
            self._result.step_ends.append(self._now)
            self._hand_over()

    def chunks(self, record: Record) -> list[_Chunk]:
        """The pieces in which the optimizer works on ``record``."""
        sizes = [chunk.stop - chunk.start for chunk in record.chunks(self._chunk_elements)]
        return [
            _Chunk(
                record.index,
                size,
                record.precision,
                number == 0,
                number == len(sizes) - 1,
                whole=record.share.nodes == 1,
            )
            for number, size in enumerate(sizes)
        ]

    # -- lanes ----------------------------------------------------------------------------------------------------

    def _hand_over(self) -> None:
        if not self._coming:
            return
        for task in self._coming.popleft().tasks:
            waits = [earlier for earlier in task.after if not earlier.done]  # for some of them twice: as often as done
            self._remaining[task] = len(waits)
            for earlier in waits:
                if earlier in self._after:
                    self._after[earlier].append(task)
                else:
                    self._after[earlier] = [task]
            self._lanes[self._lane(task.op)].append(task)
        for op in Op:
            self._advance(op)

    @staticmethod
    def _lane(op: Op) -> Op:
        return Op.COMPUTE if op is Op.STEP else op  # the caller ends the step after its last computation

    def _advance(self, op: Op) -> None:
        lane = self._lane(op)
        queue = self._lanes[lane]
        while queue and lane not in self._running and not self._remaining[queue[0]]:
            task = queue.popleft()
            task.began = self._now
            self._start(task, lane)

    def _start(self, task: Task, lane: Op) -> None:
        rates = self.rates
        match task.op:
            case Op.COMPUTE:
                self._occupy(lane, task, Resource.GPU, rates.compute_seconds(task))
            case Op.STEP:
                self.later(0.0, lambda: self.finish(task))
            case Op.COMMIT:
                self._occupy(lane, task, Resource.NONE, rates.commit_seconds)
            case Op.STATE_READ:
                self._optimizer.announce(self.records[task.record], resident=not task.nbytes)
                self.later(0.0, lambda: self.finish(task))
            case Op.UPDATE:
                self._optimizer.update(task)
            case Op.STATE_WRITE:
                self._optimizer.written(task)
            case _ if task.op.resource is Resource.HOST_TO_DEVICE:
                self._copy(lane, task, rates.upload_bytes_per_second)
            case _ if task.op.resource is Resource.INTRA_NODE:
                self._copy(lane, task, rates.inside_bytes_per_second, rates.message_seconds)
            case _ if task.op.resource is Resource.INTER_NODE:
                self._copy(lane, task, rates.across_bytes_per_second, rates.message_seconds)
            case _ if task.op.resource is Resource.DEVICE_TO_HOST:
                self._copy(lane, task, rates.download_bytes_per_second)
            case Op.RESIDENT_WRITE:
                self.drives.submit(1, False, task.nbytes, lambda: self.finish(task))
            case _:
                self.drives.submit(0, task.op in SSD_READS, task.nbytes, lambda: self.finish(task))

    def _copy(self, lane: Op, task: Task, bytes_per_second: float, start_seconds: float = 0.0) -> None:
        """Lanes of one direction share its link, and so do those of one network."""
        self._running.add(lane)
        seconds = task.nbytes / bytes_per_second + start_seconds
        self._links[task.op.resource].copy(task, seconds, lambda: self._leave(lane, task))

    def _occupy(self, lane: Op, task: Task, resource: Resource, seconds: float) -> None:
        """``task`` holds its lane until it is done."""
        self._running.add(lane)
        self.work(resource, seconds, lambda: self._leave(lane, task))

    def _leave(self, lane: Op, task: Task) -> None:
        self._running.discard(lane)
        self.finish(task)
        self._advance(lane)


def simulate(
    shape: ModelLayout,
    plan: MemoryPlan,
    rates: TaskRates,
    deferred: Collection[int] = (),
    steps: int = 6,
    hold: bool = False,
    recomputation: Recomputation = FULL_RECOMPUTATION,
    commit: bool = True,
    clipped: bool | None = None,
) -> tuple[Simulation, StepList]:
    """Steps of this model with these buffers, and the task list of the last one.

    ``deferred``, ``hold``, ``recomputation`` and ``commit`` are the scheduler's. ``clipped``: updates are speculative,
    and done again in every step or in none; None: they are not speculative.
    """
    scheduler = Scheduler(
        shape, plan.counts, deferred=deferred, hold=hold, speculate=clipped is not None, resident=plan.resident,
        recomputation=recomputation,
    )  # fmt: skip
    batch = BatchShape(plan.batch.micro_batches, plan.activation_bytes, plan.batch.mean_tokens, plan.kept_bytes)
    lists: list[StepList] = []
    settled: list[Task] = []
    with _uncollected():
        for step in range(1, steps + 1):
            lists.append(scheduler.training_step(step, batch, commit=commit))
            lists[-1].tasks[:0] = settled
            settled = scheduler.settle(step, clipped).tasks if clipped is not None else []
        simulator = Simulator(shape.records, rates, plan.ring_chunks, plan.chunk_elements)
        return simulator.run(lists), lists[-1]


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python's garbage collector, which would look at hundreds of thousands of tasks again and again (a third
    of all time), and none of them is garbage before the end."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
