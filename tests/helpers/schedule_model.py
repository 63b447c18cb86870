"""A machine without bytes that runs schedules: every buffer and place on SSD holds the *name* of what should be there.

It knows what each kind of task reads and writes and nothing of how the scheduler decides. Two ways to use it:
:func:`check_order` proves that all that touches the same place is ordered, so that every run equals the run in list
order; :class:`Machine` runs the tasks, in list order or in any other that the executor could choose.
"""

import random
from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from fuyou.layout.model_layout import BufferCounts, ModelLayout, Phase, Recomputation, interleaved
from fuyou.layout.record import Kind, Precision
from fuyou.layout.share import ALONE, Share
from fuyou.schedule.batch import BatchShape
from fuyou.schedule.scheduler import Scheduler
from fuyou.schedule.tasks import Activation, ComputeTask, Op, StepList, Task
from tests.helpers.step_layouts import BF16, Cut, computations, step_layout

#: Tasks of these kinds continue when the lane has started them, so the next one may start before they are finished.
ASYNCHRONOUS = frozenset({
    Op.PARAMETER_READ, Op.PARAMETER_READ_DEVICE, Op.GRADIENT_WRITE, Op.GRADIENT_READ, Op.STATE_WRITE,
    Op.RESIDENT_WRITE, Op.ACTIVATION_WRITE, Op.ACTIVATION_READ, Op.PARAMETER_WRITE,
})  # fmt: skip


