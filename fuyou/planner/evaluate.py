"""Evaluate one way of running a step: count its buffers, list its tasks, and simulate the list.

A list of hundreds of thousands of tasks takes seconds to simulate. To compare candidates, micro-batches are merged
until few are left: the same bytes and FLOPs in fewer tasks, with buffers of activations in proportion.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

from common.errors import UserError
from common.hardware.compute_rates import ComputeRates
from fuyou.layout.model_layout import Recomputation, most_of_a_kind
from fuyou.layout.record import Kind
from fuyou.model.recompute.block_trace import BlockTrace
from fuyou.model.recompute.policy import (
    ActivationPlanner,
    ActivationPolicy,
    chunk_attention_flops,
    saved_outputs,
    trace_block,
)
from fuyou.optimizer.clipping import UpdatePolicy
from fuyou.planner.machine import Machine
from fuyou.planner.plan import SAVE_NOTHING, Candidate, Plan
from fuyou.planner.roofline import ATTENTION_BACKWARD, LOSS_BYTES, block_seconds
from fuyou.planner.simulator import SteadyState, TaskRates, simulate
from fuyou.planner.training_job import TrainingJob, fitting_job
from fuyou.schedule.batch import Batch
from fuyou.schedule.memory_plan import MemoryPlan
from fuyou.schedule.memory_planner import MemoryPlanner
from fuyou.schedule.tasks import SSD_WRITES, ComputeTask, Op, Resource, StepList

_MAX_TASKS = 640  # Visits times micro-batches in a step that is only simulated to compare
# Steps until one is like the next: two, with deferred updates one more, and another one where what is written from host
# memory, when a step has been committed, is what the step after the next waits for.
_STEPS = 2
_STEPS_DEFERRING = 3
_STEPS_WRITING_LATE = 4


class Evaluator:
    """Evaluates candidates for one job on one machine, each only once."""

    def __init__(self, job: TrainingJob, machine: Machine):
        self.machine = machine
        self._too_small: UserError | None = None
        try:
            job, _ = fitting_job(job, machine.device_bytes, machine.host_bytes, machine.cpu)
        except UserError as error:
            self._too_small = error  # which every candidate meets
        self.job = job
        self._device = "cpu" if machine.cpu else "cuda"
        self._activation_planners: dict[ActivationPolicy, ActivationPlanner] = {}
        self._memories: dict[tuple[Candidate, int | None], MemoryPlan] = {}
        self._known: dict[tuple[Candidate, bool], Plan] = {}
        self._known_rates: dict[int, TaskRates] = {}  # by the rows of a micro-batch

    def evaluate(self, candidate: Candidate, *, merged: bool = True) -> Plan:
        """Simulate ``candidate``, fast and less exact with ``merged`` micro-batches.

        Raises:
            UserError: if it does not fit into memory; says how much would.
        """
        memory = self.memory(candidate)
        candidate = replace(candidate, micro_rows=memory.batch.micro_rows)
        plan = merge_micro_batches(memory, len(self.job.layout.blocks)) if merged else memory
        key = (candidate, plan is not memory)  # what is not merged anyway is simulated once
        if key not in self._known:
            self._known[key] = self._evaluate(candidate, memory, plan)
        return self._known[key]

    def tried(self) -> list[Plan]:
        """Return the candidates that were evaluated, as simulated to compare."""
        known = self._known
        return [
            each for (candidate, merged), each in known.items() if merged or (candidate, True) not in known
        ]

    def fits(self, candidate: Candidate) -> bool:
        """Return whether ``candidate`` fits into memory, with rows as whole as the default's: chunks are slower."""
        try:
            self.memory(candidate, self._columns)
        except UserError:
            return False
        return True

    def update_policy(self, candidate: Candidate) -> UpdatePolicy:
        """Return when ``candidate`` runs its updates."""
        return UpdatePolicy(candidate.clip_by if self.job.clips else None, candidate.deferred_fraction)

    def activation_planner(self, candidate: Candidate) -> ActivationPlanner:
        """Return what ``candidate`` saves for the backward pass: nothing if blocks are in pieces."""
        layout = self.job.layout
        policy = SAVE_NOTHING if layout.orders else candidate.activation_policy
        if policy not in self._activation_planners:
            self._activation_planners[policy] = ActivationPlanner(
                self.job.stack, self._device, layout.precision.dtype, policy
            )
        return self._activation_planners[policy]

    def saved_seconds(self, candidate: Candidate) -> float:
        """Return the seconds of a step's computing that ``candidate`` saves, compared with one that saves nothing."""
        batch = self.memory(candidate).batch
        recomputation = self.activation_planner(candidate).recomputation(batch.micro_rows, batch.columns)
        rates = self._rates_for(batch.micro_rows)
        rate = rates.backward_flops_per_second or rates.flops_per_second
        return self._left_out(recomputation) * 2 * self.job.block_parameters * self.job.tokens / rate

    def spilling_seconds(self, candidate: Candidate) -> float:
        """Return for how long, at least, the drives keep the forward pass of ``candidate`` longer than its computing.

        Of the outputs that it saves, what memory cannot hold must be on the drives when the pass ends.
        """
        job = self.job
        memory = self.memory(candidate)
        batch = memory.batch
        counts = memory.counts
        if not memory.saved_bytes or batch.chunks > 1:
            return 0.0
        sets = len(self.activation_planner(candidate).layers) * batch.micro_batches
        spilled = (sets - counts.device_saved - counts.host_saved) * memory.saved_bytes
        rates = self._rates_for(batch.micro_rows)
        visits = len(job.layout.blocks) * batch.micro_batches
        computing = (
            2 * job.block_parameters * job.tokens / job.layout.share.world_size / rates.flops_per_second
        )
        return max(
            0.0, spilled / rates.write_bytes_per_second - max(computing, visits * rates.host_seconds[0])
        )

    def _left_out(self, recomputation: Recomputation) -> float:
        """Return the fraction of all blocks' forward FLOPs that the backward pass does not compute again."""
        layers = len(self.job.layout.blocks)
        return 1 - sum(recomputation.fraction(layer) for layer in range(layers)) / layers

    def memory(self, candidate: Candidate, chunk: int | None = None) -> MemoryPlan:
        """Return the buffers of ``candidate``.

        Args:
            chunk: tokens of a row that pass at once; None for the job's choice.

        Raises:
            UserError: if they do not fit; says how much would.
        """
        if self._too_small is not None:
            raise self._too_small
        if (candidate, chunk) not in self._memories:
            self._memories[candidate, chunk] = self._planner(candidate).plan(
                self.job.rows, self.job.seq_len, candidate.micro_rows, self.job.loss, chunk or self.job.chunk
            )
        return self._memories[candidate, chunk]

    def _planner(self, candidate: Candidate) -> MemoryPlanner:
        job, machine, activations = self.job, self.machine, self.activation_planner(candidate)
        updates = self.update_policy(candidate)
        return MemoryPlanner(
            job.layout,
            job.config,
            machine.device_bytes,
            machine.host_bytes,
            machine.cpu,
            deferred=most_of_a_kind(job.layout, updates.deferred(job.layout)),
            speculative=updates.speculative,
            host_cache=job.host_cache,
            saving_layers=len(activations.layers),
            saved_bytes=lambda batch: activations.saved(batch.micro_rows, batch.columns).nbytes,
        )

    @cached_property
    def _columns(self) -> int:
        try:
            return self.memory(Candidate(self.job.micro_batch, 0.0)).batch.columns
        except UserError:
            return self.job.seq_len

    @cached_property
    def _chunk_flops(self) -> tuple[tuple[float, float], ...]:
        """Return the FLOPs in which each chunk attends to earlier ones, on average over blocks, as tasks count them.

        Of a block's forward pass and its backward pass, which computes the forward pass once more.
        """
        job = self.job
        tokens = self._columns
        if tokens == job.seq_len or self.trace is None:
            return ()
        counted = 2 * job.block_parameters / len(job.layout.blocks) * tokens / self.trace.flops()
        forward = counted
        backward = (1 + ATTENTION_BACKWARD) * counted
        if self.machine.compute is not None:
            # Attention has separate rates, at which chunks attend to earlier ones
            kernel = self.machine.compute.flash2
            rates = self.rates
            assert rates.backward_flops_per_second is not None
            forward = rates.flops_per_second / kernel.forward
            seconds = 1 / kernel.forward + ATTENTION_BACKWARD / kernel.backward
            backward = rates.backward_flops_per_second * seconds
        flops = chunk_attention_flops(job.stack, job.seq_len, tokens)
        return tuple((forward * each, backward * each) for each in flops)

    @cached_property
    def trace(self) -> BlockTrace | None:
        """Return the operators of a block, or None if the family's code needs values to run."""
        return trace_block(self.job.stack, self._columns, self._device, self.job.layout.precision.dtype)

    @cached_property
    def rates(self) -> TaskRates:
        """Return the rates for micro-batches of one row."""
        return self._rates_for(1)

    def _rates_for(self, rows: int) -> TaskRates:
        """Return the rates for micro-batches of ``rows`` rows, with FLOPs as tasks count them: 2 per parameter and
        token."""
        if rows not in self._known_rates:
            self._known_rates[rows] = self._new_rates(rows)
        return self._known_rates[rows]

    def _new_rates(self, rows: int) -> TaskRates:
        machine = self.machine
        job = self.job
        if self.trace is None:
            return machine.rates
        if machine.profile is not None:
            measured = machine.profile.rates(1.0 - saved_outputs(self.trace, ()).saved_fraction)
            return replace(
                machine.rates,
                flops_per_second=measured.flops_per_second,
                backward_flops_per_second=measured.backward_flops_per_second,
            )
        counted = 2 * job.block_parameters / len(job.layout.blocks) * self._columns
        if machine.compute is not None:
            return self._rates_of_parts(machine.compute, self.trace, counted, rows)
        return replace(
            machine.rates, flops_per_second=machine.rates.flops_per_second * counted / self.trace.flops()
        )

    @cached_property
    def _shorter_trace(self) -> BlockTrace | None:
        job = self.job
        return trace_block(job.stack, max(1, self._columns // 2), self._device, job.layout.precision.dtype)

    def _rates_of_parts(
        self, compute: ComputeRates, trace: BlockTrace, counted: float, rows: int
    ) -> TaskRates:
        """Return rates at which tasks take as long as a block's operators, of ``counted`` FLOPs for a row forward."""
        trained = bool(self.job.layout.sizes[Kind.BLOCK].trained_elements)
        seconds = block_seconds(trace, compute, trained, rows, self._shorter_trace)
        counted *= rows
        passes = 2.0 + trained - saved_outputs(trace, ()).saved_fraction
        hidden = self.job.config.get_text_config().hidden_size
        return replace(
            self.machine.rates,
            flops_per_second=counted / seconds.forward,
            backward_flops_per_second=passes * counted / (seconds.again + seconds.gradients),
            head_flops_per_second=1 / (1 / compute.dense + LOSS_BYTES / (6 * hidden * compute.memory)),
        )

    # -- simulation -----------------------------------------------------------------------------------------------

    def simulated_step(self, candidate: Candidate) -> SteadyState:
        """Simulate ``candidate`` with all of its tasks, which no plan keeps."""
        memory = self.memory(candidate)
        is_clipped = False if self.update_policy(candidate).speculative else None
        return self._simulate(
            replace(candidate, micro_rows=memory.batch.micro_rows), memory, memory, is_clipped
        )

    def _recomputation(self, candidate: Candidate, batch: Batch) -> Recomputation:
        recomputation = self.activation_planner(candidate).recomputation(batch.micro_rows, batch.columns)
        # Of rows in chunks, nothing but keys and values is saved
        return recomputation.saving_nothing() if batch.chunks > 1 else recomputation

    def _rates_of(self, memory: MemoryPlan, plan: MemoryPlan) -> TaskRates:
        """Return the rates at which ``plan`` runs, whose micro-batches may be several of those of ``memory``."""
        joined = memory.batch.micro_batches / plan.batch.micro_batches
        rates = self._rates_for(memory.batch.micro_rows)
        forward, backward = rates.host_seconds
        return replace(rates, host_seconds=(joined * forward, joined * backward))

    def _simulate(
        self, candidate: Candidate, memory: MemoryPlan, plan: MemoryPlan, clipped: bool | None
    ) -> SteadyState:
        job = self.job
        batch = memory.batch
        deferred = self.update_policy(candidate).deferred(job.layout)
        waits = bool(deferred) or job.clips
        writes_late = waits and bool(plan.resident)
        return simulate(
            job.layout,
            plan,
            self._rates_of(memory, plan),
            deferred,
            _STEPS_WRITING_LATE if writes_late else _STEPS_DEFERRING if waits else _STEPS,
            commit_every=job.commit_every,
            recomputation=self._recomputation(candidate, batch),
            clipped=clipped,
            direct_reads=job.direct_reads,
            chunk_flops=self._chunk_flops if batch.chunks > 1 else (),
        )

    def _evaluate(self, candidate: Candidate, memory: MemoryPlan, plan: MemoryPlan) -> Plan:
        job = self.job
        batch = memory.batch
        updates = self.update_policy(candidate)
        steady = self._simulate(candidate, memory, plan, False if updates.speculative else None)
        clipped = self._simulate(candidate, memory, plan, True) if updates.speculative else None

        def expected(measure: Callable[[SteadyState], float]) -> float:
            """Return what is measured in a step, averaged over steps that are clipped and steps that are not."""
            unclipped = measure(steady)
            if clipped is None:
                return unclipped
            return unclipped + job.clipped_share * (measure(clipped) - unclipped)

        seconds = expected(SteadyState.step_seconds)
        busy = mean_busy_seconds(steady, self._rates_of(memory, plan))
        # Writes that wait for a commit pile up for more steps than are simulated where the drives are the bound.
        seconds = max(seconds, *busy.values())
        left_out = self._left_out(self._recomputation(candidate, batch))
        job = job.causal if batch.chunks > 1 else job
        recomputed = (job.hardware_flops_per_token - job.model_flops_per_token) * job.tokens
        return Plan(
            job,
            self.machine,
            candidate,
            memory=memory,
            step_seconds=seconds,
            busy=busy,
            read_bytes=round(expected(lambda steps: steps.mean(StepList.ssd_read_bytes))),
            written_bytes=round(expected(lambda steps: steps.mean(StepList.ssd_written_bytes))),
            sent_bytes=round(expected(lambda steps: steps.mean(StepList.sent_bytes))),
            clipped_seconds=None if clipped is None else clipped.step_seconds(),
            update_seconds=steady.mean(lambda tasks: update_seconds(tasks, self.rates)),
            saved_flops=left_out * recomputed,
            saved_activation_bytes=steady.cycle[-1].saved_bytes(plan.saved_bytes),
            ssd_bytes=self._ssd_bytes(memory, updates),
        )

    def _ssd_bytes(self, memory: MemoryPlan, updates: UpdatePolicy) -> int:
        layout = self.job.layout
        total = self.job.record_bytes + memory.counts.ssd_activations * memory.activation_bytes
        total += memory.counts.ssd_saved * memory.saved_bytes
        if memory.spills_gradients(layout, updates.held(layout)):
            total += sum(record.gradient_nbytes for record in layout.records)
        return total


def merge_micro_batches(plan: MemoryPlan, layers: int) -> MemoryPlan:
    """Return a plan for the same step in fewer, larger micro-batches, regardless of device memory."""
    several = plan.batch.micro_batches
    counts = plan.counts
    few = max(1, _MAX_TASKS // (2 * layers))
    if several < 2 * few or plan.batch.chunks > 1:
        return plan
    batch = replace(plan.batch, micro_rows=-(-plan.batch.rows // few))
    factor = several / batch.micro_batches
    everything = batch.activations(layers)
    saved = layers * batch.micro_batches
    spills = bool(counts.host_activations)
    device = max(4, int(counts.device_activations / factor)) if spills else everything
    device_saved = max(2, round(counts.device_saved / factor)) if counts.device_saved else 0
    # Where the drives have no part in it, all has its place in the host's memory, however that was rounded.
    least = 2 if counts.ssd_activations else max(2, everything - device + 1)
    least_saved = 2 if counts.ssd_saved else max(2, saved - device_saved + 1)
    merged = replace(
        counts,
        device_activations=device,
        host_activations=max(least, int(counts.host_activations / factor)) if spills else 0,
        ssd_activations=everything if counts.ssd_activations else 0,
        device_saved=device_saved,
        host_saved=max(least_saved, round(counts.host_saved / factor)) if counts.host_saved else 0,
        ssd_saved=saved if counts.ssd_saved else 0,
    )
    return replace(
        plan,
        batch=batch,
        counts=merged,
        activation_bytes=round(plan.activation_bytes * factor),
        saved_bytes=round(plan.saved_bytes * factor),
    )


def mean_busy_seconds(steady: SteadyState, rates: TaskRates) -> dict[Resource, float]:
    """Return for how long a step keeps each resource busy, on average from one commit to the next."""
    total: dict[Resource, float] = {}
    for tasks, count in zip(steady.cycle, steady.repeats, strict=True):
        for resource, seconds in busy_seconds(tasks, rates).items():
            total[resource] = total.get(resource, 0.0) + count * seconds
    return {resource: seconds / sum(steady.repeats) for resource, seconds in total.items()}


def busy_seconds(tasks: StepList, rates: TaskRates) -> dict[Resource, float]:
    """Return for how long a step's tasks keep each resource busy; links between ranks only if used."""
    moved = dict.fromkeys(Resource, 0.0)
    messages = dict.fromkeys(Resource, 0)
    for task in tasks.tasks:
        resource = task.op.resource
        moved[resource] += rates.compute_seconds(task) if isinstance(task, ComputeTask) else task.nbytes
        messages[resource] += 1
        if task.op is Op.PARAMETER_READ_DEVICE:
            moved[Resource.HOST_TO_DEVICE] += task.nbytes
    busy = {
        Resource.GPU: moved[Resource.GPU],
        Resource.HOST_TO_DEVICE: moved[Resource.HOST_TO_DEVICE] / rates.upload_bytes_per_second,
        Resource.DEVICE_TO_HOST: moved[Resource.DEVICE_TO_HOST] / rates.download_bytes_per_second,
        Resource.SSD: tasks.ssd_read_bytes() / rates.read_bytes_per_second
        + tasks.ssd_written_bytes() / rates.write_bytes_per_second,
        Resource.ADAM: moved[Resource.ADAM] / rates.adam_parameters_per_second,
    }
    for resource, rate in (
        (Resource.INTRA_NODE, rates.intra_node_bytes_per_second),
        (Resource.INTER_NODE, rates.inter_node_bytes_per_second),
    ):
        if messages[resource]:
            busy[resource] = moved[resource] / rate + messages[resource] * rates.message_seconds
    return busy


_UPDATE_WRITES = SSD_WRITES - {Op.ACTIVATION_WRITE}


def update_seconds(tasks: StepList, rates: TaskRates) -> float:
    """Return the seconds of work of a step's updates: gradient downloads, Adam, and states on the SSDs."""
    seconds = 0.0
    for task in tasks.tasks:
        if task.op in (Op.STATE_READ, Op.GRADIENT_READ):
            seconds += task.nbytes / rates.read_bytes_per_second
        elif task.op in _UPDATE_WRITES:
            seconds += task.nbytes / rates.write_bytes_per_second
        elif task.op is Op.UPDATE:
            seconds += task.nbytes / rates.adam_parameters_per_second
        elif task.op is Op.GRADIENT_DOWNLOAD:
            seconds += task.nbytes / rates.download_bytes_per_second
        elif task.op is Op.PARAMETER_SPREAD:
            seconds += task.nbytes / rates.inter_node_bytes_per_second + rates.message_seconds
    return seconds
