"""Simulate a list of tasks.

The lists and rules are the engine's: one lane per kind of task, first in, first out, each task when its dependencies
are done; two pools of I/O threads that share the drives; an optimizer that reads ahead into a ring of chunk buffers,
updates chunk by chunk, and writes each back. Durations come from rates.
"""

import bisect
import functools
import gc
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from common.units import Interval
from fuyou.layout.model_layout import FULL_RECOMPUTATION, ModelLayout, Phase, Recomputation
from fuyou.layout.record import Record
from fuyou.schedule.memory_plan import MemoryPlan
from fuyou.schedule.scheduler import Scheduler
from fuyou.schedule.tasks import EXCHANGES, SSD_READS, ComputeTask, Op, Resource, StepList, Task, known

_PIECE_BYTES = 4 << 20  # I/O moves in pieces of at most this size: the stripe of the store
# Large records are simulated more coarsely, so that plans of the largest presets take seconds: none is cut into more
# chunks than this, nor a chunk's states into more than two pieces.
_MAX_CHUNKS = 8
_CHUNK_PIECES = 2
Done = Callable[[], None]  # What is called when a piece of work is done


@dataclass(frozen=True)
class TaskRates:
    """Rates of a machine, in the units in which tasks count their work."""

    flops_per_second: float  # FLOPs per second of the device, on blocks of the model
    upload_bytes_per_second: float  # Bytes per second from host to device
    download_bytes_per_second: float  # Bytes per second from device to host, at the same time
    read_bytes_per_second: float  # Bytes per second from all SSDs together, reading only
    write_bytes_per_second: float  # To all SSDs, writing only; mixed traffic takes the sum of both times
    adam_parameters_per_second: float
    commit_seconds: float = 0.005  # Seconds for `fdatasync` and the manifest
    non_block_seconds: tuple[tuple[Phase, float], ...] = ()  # Measured seconds per token, outside blocks
    finish_seconds: float = 0.0  # Seconds per block's backward visit for its gradient's norm
    # Bytes per second from one rank of a node to the others
    intra_node_bytes_per_second: float = float("inf")
    inter_node_bytes_per_second: float = float("inf")  # From one rank to other nodes, while all send
    message_seconds: float = 0.0  # Seconds that every exchange between ranks takes besides its bytes
    exchanges_in_one_order: bool = False  # Whether exchanges run one at a time, in order (NCCL)
    backward_flops_per_second: float | None = None  # On blocks; None: as in the forward pass
    head_flops_per_second: float | None = None  # Outside blocks; None: as on blocks
    # Seconds of the host's work for a micro-batch of a block's visit, forward and backward: launches wait for it
    host_seconds: tuple[float, float] = (0.0, 0.0)

    def compute_seconds(self, task: ComputeTask) -> float:
        for phase, seconds in self.non_block_seconds:
            if phase is task.visit.phase:
                return seconds * task.tokens
        host = self.host_seconds if task.visit.part is None else (0.0, 0.0)
        if task.visit.phase is Phase.BLOCK_FORWARD:
            return max(task.flops / self.flops_per_second, host[0])
        if task.visit.phase is not Phase.BLOCK_BACKWARD:
            return task.flops / (self.head_flops_per_second or self.flops_per_second)
        finishes = task.last and (task.visit.part is None or bool(task.visit.completes))
        finish = self.finish_seconds if finishes else 0.0
        return max(task.flops / (self.backward_flops_per_second or self.flops_per_second), host[1]) + finish