@dataclass
class Program:
    """Several steps, as an engine would ask for them."""

    layout: ModelLayout
    slot: int = 0
    resident: frozenset[int] = frozenset()
    saving_layers: frozenset[int] = frozenset()
    """Layers that save more than their input for the backward pass."""
    lists: list[tuple[str, int, StepList]] = field(default_factory=list)
    """Kind (``train``, ``settle``, ``eval``, ``flush``), micro-batches, tasks."""
    clipped: set[int] = field(default_factory=set)
    """Steps whose speculative updates are wrong."""

    def __post_init__(self) -> None:
        self.list_of: dict[int, int] = {}
        self.group_of: dict[int, int] = {}
        self.source_of: dict[int, int | None] = {}
        """Where on SSD an update's states come from; None: they are in host memory."""

    @property
    def tasks(self) -> list[Task]:
        return [task for _, _, steps in self.lists for task in steps.tasks]

    def finish(self) -> "Program":
        """Note which list each task is in, and which reads and writes of states belong to which update."""
        open_group: dict[int, Task] = {}
        for number, (_, _, steps) in enumerate(self.lists):
            for task in steps.tasks:
                self.list_of[id(task)] = number
                if task.op is Op.STATE_READ:
                    assert task.record not in open_group, (
                        "the states of a record are read twice before its update"
                    )
                    open_group[task.record] = task
                if task.op in (Op.STATE_READ, Op.UPDATE, Op.STATE_WRITE):
                    self.group_of[id(task)] = id(open_group[task.record])
                    read = open_group[task.record]
                    self.source_of[id(task)] = read.source if read.nbytes else None
                if task.op is Op.STATE_WRITE or (task.op is Op.UPDATE and task.target is None):
                    del open_group[task.record]
        assert not open_group
        return self

    def is_void(self, update: Task) -> bool:
        """Whether an update is done before it is known that its gradient is clipped."""
        kind, _, steps = self.lists[self.list_of[id(update)]]
        return kind == "train" and steps.step == update.step and update.step in self.clipped

    def owner(self, task: Task) -> int:
        """The optimizer process reads, updates and writes a record as one thing."""
        return self.group_of.get(id(task), id(task))

    def _written(self, task: Task) -> list[tuple]:
        """Places on SSD that a record is written to with its states: of several nodes, its own task writes the
        parameters, which are not complete before they are spread."""
        states = ("ssd states", task.record, task.target)
        return (
            [states]
            if self.layout.share.nodes > 1
            else [("ssd parameters", task.record, task.target), states]
        )

    def accesses(self, task: Task) -> tuple[list[tuple], list[tuple]]:
        """Places that ``task`` reads, and places that it writes."""
        record = task.record
        buffers = self.layout.records[record].kind if record is not None else None
        kept: list[tuple] = [("host states", record)] if record in self.resident else []
        kind = {Activation.HIDDEN: "activation", Activation.SAVED: "kept"}[task.activation]
        match task.op:
            case Op.PARAMETER_READ:
                return [("ssd parameters", record, task.source)], [("host parameters", buffers, task.target)]
            case Op.PARAMETER_READ_DEVICE:
                return [("ssd parameters", record, task.source)], [
                    ("device parameters", buffers, task.target)
                ]
            case Op.PARAMETER_UPLOAD:
                return [("host parameters", buffers, task.source)], [
                    ("device parameters", buffers, task.target)
                ]
            case Op.COMPUTE:
                assert isinstance(task, ComputeTask)
                reads = [
                    ("device parameters", self.layout.records[used].kind, buffer)
                    for used, buffer in task.places.items()
                ]
                reads += [("device activation", index) for index in task.inputs]
                writes = [("device activation", task.output)] if task.output is not None else []
                writes += [
                    ("device gradient", self.layout.records[trained].kind, buffer)
                    for trained, buffer in task.gradients.items()
                ]
                if task.saved is not None:
                    forward = task.visit.phase is Phase.BLOCK_FORWARD
                    (writes if forward else reads).append(("device kept", task.saved))
                return reads, writes
            case Op.PARAMETER_GATHER:
                place = ("device parameters", buffers, task.target)
                return [place], [place]
            case Op.GRADIENT_REDUCE | Op.GRADIENT_EXCHANGE:
                place = ("device gradient", buffers, task.source)
                return [place], [place]
            case Op.PARAMETER_SPREAD:
                place = ("host parameters", buffers, task.source)
                return [place], [place]
            case Op.PARAMETER_WRITE:
                return [("host parameters", buffers, task.source)], [("ssd parameters", record, task.target)]
            case Op.GRADIENT_DOWNLOAD:
                return [("device gradient", buffers, task.source)], [("host gradient", buffers, task.target)]
            case Op.GRADIENT_WRITE:
                return [("host gradient", buffers, task.source)], [("ssd gradient", record)]
            case Op.GRADIENT_READ:
                return [("ssd gradient", record)], [("host gradient", buffers, task.target)]
            case Op.STATE_READ:
                if not task.nbytes:
                    return [], []
                return [("ssd states", record, task.source)], kept
            case Op.UPDATE:  # each chunk is written as soon as it is updated
                source = self.source_of[id(task)]
                states = [("ssd states", record, source)] if source is not None else []
                places = [
                    ("host parameters", buffers, task.source),
                    *(self._written(task) if task.target is not None else []),
                    *kept,
                ]
                return [("host gradient", buffers, task.gradient), *states], places
            case Op.STATE_WRITE | Op.RESIDENT_WRITE:
                parameters = (
                    [] if self.layout.share.nodes > 1 else [("host parameters", buffers, task.source)]
                )
                return [*parameters, *kept], self._written(task)
            case Op.ACTIVATION_DOWNLOAD:
                return [(f"device {kind}", task.source)], [(f"host {kind}", task.target)]
            case Op.ACTIVATION_UPLOAD:
                return [(f"host {kind}", task.source)], [(f"device {kind}", task.target)]
            case Op.ACTIVATION_WRITE:
                return [(f"host {kind}", task.source)], [(f"ssd {kind}", task.target)]
            case Op.ACTIVATION_READ:
                return [(f"ssd {kind}", task.source)], [(f"host {kind}", task.target)]
            case Op.COMMIT:
                numbers = self.layout.trainable
                kinds = ("ssd parameters", "ssd states")
                return [(kind, number, task.target) for kind in kinds for number in numbers], []
            case Op.STEP:
                return [], []
        raise AssertionError(task)


def lane(task: Task) -> Op:
    """Tasks of one lane start in the order of the list. The caller's thread computes and ends steps."""
    return Op.COMPUTE if task.op is Op.STEP else task.op


