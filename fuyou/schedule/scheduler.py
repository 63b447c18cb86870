"""Schedule a training step as a list of tasks.

A step visits ``embedding, block 1 .. L, head, block L .. 1, embedding``. Each visit runs all M micro-batches through
one record's modules, so parameters cross the SSDs once per visit however large the batch ("vertical" micro-batches).
The scheduler lists what each visit needs: reads, copies, computation, updates, writes, and their dependencies. Buffers
are assigned here, not while running; prefetching is a read whose buffer becomes free early. The engine runs the list; a
simulator can run the same list on a clock.
"""

from collections.abc import Collection, Iterator, Sequence

from fuyou.layout.model_layout import (
    FORWARD_PHASES,
    FULL_RECOMPUTATION,
    BufferCounts,
    ModelLayout,
    Phase,
    Recomputation,
    Visit,
)
from fuyou.layout.record import Kind, Record
from fuyou.schedule.activation_pools import ActivationPools, Arguments, hidden_arguments
from fuyou.schedule.batch import BatchShape
from fuyou.schedule.buffer_pool import NEVER, Pool
from fuyou.schedule.pass_position import PassPosition
from fuyou.schedule.record_pools import GradientPools, ParameterPools, RecordSlots, UpdatedRecord
from fuyou.schedule.tasks import Activation, ComputeTask, Op, StepList, Task, visit_flops


