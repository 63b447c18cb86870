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

from fuyou.layout.model_layout import FULL_RECOMPUTATION, BatchShape, BufferCounts, ModelLayout, Recomputation
from fuyou.layout.record import Kind, Record
from fuyou.layout.visits import FORWARD_PHASES, Phase, Visit
from fuyou.schedule.activation_pools import ActivationPools, Arguments, hidden_arguments
from fuyou.schedule.buffer_pool import NEVER, Pool
from fuyou.schedule.gradient_pools import GradientPools
from fuyou.schedule.tasks import Activation, ComputeTask, Op, StepList, Task, known


class Scheduler:
    """Builds step after step; what one step leaves in the buffers, the next one starts from.

    Args:
        shape: records and visits.
        counts: buffers.
        single_slot: each record has one place on SSD instead of two.
        slot: the slot that holds the last committed state. (Frozen records have no other than the first.)
        deferred: indices of the records whose gradients are kept, and updated during the next forward pass just
            before they are needed: the SSDs then work in a phase that leaves them idle otherwise.
        hold: whether deferred updates wait for the caller to have ended the step (who then knows the gradient's norm).
        speculate: whether all other updates are done as if the gradient's norm were known, and their gradients kept
            until :meth:`resolve_speculation` says whether they must be done again. Needs two slots and a commit of
            every step: what the update started from is then whole in the committed slot.
        resident: indices of the records that live in host memory: read once, and written in steps that are committed.
            The host buffers must hold the parameters of all records of their kind then, so that none is read again.
        recomputation: which blocks keep more than their input, and what that saves.
    """

    def __init__(
        self,
        shape: ModelLayout,
        counts: BufferCounts,
        *,
        single_slot: bool = False,
        slot: int = 0,
        deferred: Collection[int] = (),
        hold: bool = False,
        speculate: bool = False,
        resident: Collection[int] = (),
        recomputation: Recomputation = FULL_RECOMPUTATION,
    ):
        self.shape = shape
        self.counts = counts
        self._deferred = frozenset(deferred)
        self._hold, self._speculate = hold, speculate
        assert not (speculate and single_slot)
        self._resident = frozenset(resident)
        self._loaded: set[int] = set()  # resident records whose states are in host memory
        #: Resident record -> its newest update, the task after which all nodes have it, its host buffer.
        self._unwritten: dict[int, tuple[Task, Task, int]] = {}
        self._single_slot = single_slot
        self._committed_slot = slot
        # Where the newest state of each record is.
        self._slot_of = [slot if record.trainable else 0 for record in shape.records]
        self._written: list[list[Task]] = [[] for _ in shape.records]  # by the newest writes of each record
        self._commit: Task | None = None
        self._ended: Task | None = None  # the STEP task of the newest step
        self._commit_due = False  # whether that step is to be committed, once its deferred updates are done
        self._durable = True  # whether the step being scheduled is to be committed
        self._defer_all = False  # whether all its updates are deferred
        self._visits = shape.visits(train=True)
        self._position = 0
        self._uses: dict[int, list[int]] = {}
        for position, visit in enumerate(self._visits):
            for record in visit.records:
                self._uses.setdefault(record, []).append(position)

        def pools(what: str, count: Callable[[Kind], int], next_use: Callable[[Hashable], float]) -> dict[Kind, Pool]:
            return {kind: Pool(f"{what} ({kind.value})", count(kind), next_use) for kind in Kind}

        self._device = pools("device parameters", counts.device, self._next_visit)
        self._host = pools("host parameters", counts.host, self._next_visit)
        self._device_gradients = pools("device gradients", counts.device_gradients, self._never)
        self._gradients = GradientPools(shape, counts, lambda record: self._uses[record][0], self._emit)
        self._recomputation = recomputation
        backward = {visit.layer for visit in self._visits if visit.phase is Phase.BLOCK_BACKWARD}
        self._keeping = recomputation.layers & backward
        self._activations = ActivationPools(
            Activation.HIDDEN,
            counts.device_activations,
            counts.host_activations,
            counts.ssd_activations,
            hidden_arguments,
        )
        self._kept = ActivationPools(
            Activation.KEPT, counts.device_kept, counts.host_kept, counts.ssd_kept, self._kept_arguments
        )
        self._list = StepList(0)
        self._batch = BatchShape(1, 0, 0)
        for kind in {shape.records[index].kind for index in self._resident}:
            assert counts.host(kind) >= len(shape.of_kind(kind))

    # -- what the engine asks for ---------------------------------------------------------------------------------

    def training_step(self, step: int, batch: BatchShape, *, commit: bool = True, defer_all: bool = False) -> StepList:
        """The tasks of step ``step`` (numbered from 1).

        ``commit`` says whether the step is committed at its end; with deferred updates that is during the next step.
        Speculative updates leave that to :meth:`resolve_speculation`. ``defer_all``: all updates of this step are
        deferred.
        """
        assert commit or not self._speculate
        assert not self._gradients.kept, "settle the step before"
        self._list, self._batch = StepList(step), batch
        self._activations.begin(self._list, self._visits, batch.micro_batches, batch.activation_bytes)
        self._kept.begin(self._list, self._visits, batch.micro_batches, batch.kept_bytes)
        self._durable, self._defer_all = commit, defer_all
        for position, visit in enumerate(self._visits):
            self._position = position
            if visit.phase in FORWARD_PHASES:
                for record in visit.records:
                    self._update_pending(record, durable=self._commit_due)
                self._commit_when_complete(step - 1)
            self._visit(visit)
        self._position = len(self._visits)
        self._ended = self._list.end = self._emit(Op.STEP, [])
        self._commit_due = commit
        if not self._speculate:
            self._commit_when_complete(step)
        return self._list

    def resolve_speculation(self, step: int, clipped: bool) -> StepList:
        """The caller has ended ``step`` and knows whether its gradient is clipped: the tasks that commit it, if it is
        complete.

        If it is clipped, its speculative updates are void. Their records are again what the committed slot holds, and
        their gradients wait like deferred ones, whose updates write the other slot anew.
        """
        self._list = StepList(step)
        for record in self._gradients.resolve_speculation(again=clipped):
            self._slot_of[record.index] = self._committed_slot
            self._loaded.discard(record.index)
            self._host[record.kind].drop(record.index)
        self._commit_when_complete(step)
        return self._list

    def evaluation(self, step: int, batch: BatchShape) -> StepList:
        """The tasks of a forward pass that leaves everything as it is. Pending updates must be flushed before."""
        assert not self.pending, "flush before evaluating"
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
        for visit in self._visits:  # in the order in which the next forward needs them
            for record in visit.records:
                self._update_pending(record, durable=commit)
        if commit:
            self._emit_commit(step)
        return self._list

    @property
    def pending(self) -> bool:
        """Whether gradients wait for their update."""
        return bool(self._gradients.pending)

    @property
    def speculative(self) -> bool:
        """Whether updates may have to be done again: :meth:`resolve_speculation` says so."""
        return bool(self._gradients.kept)

    @property
    def commit_step(self) -> int | None:
        """The newest step whose commit is among the tasks given out."""
        return None if self._commit is None else self._commit.step

    # -- visits ---------------------------------------------------------------------------------------------------

    def _visit(self, visit: Visit, train: bool = True) -> None:
        records = [self.shape.records[index] for index in visit.records]
        places = [self._on_device(record) for record in records]
        buffers = {index: place for index, (place, _) in zip(visit.records, places, strict=True)}
        ready = [upload for _, upload in places]
        gradient: int | None = None
        continues = False
        trained = None if visit.trained is None else self.shape.records[visit.trained]
        if trained is not None:
            gradient, continues, cleared = self._gradient_buffer(trained)
            ready += cleared
        flops = self._flops(visit)
        compute: ComputeTask | None = None
        for micro in range(self._batch.micro_batches):
            inputs, output = hidden_arguments(visit, micro)
            kept_input, kept_output = self._kept_arguments(visit, micro) if train else ([], [])
            compute = ComputeTask(
                Op.COMPUTE,
                list(ready),
                flops=flops,
                tokens=self._batch.tokens,
                step=self._list.step,
                record=visit.record,
                visit=visit,
                micro=micro,
                places=buffers,
                gradient=gradient,
                first=trained is not None and micro == 0 and not continues,
                last=micro == self._batch.micro_batches - 1,
            )
            # Uploads share a lane: what is large and finds its buffer free comes before what may have to wait for one.
            for key in kept_input:
                compute.kept = self._kept.fetch(key, kept_input, compute)
            compute.inputs = tuple(self._activations.fetch(key, inputs + output, compute) for key in inputs)
            for key in output:
                compute.output = self._activations.produce(key, inputs + output, compute)
            for key in kept_output:
                compute.kept = self._kept.produce(key, kept_output, compute)
            self._activations.release(inputs)
            self._kept.release(kept_input)
            self._list.tasks.append(compute)
        assert compute is not None
        for record, (device, _) in zip(records, places, strict=True):
            self._device[record.kind].use(device, compute)
        if trained is not None and gradient is not None:
            self._device_gradients[trained.kind].fill(gradient, trained.index, compute)
            if visit.completes:
                self._finish_gradient(trained, gradient, compute)

    def _on_device(self, record: Record) -> tuple[int, Task]:
        """Index of the device buffer that holds the record's parameters, and the task after which it does."""
        pool = self._device[record.kind]
        index = pool.find(record.index)
        if index is not None:
            return index, pool.slots[index].filled
        source, loaded = self._on_host(record)
        index, _ = pool.take(record.index)
        upload = self._emit(
            Op.PARAMETER_UPLOAD,
            [loaded, *pool.slots[index].busy()],
            record=record.index,
            source=source,
            target=index,
            nbytes=record.parameter_nbytes,
        )
        self._host[record.kind].use(source, upload)
        ready = upload
        if record.share.ranks_per_node > 1:
            filled = record.filled_slices[record.share.local_rank]
            nbytes = (record.share.ranks_per_node - 1) * filled * record.unit_bytes
            ready = self._emit(Op.PARAMETER_GATHER, [upload], record=record.index, target=index, nbytes=nbytes)
        pool.fill(index, record.index, ready)
        return index, ready

    def _on_host(self, record: Record) -> tuple[int, Task]:
        """Index of the host buffer that holds the record's newest parameters, and the task after which it does."""
        pool = self._host[record.kind]
        index = pool.find(record.index)
        if index is not None:
            return index, pool.slots[index].filled
        index, _ = pool.take(record.index)
        after = [*pool.slots[index].busy(), *self._written[record.index]]
        read = self._emit(
            Op.PARAMETER_READ,
            after,
            record=record.index,
            source=self._slot_of[record.index],
            target=index,
            nbytes=record.parameter_nbytes,
        )
        pool.fill(index, record.index, read)
        return index, read

    # -- gradients and updates ------------------------------------------------------------------------------------

    def _gradient_buffer(self, record: Record) -> tuple[int, bool, list[Task]]:
        """Index of the device buffer that gathers the record's gradient, whether an earlier visit has begun it, and
        what must leave the buffer if not."""
        pool = self._device_gradients[record.kind]
        index = pool.find(record.index)
        if index is not None:
            return index, True, []
        index, _ = pool.take(record.index)
        return index, False, pool.slots[index].busy()

    def _finish_gradient(self, record: Record, source: int, compute: Task) -> None:
        """The gradient is complete: bring it to the host; update at once, or keep it until the step has ended."""
        target, after = self._gradients.take(record)
        download = self._emit(
            Op.GRADIENT_DOWNLOAD,
            [self._reduce(record, source, compute), *after],
            record=record.index,
            source=source,
            target=target,
            nbytes=record.gradient_nbytes,
        )
        self._gradients.fill(target, record, download)
        device = self._device_gradients[record.kind]
        device.drop(record.index)
        device.use(source, download)
        self._device[record.kind].drop(record.index)  # the update makes the device's copy stale
        if self._defer_all or record.index in self._deferred:
            self._gradients.pending[record.index] = self._list.step
        else:
            self._update(record, target, download, self._list.step, self._durable, keep=self._speculate)

    def _reduce(self, record: Record, buffer: int, ready: Task) -> Task:
        """Sum a gradient over all ranks: inside the nodes, then across. Returns after what it is there."""
        share, width = record.share, record.precision.gradient_bytes
        if share.ranks_per_node > 1:
            nbytes = _others(record.filled_slices, share.local_rank) * width
            ready = self._emit(Op.GRADIENT_REDUCE, [ready], record=record.index, source=buffer, nbytes=nbytes)
        if share.nodes > 1:
            nbytes = _others(record.filled_parts, share.node) * width
            ready = self._emit(Op.GRADIENT_EXCHANGE, [ready], record=record.index, source=buffer, nbytes=nbytes)
        return ready

    def _update_pending(self, index: int, durable: bool) -> None:
        """Apply the deferred update of record ``index``, if there is one. ``durable``: of a step to be committed."""
        step = self._gradients.pending.pop(index, None)
        if step is not None:
            record = self.shape.records[index]
            self._update(record, *self._gradients.fetch(record), step, durable)

    def _update(self, record: Record, gradient: int, ready: Task, step: int, durable: bool, keep: bool = False) -> None:
        """Read the record's states, update, write parameters and states to the other slot.

        Of a resident record, states are read the first time only (and to update it again), and written only if the step
        is to be committed. ``keep``: the gradient, in case the update must be done again.
        """
        host, loaded = self._on_host(record)
        parameters = self._host[record.kind]
        source, target = self._slot_of[record.index], self._target(record.index)
        resident = record.index in self._resident
        read = self._emit(
            Op.STATE_READ,
            list(self._written[record.index]),
            record=record.index,
            source=source,
            nbytes=0 if record.index in self._loaded else record.state_nbytes,
        )
        if resident:
            self._loaded.add(record.index)
        waits = [ready, loaded, read, *parameters.slots[host].users]
        waits += [task for task in (self._commit, self._ended if self._hold else None) if task is not None]
        update = self._emit(
            Op.UPDATE,
            waits,
            record=record.index,
            source=host,
            gradient=gradient,
            nbytes=record.owned,
            target=target if durable or not resident else None,
        )
        update.step = step
        updated = self._spread(record, host, update)
        parameters.fill(host, record.index, updated)
        if durable or not resident:
            self._unwritten.pop(record.index, None)
            self._write(Op.STATE_WRITE, record.index, update, updated, host, target)
        else:
            self._unwritten[record.index] = update, updated, host
        self._gradients.updated(gradient, record, update, keep=keep)
        self._device[record.kind].drop(record.index)

    def _spread(self, record: Record, host: int, update: Task) -> Task:
        """Give every node what the others have updated of its slices. Returns after what the whole slice is new."""
        if record.share.nodes == 1:
            return update
        filled = record.filled_parts[record.share.node]
        nbytes = (record.share.nodes - 1) * filled * record.precision.parameter_bytes
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
        record, run_on_all_ranks = self.shape.records[index], updated is update
        fields = {"record": index, "source": host, "target": target}
        nbytes = record.state_nbytes + (record.parameter_nbytes if run_on_all_ranks else 0)
        writes = [self._emit(op, [update], nbytes=nbytes, **fields)]
        if not run_on_all_ranks:
            writes.append(self._emit(Op.PARAMETER_WRITE, [updated], nbytes=record.parameter_nbytes, **fields))
        for write in writes:
            self._host[record.kind].use(host, write)
        self._written[index] = writes
        self._slot_of[index] = target

    def _commit_when_complete(self, step: int) -> None:
        """Commit ``step`` if that was asked for and no update of it is pending any more."""
        if self._commit_due and not self.pending:
            self._emit_commit(step)

    def _emit_commit(self, step: int) -> None:
        self._commit_due = False
        for index, (update, updated, host) in self._unwritten.items():  # not meant to be committed, and is
            self._write(Op.RESIDENT_WRITE, index, update, updated, host, self._target(index))
        self._unwritten.clear()
        after = list(itertools.chain.from_iterable(self._written))
        after += [task for task in (self._ended, self._commit) if task is not None]
        self._committed_slot = self._slot_of[self.shape.trainable[0]]
        self._commit = self._emit(Op.COMMIT, after, target=self._committed_slot)
        self._commit.step = step

    # -- small parts ----------------------------------------------------------------------------------------------

    def _emit(self, op: Op, after: list[Task], **fields: int | None) -> Task:
        task = Task(op, after, step=self._list.step, **fields)  # type: ignore[arg-type]
        self._list.tasks.append(task)
        return task

    def _flops(self, visit: Visit) -> float:
        """Of one micro-batch, 2 per parameter and token: for the forward pass, for the gradient of the input, and for
        that of whatever is trained; and for what of the forward pass is done again."""
        parameters = sum(self.shape.records[index].parameter_count for index in visit.records)
        trained = 0 if visit.trained is None else self.shape.records[visit.trained].parameter_count
        forward = 1.0 if visit.phase in (Phase.BLOCK_FORWARD, Phase.HEAD_EVAL, Phase.HEAD) else 0.0
        if visit.phase is Phase.BLOCK_BACKWARD:
            forward = self._recomputation.fraction(known(visit.layer))
        if visit.phase is Phase.BLOCK_BACKWARD or (visit.phase is Phase.HEAD and visit.passes_on):
            trained += parameters
        elif visit.phase is not Phase.HEAD:
            trained = 0  # an embedding's gradient is a sum of rows
        return 2.0 * self._batch.tokens * (forward * parameters + trained)

    def _kept_arguments(self, visit: Visit, micro: int) -> Arguments:
        """What a compute task reads and writes of kept outputs."""
        if visit.layer in self._keeping:
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

    @staticmethod
    def _never(_: Hashable) -> float:
        return NEVER


def _others(parts: Sequence[int], own: int) -> int:
    """What all but one of them come to."""
    return sum(parts) - parts[own]