def check_order(program: Program) -> None:
    """Assert that a task waits only for earlier ones, and that accesses to one place are ordered unless all read.

    What is known to be ordered: ``after``; the starts of one lane; in lanes that are not asynchronous, the end of a
    task before the next one's start.
    """
    tasks = program.tasks
    number = {id(task): index for index, task in enumerate(tasks)}
    started: list[int] = []  # bit set of the tasks that have ended before this one starts
    previous: dict[Op, int] = {}
    writer: dict[tuple, int] = {}
    readers: dict[tuple, list[int]] = defaultdict(list)
    commit: int | None = None
    ends: dict[int, int] = {}  # by step
    for index, task in enumerate(tasks):
        before = 0
        for earlier in task.after:
            assert number.get(id(earlier), index) < index, (
                f"{task} waits for {earlier}, which does not come before it"
            )
            before |= started[number[id(earlier)]] | 1 << number[id(earlier)]
        last = previous.get(lane(task))
        if last is not None:
            before |= started[last]
            if task.op not in ASYNCHRONOUS:
                before |= 1 << last
        previous[lane(task)] = index
        started.append(before)

        def must_follow(earlier: int, place: tuple, index=index, task=task, before=before) -> None:
            assert earlier == index or before >> earlier & 1, f"{task} and {tasks[earlier]} race for {place}"

        reads, writes = program.accesses(task)
        for place in reads:
            if place in writer and place not in writes:
                must_follow(writer[place], place)
            readers[place].append(index)
        for place in writes:
            if place in writer:
                must_follow(writer[place], place)
            for reader in readers.pop(place, []):
                must_follow(reader, place)
            writer[place] = index
            if place[0] in ("ssd parameters", "ssd states") and commit is not None:
                must_follow(commit, place)
                assert place[2] != tasks[commit].target, f"{task} overwrites {tasks[commit]}"
        if task.op is Op.STEP:
            ends[task.step] = index
        if task.op is Op.COMMIT:
            # A step whose gradient is not finite is never ended, and must not be committed
            must_follow(ends[task.step], ("step", task.step))
            commit = index
            for place in program.accesses(task)[0]:
                assert place in writer, f"{task}: nothing was ever written to {place}"


