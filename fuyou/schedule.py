"""The schedule is data: one training step as a list of tasks.

A step visits ``embedding, block 1 .. L, head, block L .. 1, embedding``. Each visit runs all M micro-batches through
one record's modules, so parameters cross the SSDs once per visit however large the batch ("vertical" micro-batches).
The scheduler walks the visits in order and writes down what each needs: reads, copies, computation, updates, writes,
and what each of these waits for. Buffers are assigned here, not while running; prefetching is nothing but a read
whose buffer becomes free early. The engine runs the list; a simulator can run the same list on a clock.
"""

import bisect
import itertools
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass

from fuyou.pool import NEVER, Pool
from fuyou.records import Precision, Record
from fuyou.share import ALONE, Share
from fuyou.tasks import FORWARD_PHASES, Activation, Op, Phase, StepList, Task, Visit

#: ("x", i, m): input of block i (output of block i - 1, or of the embedding if i is 0) for micro-batch m;
#: ("d", i, m): the gradient of the loss with respect to it; ("k", i, m): outputs of operators in block i that are kept.
ActivationKey = tuple[str, int, int]
#: What one compute task reads, and what it writes.
Arguments = tuple[list[ActivationKey], list[ActivationKey]]


@dataclass(frozen=True)
class BufferCounts:
    """How many buffers of each kind there are. Blocks and outer records have buffers of their own."""

    device_blocks: int = 2
    device_outer: int = 1
    device_block_gradients: int = 2
    device_outer_gradients: int = 1
    host_blocks: int = 3
    host_outer: int = 1
    host_block_gradients: int = 2
    host_outer_gradients: int = 1
    device_activations: int = 4
    host_activations: int = 0
    ssd_activations: int = 0
    device_kept: int = 0
    host_kept: int = 0
    ssd_kept: int = 0


@dataclass(frozen=True)
class StepShape:
    """What a step of this model looks like, whatever its parameters are."""

    records: tuple[Record, ...]
    embedding: int
    """Index of the record that the embeddings are in."""
    head: int
    """Index of the record that the head is in; the same as ``embedding`` where they are tied."""
    blocks: tuple[int, ...]
    """Indices of the records of block 0 .. L - 1."""
    precision: Precision
    share: Share = ALONE
    """What of every record is this rank's. Where there are several, records are padded so that it is equal parts."""

    def visits(self, train: bool) -> list[Visit]:
        """The visits of a step, in order."""
        layers = range(len(self.blocks))
        forward = [Visit(Phase.EMBED_FORWARD, self.embedding, -1)]
        forward += [Visit(Phase.BLOCK_FORWARD, self.blocks[i], i) for i in layers]
        if not train:
            return [*forward, Visit(Phase.HEAD_EVAL, self.head, len(layers))]
        backward = [Visit(Phase.BLOCK_BACKWARD, self.blocks[i], i) for i in reversed(layers)]
        head = Visit(Phase.HEAD, self.head, len(layers))
        return [*forward, head, *backward, Visit(Phase.EMBED_BACKWARD, self.embedding, -1)]


@dataclass(frozen=True)
class BatchShape:
    """What the schedule needs to know of a batch."""

    micro_batches: int
    """M, how many micro-batches the batch is split into."""
    activation_bytes: int
    """Size of one micro-batch's block input."""
    tokens: float
    """Tokens in one micro-batch, on average."""
    kept_bytes: int = 0
    """Size of what one layer keeps of one micro-batch beside its input."""


@dataclass(frozen=True)
class Recomputation:
    """What of a block's forward pass the backward pass computes again."""

    layers: frozenset[int] = frozenset()
    """Blocks that keep outputs of operators, beside their input."""
    saved: float = 0.0
    """Fraction of the forward pass's FLOPs that these save."""
    unneeded: float = 0.0
    """The same in all other blocks, which leave out what no backward pass reads."""

    def fraction(self, layer: int) -> float:
        """Of a block's forward FLOPs, what is computed again."""
        return 1.0 - (self.saved if layer in self.layers else self.unneeded)


#: Everything is computed again.
FULL_RECOMPUTATION = Recomputation()