class Simulation:
    """Simulated time: runs actions in the order of their times, and notes when each resource has worked.

    Attributes:
        now: seconds since the start.
        step_ends: times at which the caller ended each step.
        intervals: times of work of each resource, merged.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.step_ends: list[float] = []
        self.intervals: dict[Resource, list[Interval]] = {}
        self._events: list[tuple[float, int, Done]] = []
        self._number = itertools.count()

    def step_seconds(self) -> float:
        """Return the length of the last step, from the end of the one before."""
        return self.step_ends[-1] - self.step_ends[-2]

    def run(self) -> None:
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()

    def call_later(self, seconds: float, action: Done) -> None:
        self.call_at(self.now + seconds, action)

    def call_at(self, time: float, action: Done) -> None:
        heapq.heappush(self._events, (time, next(self._number), action))

    def work(self, resource: Resource, seconds: float, done: Done) -> None:
        """Let ``resource`` work for ``seconds``, then call ``done``."""
        end = self.now + seconds
        self.note(resource, self.now, end)
        self.call_at(end, done)

    def note(self, resource: Resource, start: float, end: float) -> None:
        """Note that ``resource`` works from ``start`` to ``end``."""
        spans = self.intervals.setdefault(resource, [])
        if spans and spans[-1][1] >= start:
            spans[-1] = (spans[-1][0], max(spans[-1][1], end))
        else:
            spans.append((start, end))


class SimulatedLink:
    """A link or a network: moves one thing after the other."""

    def __init__(self, clock: Simulation, bytes_per_second: float, start_seconds: float = 0.0):
        self._clock = clock
        self._free_at = 0.0
        self._bytes_per_second = bytes_per_second
        self._start_seconds = start_seconds

    def move(self, task: Task, done: Done) -> None:
        """Move the bytes of ``task``, then call ``done``."""
        task.started_at = max(self._clock.now, self._free_at)
        self._free_at = task.started_at + (task.nbytes / self._bytes_per_second + self._start_seconds)
        self._clock.call_at(self._free_at, done)


@dataclass(eq=False)
class _Transfer:
    """Bytes that move from or to the drives, in pieces of equal length."""

    pool: int
    seconds: float  # Seconds of a piece
    pieces: int  # Number of pieces that are left
    done: Done


class SimulatedDrives:
    """All SSDs: move one piece after the other, alternately for two pools of threads.

    While only one pool has work, the pieces of a transfer are one event, which work for the other pool cuts short.
    """

    def __init__(self, clock: Simulation, rates: TaskRates, piece_bytes: int):
        self._clock = clock
        self._rates = rates
        self._piece_bytes = piece_bytes
        self._queues: tuple[deque[_Transfer], ...] = (deque(), deque())
        self._turn = 0
        self._current: _Transfer | None = None
        self._began = 0.0
        self._ends: list[float] = []  # Times at which pieces of the current transfer end

    def move(self, pool: int, read: bool, nbytes: int, done: Done) -> None:
        """Move ``nbytes``, then call ``done``."""
        rate = self._rates.read_bytes_per_second if read else self._rates.write_bytes_per_second
        pieces = max(1, -(-nbytes // self._piece_bytes))
        self._queues[pool].append(_Transfer(pool, nbytes / rate / pieces, pieces, done))
        if self._current is None:
            self._serve()
        elif self._current.pool != pool and len(self._ends) > 1:
            self._ends = self._ends[: bisect.bisect_left(self._ends, self._clock.now) + 1]
            self._end_later()

    def _serve(self) -> None:
        queue = self._queues[self._turn] or self._queues[1 - self._turn]
        if not queue:
            return
        transfer = queue[0]
        now = self._clock.now
        self._current = transfer
        self._began = now
        self._turn = 1 - transfer.pool
        if transfer.pieces == 1 or self._queues[self._turn]:
            self._ends = [now + transfer.seconds]
        else:  # each from the end of the one before, as if it were an event
            self._ends = list(itertools.accumulate([transfer.seconds] * transfer.pieces, initial=now))[1:]
        self._end_later()

    def _end_later(self) -> None:
        self._clock.call_at(self._ends[-1], functools.partial(self._end, self._ends))

    def _end(self, ends: list[float]) -> None:
        transfer = self._current
        if ends is not self._ends or transfer is None:
            return  # cut short
        self._clock.note(Resource.SSD, self._began, self._clock.now)
        self._current = None
        transfer.pieces -= len(ends)
        if not transfer.pieces:
            self._queues[transfer.pool].popleft()
            transfer.done()
        if self._current is None:
            self._serve()


@dataclass
class _Chunk:
    """Elements of a record that the optimizer updates at once."""

    record: int
    elements: int
    last: bool  # Whether it ends the record
    read_bytes: int  # States from the drives; 0 if they stay in host memory, and need no buffer of the ring
    write_bytes: int  # States and, unless other nodes have a part in them, parameters
    ready: bool = False  # Whether its states are there


class OptimizerProcess:
    """The optimizer process: reads announced records' states ahead into a ring of chunk buffers, updates chunk by chunk
    in the same order, and writes each back.

    Args:
        ring_chunks, chunk_elements: number and size of the state buffers.
        finish: called with each task that is done.

    Attributes:
        drives: the SSDs, shared with other tasks.
    """

    def __init__(
        self,
        clock: Simulation,
        rates: TaskRates,
        records: Sequence[Record],
        ring_chunks: int,
        chunk_elements: int,
        finish: Callable[[Task], None],
    ):
        scale = max(1, -(-max(record.owned for record in records) // (chunk_elements * _MAX_CHUNKS)))
        self._chunk_elements = chunk_elements * scale
        chunk_bytes = max(record.precision.state_nbytes(self._chunk_elements) for record in records)
        piece_bytes = max(_PIECE_BYTES, chunk_bytes // _CHUNK_PIECES)
        self.drives = SimulatedDrives(clock, rates, piece_bytes)
        self._clock = clock
        self._rates = rates
        self._records = records
        self._finish = finish
        self._free = ring_chunks if scale == 1 else max(2, -(-ring_chunks // scale))
        self._to_read: deque[_Chunk] = deque()
        self._to_update: deque[_Chunk] = deque()
        self._updates: deque[Task] = deque()
        self._unwritten: dict[int, int] = {}  # record -> number of its chunks that are not yet written
        self._writes: dict[int, Task] = {}  # record -> the task that ends when all of it is written
        self._updating = False
        self._begins = True  # Whether the next chunk is its record's first

    def announce(self, index: int, resident: bool) -> None:
        record = self._records[index]
        sizes = [chunk.stop - chunk.start for chunk in record.chunks(self._chunk_elements)]
        width = record.precision.parameter_bytes if record.share.nodes == 1 else 0
        for number, size in enumerate(sizes, 1):
            states = record.precision.state_nbytes(size)
            read_bytes = 0 if resident else states
            self._to_read.append(_Chunk(index, size, number == len(sizes), read_bytes, states + size * width))
        self._read()

    def update(self, task: Task) -> None:
        self._updates.append(task)
        if task.target is not None:
            record = known(task.record)
            self._unwritten[record] = len(self._records[record].chunks(self._chunk_elements))
        self._compute()

    def finish_when_written(self, task: Task) -> None:
        record = known(task.record)
        if self._unwritten.get(record):
            self._writes[record] = task
        else:
            self._finish(task)

    def _read(self) -> None:
        while self._to_read and (self._free or not self._to_read[0].read_bytes):
            chunk = self._to_read.popleft()
            self._to_update.append(chunk)
            if chunk.read_bytes:
                self._free -= 1
                self.drives.move(1, True, chunk.read_bytes, functools.partial(self._arrive, chunk))
            else:
                self._arrive(chunk)

    def _arrive(self, chunk: _Chunk) -> None:
        chunk.ready = True
        self._compute()

    def _compute(self) -> None:
        if self._updating or not self._updates or not self._to_update or not self._to_update[0].ready:
            return
        chunk = self._to_update.popleft()
        task = self._updates[0]
        if self._begins:
            task.started_at = self._clock.now
        self._updating = True
        self._begins = chunk.last

        def end() -> None:
            self._updating = False
            if task.target is not None:
                self.drives.move(1, False, chunk.write_bytes, lambda: self._written(chunk))
            elif chunk.read_bytes:
                # Other states stay in host memory and were read the first time: nothing to write
                self._free += 1
                self._read()
            if chunk.last:
                self._updates.popleft()
                self._finish(task)
            self._compute()

        self._clock.work(Resource.ADAM, chunk.elements / self._rates.adam_parameters_per_second, end)

    def _written(self, chunk: _Chunk) -> None:
        self._free += bool(chunk.read_bytes)
        self._unwritten[chunk.record] -= 1
        if not self._unwritten[chunk.record]:
            task = self._writes.pop(chunk.record, None)
            if task is not None:
                self._finish(task)
        self._read()


class Simulator:
    """Simulates consecutive steps.

    Args:
        ring_chunks, chunk_elements: number and size of the optimizer's state buffers.
    """

    def __init__(self, records: Sequence[Record], rates: TaskRates, ring_chunks: int, chunk_elements: int):
        self._rates = rates
        self._clock = Simulation()
        intra_node = rates.intra_node_bytes_per_second
        inter_node = rates.inter_node_bytes_per_second
        self._links = {
            Resource.HOST_TO_DEVICE: SimulatedLink(self._clock, rates.upload_bytes_per_second),
            Resource.DEVICE_TO_HOST: SimulatedLink(self._clock, rates.download_bytes_per_second),
            Resource.INTRA_NODE: SimulatedLink(self._clock, intra_node, rates.message_seconds),
            Resource.INTER_NODE: SimulatedLink(self._clock, inter_node, rates.message_seconds),
        }
        self._optimizer = OptimizerProcess(
            self._clock, rates, records, ring_chunks, chunk_elements, self._finish
        )
        self._drives = self._optimizer.drives
        self._lanes: dict[Op, deque[Task]] = {op: deque() for op in Op}
        self._lane = {op: _lane(op, rates.exchanges_in_one_order) for op in Op}
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
        return self._clock

    def _hand_over(self) -> None:
        if not self._steps:
            return
        for task in self._steps.popleft().tasks:
            waits = [
                earlier for earlier in task.after if not earlier.done
            ]  # for some of them twice: as often as done
            self._remaining[task] = len(waits)
            for earlier in waits:
                if earlier in self._waiting:
                    self._waiting[earlier].append(task)
                else:
                    self._waiting[earlier] = [task]
            self._lanes[self._lane[task.op]].append(task)
        for op in Op:
            self._advance(op)

    def _advance(self, op: Op) -> None:
        lane = self._lane[op]
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
            case _ if (link := self._links.get(task.op.resource)) is not None:
                self._running.add(lane)
                link.move(task, functools.partial(self._leave, lane, task))
            case Op.STEP:
                self._clock.call_later(0.0, functools.partial(self._finish, task))
            case Op.COMMIT:
                self._occupy(lane, task, Resource.NONE, rates.commit_seconds)
            case Op.STATE_READ:
                self._optimizer.announce(known(task.record), resident=not task.nbytes)
                self._clock.call_later(0.0, functools.partial(self._finish, task))
            case Op.UPDATE:
                self._optimizer.update(task)
            case Op.STATE_WRITE:
                self._optimizer.finish_when_written(task)
            case Op.PARAMETER_READ_DEVICE:
                self._read_to_device(task)
            case Op.RESIDENT_WRITE:
                self._drives.move(1, False, task.nbytes, functools.partial(self._finish, task))
            case _:
                self._drives.move(0, task.op in SSD_READS, task.nbytes, functools.partial(self._finish, task))

    def _read_to_device(self, task: Task) -> None:
        ended: list[None] = []

        def end() -> None:
            ended.append(None)
            if len(ended) == 2:
                self._finish(task)

        self._drives.move(0, True, task.nbytes, end)
        self._links[Resource.HOST_TO_DEVICE].move(task, end)

    def _occupy(self, lane: Op, task: Task, resource: Resource, seconds: float) -> None:
        self._running.add(lane)
        self._clock.work(resource, seconds, functools.partial(self._leave, lane, task))

    def _leave(self, lane: Op, task: Task) -> None:
        self._running.discard(lane)
        self._finish(task)
        self._advance(lane)

    def _finish(self, task: Task) -> None:
        task.finished_at = self._clock.now
        task.done = True
        remaining = self._remaining
        del remaining[task]
        for later in self._waiting.pop(task, ()):
            remaining[later] -= 1
            if not remaining[later]:
                self._advance(later.op)
        if task.op is Op.STEP:
            self._clock.step_ends.append(self._clock.now)
            self._hand_over()


def _lane(op: Op, exchanges_in_one_order: bool) -> Op:
    """Return the lane of a kind of task."""
    if exchanges_in_one_order and op in EXCHANGES:
        return EXCHANGES[0]
    return Op.COMPUTE if op is Op.STEP else op  # the caller ends the step after its last computation


@dataclass(frozen=True)
class SteadyState:
    """Steps as they repeat, from one commit to the next."""

    simulation: Simulation
    cycle: tuple[StepList, ...]  # The last simulated steps, which end with one that is committed
    repeats: tuple[int, ...]  # Number of steps between two commits that are like each of them

    def mean(self, value: Callable[[StepList], float]) -> float:
        """Return the mean of ``value`` over the steps of a cycle."""
        return self._mean([value(step) for step in self.cycle])

    def step_seconds(self) -> float:
        """Return the mean length of a step, from the end of the one before."""
        ends = self.simulation.step_ends[-len(self.cycle) - 1 :]
        return self._mean([end - before for before, end in itertools.pairwise(ends)])

    def _mean(self, values: Sequence[float]) -> float:
        total = sum(value * count for value, count in zip(values, self.repeats, strict=True))
        return total / sum(self.repeats)


# Steps that are simulated of a longer cycle. What a commit leaves to write slows the steps right after it; the last one
# before the next commit stands for all others.
_MAX_CYCLE = 4


def simulate(
    layout: ModelLayout,
    plan: MemoryPlan,
    rates: TaskRates,
    deferred: Collection[int] = (),
    steps: int = 6,
    *,
    commit_every: int = 1,
    recomputation: Recomputation = FULL_RECOMPUTATION,
    clipped: bool | None = None,
    direct_reads: bool = False,
    chunk_flops: tuple[tuple[float, float], ...] = (),
) -> SteadyState:
    """Simulate steps of a model with a memory plan until they repeat.

    Args:
        steps: least number of steps to simulate; whole cycles of ``commit_every`` steps are.
        commit_every: steps from one commit to the next.
        deferred, recomputation, direct_reads: as in :class:`fuyou.schedule.scheduler.Scheduler`.
        chunk_flops: as in :class:`fuyou.schedule.batch.BatchShape`.
        clipped: with speculative updates, whether every step is clipped and updates again, or none is; else None.
    """
    scheduler = Scheduler(
        layout,
        plan.counts,
        deferred=deferred,
        speculate=clipped is not None,
        resident=plan.resident,
        recomputation=recomputation,
        direct_reads=direct_reads,
    )
    batch = replace(plan.batch_shape(plan.batch), chunk_flops=chunk_flops)
    length = min(commit_every, _MAX_CYCLE)
    # The first step reads what stays in host memory from then on, so it is not in the cycle that counts.
    count = max(steps, length + 1)
    count += -count % length
    repeats = [1] * length
    if length > 1:
        repeats[-2] += commit_every - length
    lists: list[StepList] = []
    resolved: list[Task] = []
    with no_garbage_collection():
        for step in range(1, count + 1):
            lists.append(scheduler.training_step(step, batch, commit=step % length == 0))
            lists[-1].tasks[:0] = resolved
            resolved = scheduler.resolve_speculation(step, clipped).tasks if clipped is not None else []
        simulator = Simulator(layout.records, rates, plan.ring_chunks, plan.chunk_elements)
        return SteadyState(simulator.run(lists), tuple(lists[-length:]), tuple(repeats))


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection: scanning hundreds of thousands of live tasks takes a third of all time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