class Machine:
    """Runs a program's tasks one event at a time, and asserts at every event that everything is as it should be."""

    def __init__(self, program: Program):
        self.program = program
        self.layout = program.layout
        self.content: dict[tuple, object] = {}
        self._held: dict[tuple, dict[int, str]] = defaultdict(dict)
        self.committed = (0, program.slot)
        self._ended: set[int] = set()
        self._updated: dict[int | None, int] = {}  # step of each record's newest update
        # By number of micro-batches
        self._contributions: dict[int, dict[int | None, list[tuple[Phase, int]]]] = {}
        for record in self.layout.records:
            for kind in ("ssd parameters", "ssd states"):
                self.content[kind, record.index, program.slot if record.trainable else 0] = (record.index, 0)

    def run_in_order(self) -> None:
        """One task after the other, as listed."""
        for task in self.program.tasks:
            self._start(task)
            self._end(task)

    def run(self, seed: int) -> None:
        """In an order that the executor could choose: random, with asynchronous tasks in progress side by side."""
        chance = random.Random(seed)
        queues: dict[Op, deque[Task]] = defaultdict(deque)
        for task in self.program.tasks:
            queues[lane(task)].append(task)
        bias = {op: chance.choice([1, 1, 5, 40]) for op in queues}  # some lanes are much faster than others
        done: set[int] = set()
        running: list[Task] = []
        busy: set[Op] = set()
        while running or any(queues.values()):
            events: list[tuple[str, Task]] = [("end", task) for task in running]
            for op, queue in queues.items():
                if queue and op not in busy and all(id(earlier) in done for earlier in queue[0].after):
                    events.append(("start", queue[0]))
            assert events, f"nothing can continue: {[queue[0] for queue in queues.values() if queue]} wait"
            what, task = chance.choices(events, [bias[lane(task)] for _, task in events])[0]
            if what == "start":
                queues[lane(task)].popleft()
                self._start(task)
                running.append(task)
                if task.op not in ASYNCHRONOUS:
                    busy.add(lane(task))
            else:
                running.remove(task)
                busy.discard(lane(task))
                self._end(task)
                done.add(id(task))

    # -- one task -------------------------------------------------------------------------------------------------

    def _start(self, task: Task) -> None:
        reads, writes = self.program.accesses(task)
        owner = self.program.owner(task)
        for place in writes:
            others = [who for who in self._held[place] if who != owner]
            assert not others, f"{task} writes to {place} while it is in use"
            self._held[place][owner] = "write"
            if place[0].startswith("ssd") and len(place) == 3:
                assert place[2] != self.committed[1], f"{task} writes to the committed slot"
        for place in reads:
            writers = [who for who, how in self._held[place].items() if how == "write" and who != owner]
            assert not writers, f"{task} reads {place} while it is being written"
            self._held[place].setdefault(owner, "read")
        self._check(task)

    def _end(self, task: Task) -> None:
        self._check(task)
        reads, writes = self.program.accesses(task)
        for place in writes:
            self.content[place] = self._result(task, place)
        # Chunks of states are still being read until the update has ended, and written until the write has.
        kept: list[tuple] = []
        if task.op is Op.STATE_READ:
            kept = [*reads, *writes]
        elif task.op is Op.UPDATE and task.target is not None:
            kept = writes if self.layout.share.nodes == 1 else writes[1:]
        owner = self.program.owner(task)
        for place in (*reads, *writes):
            if place not in kept:
                self._held[place].pop(owner, None)
        if task.op is Op.UPDATE and writes[0] in kept:
            # What is left is reading: others may use the new parameters while they are written to SSD.
            self._held[writes[0]][owner] = "read"
        if task.op is Op.UPDATE:
            self._updated[task.record] = task.step
        if task.op is Op.STEP:
            self._ended.add(task.step)
        if task.op is Op.COMMIT:
            self.committed = (task.step, task.target)

    def _result(self, task: Task, place: tuple) -> object:
        match task.op:
            case Op.COMPUTE:
                assert isinstance(task, ComputeTask)
                if place[0] == "device activation":
                    return self._activations(task)[1]
                if place[0] == "device kept":
                    return self._kept(task)
                mine = [(task.visit.phase, task.micro)]
                held = self.content.get(place)
                trained = next(
                    index
                    for index, buffer in task.gradients.items()
                    if place == ("device gradient", self.layout.records[index].kind, buffer)
                )
                return (trained, task.step, mine if trained in task.first else [*held[2], *mine])  # type: ignore[index]
            case Op.UPDATE:
                updated = (task.record, "void" if self.program.is_void(task) else task.step)
                incomplete = place[0] == "host parameters" and self.layout.share.nodes > 1
                return ("own part", updated) if incomplete else updated
            case Op.STATE_WRITE | Op.RESIDENT_WRITE if self.layout.share.nodes > 1:
                # Of the update just before
                return (task.record, self._updated[task.record])
            case Op.STATE_WRITE | Op.RESIDENT_WRITE:
                return self.content["host parameters", self.layout.records[task.record].kind, task.source]
            case Op.PARAMETER_UPLOAD | Op.PARAMETER_READ_DEVICE if self.layout.share.ranks_per_node > 1:
                return ("own slice", self.content[self.program.accesses(task)[0][0]])
            case Op.PARAMETER_GATHER | Op.PARAMETER_SPREAD:
                return self.content[place][1]  # type: ignore[index]
            case Op.GRADIENT_REDUCE | Op.GRADIENT_EXCHANGE:
                return (*self.content[place], task.op)  # type: ignore[misc]
            case _:
                return self.content[self.program.accesses(task)[0][0]]

    def _activations(self, task: Task) -> tuple[list[object], object]:
        """What a compute task must find, and what it leaves; only the first and last part of a pass do either."""
        assert task.visit is not None
        number, i, m, last = (
            self.program.list_of[id(task)],
            task.visit.layer,
            task.micro,
            len(self.layout.blocks),
        )
        part = task.visit.part
        match task.visit.phase:
            case Phase.EMBED_FORWARD:
                found, left = [], ("x", number, 0, m)
            case Phase.BLOCK_FORWARD:
                found, left = [("x", number, i, m)], ("x", number, i + 1, m)
            case Phase.HEAD | Phase.HEAD_EVAL:
                found, left = [("x", number, last, m)], ("d", number, last, m)  # if that is wanted
            case Phase.BLOCK_BACKWARD:
                found, left = [("x", number, i, m), ("d", number, i + 1, m)], ("d", number, i, m)
            case Phase.EMBED_BACKWARD:
                found, left = [("d", number, 0, m)], None
        return found if part is None or part.first else [], left if part is None or part.last else None

    def _kept(self, task: Task) -> object:
        """What a block keeps of a micro-batch next to its input."""
        assert task.visit is not None
        return ("k", self.program.list_of[id(task)], task.visit.layer, task.micro)

    def _gradient(self, record: int, step: int) -> tuple[int, int, list[tuple[Phase, int]]]:
        """The complete gradient of one step."""
        micro = next(
            micro for kind, micro, steps in self.program.lists if kind == "train" and steps.step == step
        )
        if micro not in self._contributions:
            parts = self._contributions[micro] = defaultdict(list)
            for one in computations(self.layout, micro, train=True):
                for adds_to in one.adds_to:
                    parts[adds_to].append((one.phase, one.micro))
        return record, step, self._contributions[micro][record]

    def _sums(self) -> list[Op]:
        """What a gradient must have been through before it may be used: the sums over ranks."""
        share = self.layout.share
        return [Op.GRADIENT_REDUCE] * (share.ranks_per_node > 1) + [Op.GRADIENT_EXCHANGE] * (share.nodes > 1)

    def _check(self, task: Task) -> None:
        """The task finds what it should, now."""
        record = task.record
        buffers = self.layout.records[record].kind if record is not None else None
        match task.op:
            case Op.COMPUTE:
                assert isinstance(task, ComputeTask)
                kind = self.program.lists[self.program.list_of[id(task)]][0]
                version = task.step - 1 if kind == "train" else task.step
                assert set(task.places) == set(task.visit.records)
                for used, buffer in task.places.items():
                    used_record = self.layout.records[used]
                    place = ("device parameters", used_record.kind, buffer)
                    self._expect(task, place, (used, version if used_record.trainable else 0))
                inputs, _ = self._activations(task)
                assert len(task.inputs) == len(inputs)
                for index, value in zip(task.inputs, inputs, strict=True):
                    self._expect(task, ("device activation", index), value)
                own = task.micro < self.program.lists[self.program.list_of[id(task)]][1]
                keeps = kind == "train" and own and task.visit.layer in self.program.saving_layers
                keeps = keeps and task.visit.part is None
                passes = (Phase.BLOCK_FORWARD, Phase.BLOCK_BACKWARD)
                assert (task.saved is not None) == (keeps and task.visit.phase in passes)
                if task.saved is not None and task.visit.phase is Phase.BLOCK_BACKWARD:
                    self._expect(task, ("device kept", task.saved), self._kept(task))
                assert tuple(task.gradients) == task.visit.trained
                for trained in set(task.gradients) - task.first:
                    complete = self._gradient(trained, task.step)[2]
                    place = ("device gradient", self.layout.records[trained].kind, task.gradients[trained])
                    _, _, part = self.content[place]
                    assert part == complete[: len(part)] and complete[len(part)] == (
                        task.visit.phase,
                        task.micro,
                    )
                    self._expect(task, place, (trained, task.step, part))
            case Op.UPDATE:
                self._expect(task, ("host parameters", buffers, task.source), (record, task.step - 1))
                gradient = (*self._gradient(record, task.step), *self._sums())
                self._expect(task, ("host gradient", buffers, task.gradient), gradient)
                resident = record in self.program.resident
                slot = self.program.source_of[id(task)]
                states = ("host states", record) if resident else ("ssd states", record, slot)
                self._expect(task, states, (record, task.step - 1))
            case (
                Op.PARAMETER_READ
                | Op.PARAMETER_READ_DEVICE
                | Op.PARAMETER_UPLOAD
                | Op.GRADIENT_WRITE
                | Op.GRADIENT_READ
                | Op.GRADIENT_DOWNLOAD
            ):
                value = self.content.get(self.program.accesses(task)[0][0])
                assert isinstance(value, tuple) and value[0] == record, f"{task} moves {value}"
            case Op.PARAMETER_GATHER | Op.PARAMETER_SPREAD:
                found = self.content[self.program.accesses(task)[0][0]]
                assert found[0] in ("own slice", "own part") and found[1][0] == record, (
                    f"{task} finds {found}"
                )
            case Op.PARAMETER_WRITE:
                place = ("host parameters", buffers, task.source)
                self._expect(task, place, (record, self._updated[record]))
            case Op.GRADIENT_REDUCE | Op.GRADIENT_EXCHANGE:
                done = self._sums()
                gradient = (*self._gradient(record, task.step), *done[: done.index(task.op)])
                self._expect(task, self.program.accesses(task)[0][0], gradient)
            case Op.COMMIT:
                assert task.step in self._ended and task.step > self.committed[0]
                for place in self.program.accesses(task)[0]:
                    self._expect(task, place, (place[1], task.step))

    def _expect(self, task: Task, place: tuple, value: object) -> None:
        assert self.content.get(place) == value, (
            f"{task} needs {value} in {place} and finds {self.content.get(place)}"
        )