class Scheduler:
    """Builds step after step; what one step leaves in the buffers, the next one starts from.

    Args:
        shape: records and visits.
        counts: buffers.
        single_slot: each record has one place on SSD instead of two.
        slot: the slot that holds the last committed state.
        deferred: indices of the records whose gradients are kept, and updated during the next forward pass just
            before they are needed: the SSDs then work in a phase that leaves them idle otherwise.
        hold: whether deferred updates wait for the caller to have ended the step (who then knows the gradient's norm).
        resident: indices of the records that live in host memory: read once, and written in steps that are committed.
            The host buffers must hold the parameters of all records then, so that none is ever read again.
        recomputation: which blocks keep more than their input, and what that saves.
    """

    def __init__(
        self,
        shape: StepShape,
        counts: BufferCounts,
        *,
        single_slot: bool = False,
        slot: int = 0,
        deferred: Collection[int] = (),
        hold: bool = False,
        resident: Collection[int] = (),
        recomputation: Recomputation = FULL_RECOMPUTATION,
    ):
        self.shape = shape
        self.counts = counts
        self._deferred = frozenset(deferred)
        self._hold = hold
        self._resident = frozenset(resident)
        self._loaded: set[int] = set()  # resident records whose states are in host memory
        #: Resident record -> its newest update, the task after which all nodes have it, its host buffer.
        self._unwritten: dict[int, tuple[Task, Task, int]] = {}
        self._single_slot = single_slot
        self._committed_slot = slot
        self._slot_of = [slot] * len(shape.records)  # where the newest state of each record is
        self._written: list[list[Task]] = [[] for _ in shape.records]  # by the newest writes of each record
        self._commit: Task | None = None
        self._pending: dict[int, int] = {}  # record -> step of the gradient that waits for its update
        self._spilled: dict[int, Task] = {}  # record -> the task that wrote its gradient to SSD
        self._ended: Task | None = None  # the STEP task of the newest step
        self._commit_due = False  # whether that step is to be committed, once its deferred updates are done
        self._durable = True  # whether the step being scheduled is to be committed
        self._visits = shape.visits(train=True)
        self._position = 0
        self._uses: dict[int, list[int]] = {}
        for position, visit in enumerate(self._visits):
            self._uses.setdefault(visit.record, []).append(position)
        self._device = {
            outer: Pool(f"device parameters ({label})", count, self._next_visit)
            for outer, label, count in ((False, "block", counts.device_blocks), (True, "outer", counts.device_outer))
        }
        self._host = {
            outer: Pool(f"host parameters ({label})", count, self._next_visit)
            for outer, label, count in ((False, "block", counts.host_blocks), (True, "outer", counts.host_outer))
        }
        self._device_gradients = {
            False: Pool("device gradients (block)", counts.device_block_gradients, self._never),
            True: Pool("device gradients (outer)", counts.device_outer_gradients, self._never),
        }
        self._host_gradients = {
            False: Pool("host gradients (block)", counts.host_block_gradients, self._next_update),
            True: Pool("host gradients (outer)", counts.host_outer_gradients, self._next_update),
        }
        self._recomputation = recomputation
        self._activations = ActivationPools(
            Activation.HIDDEN, counts.device_activations, counts.host_activations, counts.ssd_activations,
            hidden_arguments,
        )  # fmt: skip
        self._kept = ActivationPools(
            Activation.KEPT, counts.device_kept, counts.host_kept, counts.ssd_kept, self._kept_arguments
        )
        self._list = StepList(0)
        self._batch = BatchShape(1, 0, 0)
        outer = sum(record.outer for record in shape.records)
        assert not self._resident or (counts.host_blocks >= len(shape.blocks) and counts.host_outer >= outer)

    # -- what the engine asks for ---------------------------------------------------------------------------------

    def training_step(self, step: int, batch: BatchShape, *, commit: bool = True) -> StepList:
        """The tasks of step ``step`` (numbered from 1).

        ``commit`` says whether the step is committed at its end; with deferred updates that is during the next step.
        """
        self._list, self._batch = StepList(step), batch
        self._activations.begin(self._list, self._visits, batch.micro_batches, batch.activation_bytes)
        self._kept.begin(self._list, self._visits, batch.micro_batches, batch.kept_bytes)
        self._durable = commit
        for position, visit in enumerate(self._visits):
            self._position = position
            if visit.phase in FORWARD_PHASES:
                self._update_pending(visit.record, durable=self._commit_due)
                self._commit_when_complete(step - 1)
            self._visit(visit)
        self._position = len(self._visits)
        self._ended = self._list.end = self._emit(Op.STEP, [])
        self._commit_due = commit
        self._commit_when_complete(step)
        return self._list

    def evaluation(self, step: int, batch: BatchShape) -> StepList:
        """The tasks of a forward pass that leaves everything as it is. Pending updates must be flushed before."""
        assert not self._pending, "flush before evaluating"
        self._list, self._batch = StepList(step), batch
        visits = self.shape.visits(train=False)
        self._activations.begin(self._list, visits, batch.micro_batches, batch.activation_bytes)
        for position, visit in enumerate(visits):
            self._position = position
            self._visit(visit, train=False)
        return self._list

    def flush(self, step: int, *, commit: bool = True) -> StepList:
        """Apply the pending updates without a forward pass, and commit what has not been committed."""
        self._list = StepList(step)
        self._position = 0
        for record in [visit.record for visit in self._visits]:  # in the order in which the next forward needs them
            self._update_pending(record, durable=commit)
        if commit:
            self._emit_commit(step)
        return self._list

    @property
    def pending(self) -> bool:
        """Whether gradients wait for their update."""
        return bool(self._pending)

    @property
    def commit_step(self) -> int | None:
        """The newest step whose commit is among the tasks given out."""
        return None if self._commit is None else self._commit.step

    # -- visits ---------------------------------------------------------------------------------------------------

    def _visit(self, visit: Visit, train: bool = True) -> None:
        record = self.shape.records[visit.record]
        device, upload = self._on_device(record)
        trains = visit.phase in (Phase.HEAD, Phase.BLOCK_BACKWARD, Phase.EMBED_BACKWARD)
        tied = self.shape.embedding == self.shape.head
        continues = tied and visit.phase is Phase.EMBED_BACKWARD  # the head has begun this gradient
        gradient, cleared = self._gradient_buffer(record) if trains else (-1, [])
        compute: Task | None = None
        for micro in range(self._batch.micro_batches):
            inputs, output = hidden_arguments(visit, micro)
            kept_input, kept_output = self._kept_arguments(visit, micro) if train else ([], [])
            compute = Task(
                Op.COMPUTE, [upload, *cleared], flops=self._flops(visit), tokens=self._batch.tokens,
                step=self._list.step, record=visit.record, visit=visit, micro=micro, source=device, gradient=gradient,
                first=trains and micro == 0 and not continues, last=micro == self._batch.micro_batches - 1,
            )  # fmt: skip
            compute.inputs = tuple(self._activations.fetch(key, inputs + output, compute) for key in inputs)
            for key in output:
                compute.output = self._activations.produce(key, inputs + output, compute)
            for key in kept_input:
                compute.kept = self._kept.fetch(key, kept_input, compute)
            for key in kept_output:
                compute.kept = self._kept.produce(key, kept_output, compute)
            self._activations.release(inputs)
            self._kept.release(kept_input)
            self._list.tasks.append(compute)
        assert compute is not None
        self._device[record.outer].use(device, compute)
        if trains:
            self._device_gradients[record.outer].fill(gradient, record.index, compute)
            if not (tied and visit.phase is Phase.HEAD):
                self._finish_gradient(record, gradient, compute)

    def _on_device(self, record: Record) -> tuple[int, Task]:
        """Index of the device buffer that holds the record's parameters, and the task after which it does."""
        pool = self._device[record.outer]
        index = pool.find(record.index)
        if index is not None:
            ready = pool.slots[index].ready
            assert ready is not None
            return index, ready
        source, loaded = self._on_host(record)
        index, _ = pool.take(record.index)
        upload = self._emit(
            Op.PARAMETER_UPLOAD, [loaded, *pool.slots[index].busy()], record=record.index, source=source, target=index,
            nbytes=self._stored_bytes(record),
        )  # fmt: skip
        self._host[record.outer].use(source, upload)
        ready = upload
        if self.shape.share.ranks_per_node > 1:
            ready = self._emit(
                Op.PARAMETER_GATHER, [upload], record=record.index, target=index,
                nbytes=(self.shape.share.ranks_per_node - 1) * self._stored_bytes(record),
            )  # fmt: skip
        pool.fill(index, record.index, ready)
        return index, ready

    def _on_host(self, record: Record) -> tuple[int, Task]:
        """Index of the host buffer that holds the record's newest parameters, and the task after which it does."""
        pool = self._host[record.outer]
        index = pool.find(record.index)
        if index is not None:
            ready = pool.slots[index].ready
            assert ready is not None
            return index, ready
        index, _ = pool.take(record.index)
        after = [*pool.slots[index].busy(), *self._written[record.index]]
        read = self._emit(
            Op.PARAMETER_READ, after, record=record.index, source=self._slot_of[record.index], target=index,
            nbytes=self._stored_bytes(record),
        )  # fmt: skip
        pool.fill(index, record.index, read)
        return index, read

    # -- gradients and updates ------------------------------------------------------------------------------------

    def _gradient_buffer(self, record: Record) -> tuple[int, list[Task]]:
        """Index of the device buffer that gathers the record's gradient, and what must leave it first."""
        pool = self._device_gradients[record.outer]
        index = pool.find(record.index)
        if index is not None:
            return index, []
        index, _ = pool.take(record.index)
        return index, pool.slots[index].busy()

    def _finish_gradient(self, record: Record, source: int, compute: Task) -> None:
        """The gradient is complete: bring it to the host; update at once, or keep it until the step has ended."""
        target, after = self._host_gradient_buffer(record)
        download = self._emit(
            Op.GRADIENT_DOWNLOAD, [self._reduce(record, source, compute), *after], record=record.index, source=source,
            target=target, nbytes=self._gradient_bytes(record),
        )  # fmt: skip
        self._host_gradients[record.outer].fill(target, record.index, download)
        device = self._device_gradients[record.outer]
        device.drop(record.index)
        device.use(source, download)
        self._device[record.outer].drop(record.index)  # the update makes the device's copy stale
        if record.index in self._deferred:
            self._pending[record.index] = self._list.step
        else:
            self._update(record, target, download, self._list.step, self._durable)

    def _reduce(self, record: Record, buffer: int, ready: Task) -> Task:
        """Sum a gradient over all ranks: inside the nodes, then across. Returns after what it is there."""
        share, width = self.shape.share, self.shape.precision.gradient_bytes
        if share.ranks_per_node > 1:
            nbytes = (share.ranks_per_node - 1) * share.stored(record.numel) * width
            ready = self._emit(Op.GRADIENT_REDUCE, [ready], record=record.index, source=buffer, nbytes=nbytes)
        if share.nodes > 1:
            nbytes = (share.nodes - 1) * share.owned(record.numel) * width
            ready = self._emit(Op.GRADIENT_EXCHANGE, [ready], record=record.index, source=buffer, nbytes=nbytes)
        return ready

    def _host_gradient_buffer(self, record: Record) -> tuple[int, list[Task]]:
        pool = self._host_gradients[record.outer]
        index, leaving = pool.take(record.index)
        after = pool.slots[index].busy()
        if isinstance(leaving, int):
            write = self._emit(
                Op.GRADIENT_WRITE, after, record=leaving, source=index,
                nbytes=self._gradient_bytes(self.shape.records[leaving]),
            )  # fmt: skip
            self._spilled[leaving] = write
            after = [write]
        return index, after

    def _update_pending(self, index: int, durable: bool) -> None:
        """Apply the deferred update of record ``index``, if there is one. ``durable``: of a step to be committed."""
        step = self._pending.get(index)
        if step is None:
            return
        record = self.shape.records[index]
        pool = self._host_gradients[record.outer]
        source = pool.find(index)
        if source is None:
            source, after = self._host_gradient_buffer(record)
            ready = self._emit(
                Op.GRADIENT_READ, [*after, self._spilled.pop(index)], record=index, target=source,
                nbytes=self._gradient_bytes(record),
            )  # fmt: skip
            pool.fill(source, index, ready)
        filled = pool.slots[source].ready
        assert filled is not None
        del self._pending[index]
        self._update(record, source, filled, step, durable)

    def _update(self, record: Record, gradient: int, ready: Task, step: int, durable: bool) -> None:
        """Read the record's states, update, write parameters and states to the other slot.

        Of a resident record, states are read the first time only, and written only if the step is to be committed.
        """
        host, loaded = self._on_host(record)
        parameters = self._host[record.outer]
        owned = self.shape.share.owned(record.numel)
        source, target = self._slot_of[record.index], self._target(record.index)
        resident = record.index in self._resident
        read = self._emit(
            Op.STATE_READ, list(self._written[record.index]), record=record.index, source=source,
            nbytes=0 if record.index in self._loaded else owned * self.shape.precision.state_bytes,
        )  # fmt: skip
        if resident:
            self._loaded.add(record.index)
        waits = [ready, loaded, read, *parameters.slots[host].users]
        waits += [task for task in (self._commit, self._ended if self._hold else None) if task is not None]
        update = self._emit(
            Op.UPDATE, waits, record=record.index, source=host, gradient=gradient, nbytes=owned,
            target=target if durable or not resident else -1,
        )  # fmt: skip
        update.step = step
        updated = self._spread(record, host, update)
        parameters.fill(host, record.index, updated)
        if durable or not resident:
            self._unwritten.pop(record.index, None)
            self._write(Op.STATE_WRITE, record.index, update, updated, host, target)
        else:
            self._unwritten[record.index] = update, updated, host
        gradients = self._host_gradients[record.outer]
        gradients.drop(record.index)
        gradients.use(gradient, update)
        self._device[record.outer].drop(record.index)

    def _spread(self, record: Record, host: int, update: Task) -> Task:
        """Give every node what the others have updated of its slices. Returns after what the whole slice is new."""
        share = self.shape.share
        if share.nodes == 1:
            return update
        nbytes = (share.nodes - 1) * share.owned(record.numel) * self.shape.precision.parameter_bytes
        spread = self._emit(Op.PARAMETER_SPREAD, [update], record=record.index, source=host, nbytes=nbytes)
        spread.step = update.step
        return spread

    def _target(self, index: int) -> int:
        """The slot that the record is written to next."""
        return self._slot_of[index] if self._single_slot else 1 - self._committed_slot

    def _write(self, op: Op, index: int, update: Task, updated: Task, host: int, target: int) -> None:
        """Write states of a record after ``update`` and, together with them or by themselves, its parameters.

        Parameters that other nodes have a part in are there after ``updated``.
        """
        record, share = self.shape.records[index], self.shape.share
        states = share.owned(record.numel) * self.shape.precision.state_bytes
        parameters, together = self._stored_bytes(record), updated is update
        fields = {"record": index, "source": host, "target": target}
        writes = [self._emit(op, [update], nbytes=states + (parameters if together else 0), **fields)]
        if not together:
            writes.append(self._emit(Op.PARAMETER_WRITE, [updated], nbytes=parameters, **fields))
        for write in writes:
            self._host[record.outer].use(host, write)
        self._written[index] = writes
        self._slot_of[index] = target

    def _commit_when_complete(self, step: int) -> None:
        """Commit ``step`` if that was asked for and no update of it is pending any more."""
        if self._commit_due and not self._pending:
            self._emit_commit(step)

    def _emit_commit(self, step: int) -> None:
        self._commit_due = False
        for index, (update, updated, host) in self._unwritten.items():  # not meant to be committed, and is
            self._write(Op.RESIDENT_WRITE, index, update, updated, host, self._target(index))
        self._unwritten.clear()
        after = list(itertools.chain.from_iterable(self._written))
        after += [task for task in (self._ended, self._commit) if task is not None]
        self._committed_slot = self._slot_of[0]
        self._commit = self._emit(Op.COMMIT, after, target=self._committed_slot)
        self._commit.step = step

    # -- small parts ----------------------------------------------------------------------------------------------

    def _emit(self, op: Op, after: list[Task], **fields: int) -> Task:
        task = Task(op, after, step=self._list.step, **fields)  # type: ignore[arg-type]
        self._list.tasks.append(task)
        return task

    def _stored_bytes(self, record: Record) -> int:
        """Of the parameters that this rank keeps on host and SSD."""
        return self.shape.share.stored(record.numel) * self.shape.precision.parameter_bytes

    def _gradient_bytes(self, record: Record) -> int:
        """Of the gradient that this rank updates from."""
        return self.shape.share.owned(record.numel) * self.shape.precision.gradient_bytes

    def _flops(self, visit: Visit) -> float:
        """Of one micro-batch: 2 per parameter and token forward; backward twice that, plus the recomputation."""
        factor = {
            Phase.BLOCK_FORWARD: 2, Phase.HEAD_EVAL: 2, Phase.HEAD: 6,
            Phase.BLOCK_BACKWARD: 4 + 2 * self._recomputation.fraction(visit.layer),
        }.get(visit.phase, 0)  # fmt: skip
        return float(factor * self.shape.records[visit.record].parameter_count * self._batch.tokens)

    def _kept_arguments(self, visit: Visit, micro: int) -> Arguments:
        """What a compute task reads and writes of kept outputs."""
        if visit.layer in self._recomputation.layers:
            key = ("k", visit.layer, micro)
            if visit.phase is Phase.BLOCK_FORWARD:
                return [], [key]
            if visit.phase is Phase.BLOCK_BACKWARD:
                return [key], []
        return [], []

    def _next_visit(self, key: Hashable) -> float:
        assert isinstance(key, int)
        uses = self._uses[key]
        after = bisect.bisect_right(uses, self._position)
        return uses[after] if after < len(uses) else uses[0] + len(self._visits)

    def _next_update(self, key: Hashable) -> float:
        assert isinstance(key, int)
        return self._uses[key][0] if key in self._pending else NEVER

    @staticmethod
    def _never(_: Hashable) -> float:
        return NEVER