class Scheduler:
    """Builds step after step; each starts from the buffers that the last has left.

    Args:
        slot: the slot that holds the last committed state.
        deferred: indices of the records whose updates run in the next forward pass, just before they are needed,
            when the SSDs would otherwise be idle. The caller has ended the step by then, and knows the gradient's norm.
        speculate: whether all other updates run as if the norm were known, and their gradients stay until
            :meth:`resolve_speculation` decides whether they run again. Needs a commit of every step, so that the
            committed slot still holds the input of the updates.
        resident: indices of the records that stay in host memory: read once, and written in committed steps. The
            host buffers must hold the parameters of all records of their kind then.
        recomputation: which blocks save more than their input, and what that saves.
        direct_reads: whether parameters that nothing takes from host memory bypass it.
    """

    def __init__(
        self,
        layout: ModelLayout,
        counts: BufferCounts,
        *,
        slot: int = 0,
        deferred: Collection[int] = (),
        speculate: bool = False,
        resident: Collection[int] = (),
        recomputation: Recomputation = FULL_RECOMPUTATION,
        direct_reads: bool = False,
    ):
        self.layout = layout
        self.counts = counts
        self._deferred = frozenset(deferred)
        self._speculate = speculate
        self._resident = frozenset(resident)
        self._loaded: set[int] = set()  # resident records whose states are in host memory
        self._ended: Task | None = None  # the STEP task of the newest step
        self._commit_due = False  # whether that step is to be committed, once its deferred updates are done
        self._durable = True  # whether the step being scheduled is to be committed
        self._list = StepList(0)
        self._batch = BatchShape(1, 0, 0)
        self._pass = PassPosition(layout.records, self._training_visits())

        next_use = self._pass.next_use
        host = {
            kind: Pool(f"host parameters ({kind.value})", counts.host(kind), next_use, announced=True)
            for kind in Kind
        }
        self._slots = RecordSlots(layout, slot, host, self._emit)
        past_host = self._pass.used_from_host if direct_reads else None
        self._parameters = ParameterPools(counts, host, self._slots, next_use, self._emit, past_host)
        self._device_gradients = {
            kind: Pool(f"device gradients ({kind.value})", counts.device_gradients(kind), lambda _: NEVER)
            for kind in Kind
        }
        self._gradients = GradientPools(layout, counts, self._pass.first_use, self._emit)
        self._recomputation = recomputation
        backward = {visit.layer for visit in self._pass.visits if visit.phase is Phase.BLOCK_BACKWARD}
        self._saving_layers = recomputation.layers & backward
        self._activations = ActivationPools(
            Activation.HIDDEN,
            counts.device_activations,
            counts.host_activations,
            counts.ssd_activations,
            hidden_arguments,
        )
        self._saved = ActivationPools(
            Activation.SAVED, counts.device_saved, counts.host_saved, counts.ssd_saved, self._saved_arguments
        )
        for kind in {layout.records[index].kind for index in self._resident}:
            assert counts.host(kind) >= len(layout.of_kind(kind))

    # -- what the engine asks for ---------------------------------------------------------------------------------

    def training_step(self, step: int, batch: BatchShape, *, commit: bool = True) -> StepList:
        """Return the tasks of a training step.

        Args:
            commit: whether the step is committed at its end; with deferred updates, during the next step; with
                speculative updates, by :meth:`resolve_speculation`.
        """
        assert commit or not self._speculate
        assert not self._gradients.speculated, "resolve the speculation of the step before"
        self._list = StepList(step, own_loss=batch.own_loss, chunks=batch.chunks)
        self._batch = batch
        self._pass.follow(self._training_visits())
        self._activations.begin(self._list, self._pass.visits, batch, batch.activation_bytes)
        self._saved.begin(self._list, self._pass.visits, batch, batch.saved_bytes)
        self._durable = commit
        for visit in self._in_turn():
            if visit.phase in FORWARD_PHASES:
                for record in visit.records:
                    self._update_pending(record, durable=self._commit_due)
                self._commit_when_complete(step - 1)
            self._visit(visit)
        self._pass.end()
        self._ended = self._list.end = self._emit(Op.STEP, [])
        self._commit_due = commit
        if not self._speculate:
            self._commit_when_complete(step)
        return self._list

    def resolve_speculation(self, step: int, clipped: bool) -> StepList:
        """Return the tasks that commit ``step``, if it is complete; the caller has ended it and knows the norm.

        If it is clipped, its speculative updates are void: the records are again as in the committed slot, and their
        gradients wait like deferred ones, whose updates write the other slot.
        """
        self._list = StepList(step)
        for record in self._gradients.resolve_speculation(again=clipped):
            self._slots.revert(record.index)
            self._loaded.discard(record.index)
            self._parameters.drop_from_host(record)
        self._commit_when_complete(step)
        return self._list

    def evaluation(self, step: int, batch: BatchShape) -> StepList:
        """Return the tasks of a forward pass that changes nothing. Pending updates must be flushed before."""
        assert not self.pending, "flush before evaluating"
        self._list = StepList(step)
        self._batch = batch
        training = self._pass.visits
        # What stays is for the next forward pass.
        self._pass.follow(self.layout.visits(False, batch.micro_batches, together=batch.together))
        self._activations.begin(self._list, self._pass.visits, batch, batch.activation_bytes)
        self._saved.begin(self._list, self._pass.visits, batch, batch.saved_bytes)
        for visit in self._in_turn():
            self._visit(visit, train=False)
        self._pass.follow(training)
        return self._list

    def flush(self, step: int, *, commit: bool = True) -> StepList:
        """Return the tasks that apply pending updates without a forward pass, and commit the rest."""
        self._list = StepList(step)
        self._pass.begin()
        self._parameters.begin_pass()
        for visit in self._pass.visits:  # in the order in which the next forward needs them
            for record in visit.records:
                self._update_pending(record, durable=commit)
        if commit:
            self._commit(step)
        return self._list

    @property
    def pending(self) -> bool:
        return bool(self._gradients.pending)

    @property
    def speculative(self) -> bool:
        """Whether updates may run again, see :meth:`resolve_speculation`."""
        return bool(self._gradients.speculated)

    @property
    def commit_step(self) -> int | None:
        """Return the newest step whose commit is among the returned tasks."""
        return None if self._slots.commit is None else self._slots.commit.step

    # -- visits ---------------------------------------------------------------------------------------------------

    def _training_visits(self) -> Sequence[Visit]:
        return self.layout.visits(True, self._batch.micro_batches, self._batch.own_loss, self._batch.together)

    def _in_turn(self) -> Iterator[Visit]:
        self._parameters.begin_pass()
        for visit in self._pass.in_turn():
            self._parameters.begin_visit([self.layout.records[index] for index in visit.records])
            yield visit

    def _visit(self, visit: Visit, train: bool = True) -> None:
        records = [self.layout.records[index] for index in visit.records]
        places = [self._parameters.on_device(record) for record in records]
        buffers = {record.index: buffer for record, (buffer, _) in zip(records, places, strict=True)}
        ready = [upload for _, upload in places]
        gradients: dict[int, int] = {}
        first = set()  # records whose gradients no earlier visit has begun
        for index in visit.trained:
            gradients[index], accumulates, busy = self._gradient_buffer(self.layout.records[index])
            ready += busy
            if not accumulates:
                first.add(index)
        flops = visit_flops(self.layout, visit, self._batch.tokens, self._recomputation)
        micros = self._batch.micro_batches_of(visit)
        compute: ComputeTask | None = None
        for micro in micros:
            compute = ComputeTask(
                Op.COMPUTE,
                list(ready),
                flops=flops + self._batch.attention_flops(visit.phase, micro),
                tokens=self._batch.tokens,
                step=self._list.step,
                record=visit.record,
                visit=visit,
                micro=micro,
                places=buffers,
                gradients=gradients,
                begins=micro == micros[0],
                first=frozenset(first if micro == micros[0] else ()),
                last=micro == micros[-1],
            )
            self._move_activations(compute, train)
            self._list.tasks.append(compute)
        assert compute is not None
        for record in records:
            self._parameters.use_on_device(record, buffers[record.index], compute)
        self._parameters.end_visit()
        for index, gradient in gradients.items():
            trained = self.layout.records[index]
            self._device_gradients[trained.kind].fill(gradient, index, compute)
            if index in visit.completes:
                self._finish_gradient(trained, gradient, compute)

    def _move_activations(self, compute: ComputeTask, train: bool) -> None:
        inputs, outputs = next(self._activations.arguments)
        saved_input, saved_output = next(self._saved.arguments)
        if not (train or self._batch.chunks > 1):
            saved_input = []
            saved_output = []
        # Uploads share a lane: what is large and finds its buffer free comes before what may have to wait for one.
        for key in saved_input:
            compute.saved = self._saved.fetch(key, saved_input, compute)
        compute.inputs = tuple(self._activations.fetch(key, inputs + outputs, compute) for key in inputs)
        for key in outputs:
            compute.output = self._activations.produce(key, inputs + outputs, compute)
        for key in saved_output:
            if key in saved_input:
                self._saved.rewrite(key, compute)
            else:
                compute.saved = self._saved.produce(key, saved_output, compute)
        self._activations.release(inputs)
        self._saved.release(saved_input)

    # -- gradients and updates ------------------------------------------------------------------------------------

    def _gradient_buffer(self, record: Record) -> tuple[int, bool, list[Task]]:
        pool = self._device_gradients[record.kind]
        index = pool.find(record.index)
        if index is not None:
            return index, True, []
        index, _ = pool.take(record.index)
        return index, False, pool.slots[index].busy()

    def _finish_gradient(self, record: Record, source: int, compute: Task) -> None:
        """Bring a complete gradient to the host; update at once, or let it wait for the next forward pass."""
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
        self._parameters.drop_from_device(record)  # the update makes the device's copy stale
        if record.index in self._deferred:
            self._gradients.pending[record.index] = self._list.step
        else:
            self._update(record, target, download, self._list.step, self._durable, keep=self._speculate)

    def _reduce(self, record: Record, buffer: int, ready: Task) -> Task:
        """Sum a gradient over all ranks, inside nodes, then between them; return the task after which it is there."""
        share = record.share
        width = record.precision.gradient_bytes
        if share.ranks_per_node > 1:
            nbytes = (sum(record.filled_slices) - record.filled_slices[share.local_rank]) * width
            ready = self._emit(Op.GRADIENT_REDUCE, [ready], record=record.index, source=buffer, nbytes=nbytes)
        if share.nodes > 1:
            nbytes = (sum(record.filled_parts) - record.filled_parts[share.node]) * width
            ready = self._emit(
                Op.GRADIENT_EXCHANGE, [ready], record=record.index, source=buffer, nbytes=nbytes
            )
        return ready

    def _update_pending(self, index: int, durable: bool) -> None:
        """Apply the deferred update of a record, if there is one; ``durable``: its step is to be committed."""
        step = self._gradients.pending.pop(index, None)
        if step is not None:
            record = self.layout.records[index]
            self._update(record, *self._gradients.fetch(record), step, durable)

    def _update(
        self, record: Record, gradient: int, ready: Task, step: int, durable: bool, keep: bool = False
    ) -> None:
        """Read the record's states, update, write parameters and states to the other slot.

        States of a resident record are read the first time only (and again after a void update), and written only if
        the step is to be committed.
        """
        host, loaded = self._parameters.on_host(record)
        written = durable or record.index not in self._resident
        read = self._emit(
            Op.STATE_READ,
            list(self._slots.writes[record.index]),
            record=record.index,
            source=self._slots.newest[record.index],
            nbytes=0 if record.index in self._loaded else record.state_nbytes,
        )
        if record.index in self._resident:
            self._loaded.add(record.index)
        waits = [ready, loaded, read, *self._parameters.host_users(record, host)]
        if self._slots.commit is not None:
            # Until it is done, a killed run continues from the slot that is written
            waits.append(self._slots.commit)
        target = self._slots.target if written else None
        update = self._emit(
            Op.UPDATE,
            waits,
            record=record.index,
            source=host,
            gradient=gradient,
            nbytes=record.owned,
            target=target,
        )
        update.step = step
        updated = UpdatedRecord(record.index, update, self._exchange_parameters(record, host, update), host)
        self._parameters.update_on_host(record, host, updated.ready)
        if written:
            self._slots.write(updated)
        else:
            self._slots.leave_unwritten(updated)
        self._gradients.updated(gradient, record, update, keep=keep)

    def _exchange_parameters(self, record: Record, host: int, update: Task) -> Task:
        """Give every node what the others have updated of its slices; return the task after which they are new."""
        if record.share.nodes == 1:
            return update
        filled = record.filled_parts[record.share.node]
        nbytes = (record.share.nodes - 1) * filled * record.precision.parameter_bytes
        exchange = self._emit(Op.PARAMETER_SPREAD, [update], record=record.index, source=host, nbytes=nbytes)
        exchange.step = update.step
        return exchange

    def _commit_when_complete(self, step: int) -> None:
        if self._commit_due and not self.pending:
            self._commit(step)

    def _commit(self, step: int) -> None:
        self._commit_due = False
        self._slots.commit_step(step, self._ended)

    # -- small parts ----------------------------------------------------------------------------------------------

    def _emit(self, op: Op, after: list[Task], **fields: int | None) -> Task:
        task = Task(op, after, step=self._list.step, **fields)  # type: ignore[arg-type]
        self._list.tasks.append(task)
        return task

    def _saved_arguments(self, visit: Visit, micro: int) -> Arguments:
        chunks = self._batch.chunks
        if chunks > 1 and visit.phase in (Phase.BLOCK_FORWARD, Phase.BLOCK_BACKWARD):
            keys = [("k", visit.layer or 0, micro // chunks)]
            return keys if visit.phase is Phase.BLOCK_BACKWARD or micro % chunks else [], (
                keys if visit.phase is Phase.BLOCK_FORWARD else []
            )
        if visit.layer in self._saving_layers and visit.part is None and not self._batch.is_reference(micro):
            key = ("k", visit.layer, micro)
            if visit.phase is Phase.BLOCK_FORWARD:
                return [], [key]
            if visit.phase is Phase.BLOCK_BACKWARD:
                return [key], []
        return [], []