def build(
    layers: int, tied: bool, counts: BufferCounts, script: list[tuple[str, int, bool]], *, defer: float = 0.0,
    slot: int = 0, precision: Precision = BF16, resident: int = 0,
    saving_layers: Collection[int] = (), frozen: bool = False, cuts: Mapping[int, Cut] | None = None,
    share: Share = ALONE, speculate: bool = False, own: Collection[int] = (),
    reference: bool = False, together: int | None = None, direct_reads: bool = False, islands: bool = False,
) -> Program:  # fmt: skip
    """Ask a scheduler for ``script``: (``train`` | ``eval`` | ``flush``, micro-batches, commit), as an engine does.

    With ``speculate`` every step is committed, and those that would not be are clipped instead. Entries ``own`` of the
    script (by index) have a loss of the caller's own; with ``reference`` it needs a reference, too. ``together``
    micro-batches go forward through a block in pieces at once.

    ``defer`` is the deferred fraction of the blocks; 1 defers all records. ``resident`` is how many records live in
    host memory, of which ``counts`` then get as many parameter buffers as there are; ``saving_layers`` are those that
    save more than their input. ``frozen``, ``cuts``, ``islands``: see :func:`step_layout`; if frozen, all adapters live
    in host memory, or none. ``share``: of the rank.
    """
    layout = step_layout(layers, tied, precision, frozen, cuts, islands).shared(share)
    kept = frozenset(record.index for record in layout.records[:resident] if record.trainable)
    if layout.embedding_adapter is not None:  # whose gradient stays while blocks have theirs
        counts = replace(counts, device_adapter_gradients=2)
    if frozen:
        kept = frozenset(layout.trainable if resident else ())
        counts = replace(
            counts, host_adapters=max(counts.host_adapters, len(layout.trainable) if kept else 1)
        )
    elif kept:
        counts = replace(
            counts,
            host_blocks=max(len(layout.of_kind(Kind.BLOCK)), counts.host_blocks),
            host_non_block=max(2, counts.host_non_block),
            host_adapters=max(len(layout.of_kind(Kind.ADAPTER)), counts.host_adapters),
        )
    scheduler = Scheduler(
        layout, counts, slot=slot, deferred=interleaved(layout, defer),
        resident=kept, speculate=speculate,
        recomputation=Recomputation(frozenset(saving_layers), saved=0.5), direct_reads=direct_reads,
    )  # fmt: skip
    visited = {visit.layer for visit in layout.visits(train=True) if visit.phase is Phase.BLOCK_BACKWARD}
    program = Program(layout, slot, kept, visited & frozenset(saving_layers))
    step = 0

    def flush() -> None:
        committed = 0 if scheduler.commit_step is None else scheduler.commit_step
        if scheduler.pending or committed != step:
            program.lists.append(("flush", 0, scheduler.flush(step)))

    for index, (kind, micro, commit) in enumerate(script):
        mine = index in own
        batch = BatchShape(micro, 4096, 8, 12288, mine, mine and reference, together)
        if kind == "train":
            step += 1
            program.lists.append(
                (kind, micro, scheduler.training_step(step, batch, commit=commit or speculate))
            )
            if speculate:
                assert scheduler.speculative or defer >= 1
                program.lists.append(("settle", 0, scheduler.resolve_speculation(step, clipped=not commit)))
                program.clipped |= set() if commit else {step}
        else:
            flush()
            if kind == "eval":
                program.lists.append((kind, micro, scheduler.evaluation(step, batch)))
    flush()
    return program.finish()