def hidden_arguments(visit: Visit, micro: int) -> Arguments:
    """Block inputs and gradients that a compute task reads and writes. The head is as if it were layer L."""
    i = visit.layer
    match visit.phase:
        case Phase.EMBED_FORWARD:
            return [], [("x", 0, micro)]
        case Phase.BLOCK_FORWARD:
            return [("x", i, micro)], [("x", i + 1, micro)]
        case Phase.HEAD:
            return [("x", i, micro)], [("d", i, micro)]
        case Phase.HEAD_EVAL:
            return [("x", i, micro)], []
        case Phase.BLOCK_BACKWARD:
            return [("x", i, micro), ("d", i + 1, micro)], [("d", i, micro)]
        case Phase.EMBED_BACKWARD:
            return [("d", 0, micro)], []


class ActivationPools:
    """Where activations of one kind live: device, then host, then SSD, whatever is needed soonest nearest.

    Args:
        activation: the kind; each has buffers of its own size.
        device, host, ssd: how many of them there are.
        arguments: which of these activations a compute task reads and writes.
    """

    def __init__(
        self, activation: Activation, device: int, host: int, ssd: int, arguments: Callable[[Visit, int], Arguments]
    ):
        self._activation, self._arguments = activation, arguments
        self._device = Pool(f"device activations ({activation.value})", device, self._next_use, True)
        self._host = Pool(f"host activations ({activation.value})", host, self._next_use, True)
        self._ssd_free = list(range(ssd))
        self._ssd: dict[Hashable, tuple[int, Task]] = {}
        self._uses: dict[Hashable, list[int]] = {}
        self._list = StepList(0)
        self._bytes = 0
        self._ssd_users: dict[int, list[Task]] = {}

    def begin(self, step: StepList, visits: Sequence[Visit], micro_batches: int, nbytes: int) -> None:
        """Start a pass: nothing is alive; every use to come is known. Each activation takes ``nbytes``."""
        self._list, self._bytes = step, nbytes
        self._uses = {}
        position = 0
        for visit in visits:
            for micro in range(micro_batches):
                for key in self._arguments(visit, micro)[0]:
                    self._uses.setdefault(key, []).append(position)
                position += 1
        for uses in self._uses.values():
            uses.reverse()  # the next use is the last element

    def fetch(self, key: ActivationKey, pinned: list[ActivationKey], task: Task) -> int:
        """Index of the device buffer that will hold ``key`` when ``task`` starts."""
        index = self._device.find(key)
        if index is None:
            source = self._on_host(key)
            index, after = self._room_on_device(key, pinned)
            ready = self._host.slots[source].ready
            assert ready is not None
            upload = self._emit(Op.ACTIVATION_UPLOAD, [ready, *after], source=source, target=index, micro=key[2])
            self._host.use(source, upload)
            self._device.fill(index, key, upload)
        filled = self._device.slots[index].ready
        assert filled is not None
        task.after.append(filled)
        self._device.use(index, task)
        return index

    def produce(self, key: ActivationKey, pinned: list[ActivationKey], task: Task) -> int:
        """Index of a free device buffer for ``key``, which ``task`` writes."""
        index, after = self._room_on_device(key, pinned)
        task.after.extend(after)
        self._device.fill(index, key, task)
        return index

    def release(self, keys: list[ActivationKey]) -> None:
        """One use of each of ``keys`` is behind us; what has no other goes."""
        for key in keys:
            uses = self._uses[key]
            uses.pop()
            if not uses:
                self._device.drop(key)
                self._host.drop(key)
                self._forget_ssd(key)

    def _room_on_device(self, key: ActivationKey, pinned: list[ActivationKey]) -> tuple[int, list[Task]]:
        index, leaving = self._device.take(key, pinned)
        slot = self._device.slots[index]
        after = slot.busy()
        if leaving is not None and self._host.find(leaving) is None and leaving not in self._ssd:
            target, room = self._room_on_host(leaving, key)
            produced = slot.ready
            assert produced is not None
            download = self._emit(Op.ACTIVATION_DOWNLOAD, [produced, *room], source=index, target=target)
            self._host.fill(target, leaving, download)
            after.append(download)
        return index, after

    def _room_on_host(self, key: Hashable, keep: Hashable = None) -> tuple[int, list[Task]]:
        """A host buffer for ``key``, but not the one that holds ``keep`` (whose copy to the device comes next)."""
        index, leaving = self._host.take(key, [keep])
        slot = self._host.slots[index]
        after = slot.busy()
        if leaving is not None and leaving not in self._ssd and self._device.find(leaving) is None:
            place = self._ssd_free.pop()
            ready = slot.ready
            assert ready is not None
            write = self._emit(
                Op.ACTIVATION_WRITE, [ready, *self._ssd_users.pop(place, [])], source=index, target=place
            )
            self._ssd[leaving] = (place, write)
            after.append(write)
        return index, after

    def _on_host(self, key: ActivationKey) -> int:
        index = self._host.find(key)
        if index is None:
            place, write = self._ssd[key]
            index, after = self._room_on_host(key)
            read = self._emit(Op.ACTIVATION_READ, [write, *after], source=place, target=index, micro=key[2])
            self._ssd_users.setdefault(place, []).append(read)
            self._host.fill(index, key, read)
        return index

    def _forget_ssd(self, key: Hashable) -> None:
        entry = self._ssd.pop(key, None)
        if entry is not None:
            place, write = entry
            self._ssd_users.setdefault(place, []).append(write)
            self._ssd_free.insert(0, place)

    def _emit(self, op: Op, after: list[Task], **fields: int) -> Task:
        task = Task(
            op,
            after,
            step=self._list.step,
            nbytes=self._bytes,
            activation=self._activation,
            **fields,  # type: ignore[arg-type]
        )
        self._list.tasks.append(task)
        return task

    def _next_use(self, key: Hashable) -> float:
        uses = self._uses.get(key)
        return uses[-1] if uses else NEVER
