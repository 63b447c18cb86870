"""What one way of running a step costs: buffers counted, tasks listed, the list run on a clock.

A list of hundreds of thousands of tasks takes seconds to simulate. For comparing candidates, micro-batches are merged
until few enough are left: the same bytes and FLOPs in fewer tasks, buffers of activations in proportion.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from common.errors import UserError
from fuyou.layout.deferred import interleaved
from fuyou.layout.model_layout import Recomputation
from fuyou.optimizer.clipping import ClipBy
from fuyou.planner.machine import Machine
from fuyou.planner.simulator import Simulation, TaskRates, simulate
from fuyou.planner.training import Training
from fuyou.recompute.block_trace import BlockTrace, Operator
from fuyou.recompute.policy import ActivationPlanner, ActivationPolicy, keep_of, roofline, trace_block, worth_keeping
from fuyou.schedule.memory_plan import Batch, MemoryPlan, MemoryPlanner
from fuyou.schedule.tasks import Resource, StepList

#: Visits times micro-batches in a step that is only simulated to compare.
_MOST_TASKS = 640
#: Steps until one is like the next: two, with deferred updates one more, and another one where what is written from
#: host memory, when a step has been committed, is what the step after the next waits for.
_STEPS, _STEPS_WRITING_LATE = 3, 4
NOTHING = ActivationPolicy((), 0)


@dataclass(frozen=True)
class Candidate:
    """One way of running a step."""

    micro_rows: int | None
    """None takes what the memory plan prefers."""
    deferred_fraction: float
    keeping: ActivationPolicy = NOTHING
    clip_by: ClipBy = ClipBy.DEFERRAL
    """How gradients are clipped, if they are."""


@dataclass(frozen=True)
class Evaluation:
    """What a candidate comes to."""

    candidate: Candidate
    memory: MemoryPlan
    step_seconds: float
    """On average over steps that are clipped and steps that are not."""
    busy: dict[Resource, float]
    """Seconds of work in one step (here and below: one that is not clipped, where that makes a difference)."""
    tasks: StepList
    """Of a step in the steady state, with the simulator's times."""
    simulation: Simulation
    kept_bytes: int
    """Of one layer and micro-batch, as simulated."""
    saved_flops: float
    """Of recomputing all blocks' forward passes, what a step leaves out."""
    clipped_seconds: float | None = None
    """What a step takes if each is clipped and its updates are done twice; None where they never are."""

    @property
    def bound(self) -> Resource:
        """What is busy the longest."""
        return max(self.busy, key=lambda resource: self.busy[resource])

    @property
    def bound_seconds(self) -> float:
        """No schedule makes the step shorter than this."""
        return max(self.busy.values())


class Evaluator:
    """Evaluates candidates for one training on one machine; each only once."""

    def __init__(self, training: Training, machine: Machine):
        self.training = training
        self.machine = machine
        self._keeping: dict[ActivationPolicy, ActivationPlanner] = {}
        self._known: dict[tuple[Candidate, bool], Evaluation | UserError] = {}

    def evaluate(self, candidate: Candidate, *, merged: bool = True) -> Evaluation:
        """Simulate ``candidate``; with ``merged`` micro-batches it is quick and a little off.

        Raises:
            UserError: it does not fit into memory; says how much would.
        """
        if candidate.micro_rows is None:
            candidate = replace(candidate, micro_rows=self.memory(candidate).batch.micro_rows)
        key = (candidate, merged)
        if key not in self._known:
            try:
                self._known[key] = self._evaluate(candidate, merged)
            except UserError as error:
                self._known[key] = error
        result = self._known[key]
        if isinstance(result, UserError):
            raise result
        return result

    def fits(self, candidate: Candidate) -> bool:
        """Whether it fits into memory."""
        try:
            self.memory(candidate)
        except UserError:
            return False
        return True

    def deferred(self, candidate: Candidate) -> frozenset[int]:
        """Records whose updates wait for the next forward pass."""
        everything = self.training.clips and candidate.clip_by is ClipBy.DEFERRAL
        return interleaved(self.training.shape, 1.0 if everything else candidate.deferred_fraction)

    def speculative(self, candidate: Candidate) -> bool:
        """Whether other updates are done before the gradient's norm is known."""
        return self.training.clips and candidate.clip_by is ClipBy.SPECULATION

    def held(self, candidate: Candidate) -> frozenset[int]:
        """Records whose gradients stay until the step has ended."""
        return frozenset(self.training.shape.trainable) if self.speculative(candidate) else self.deferred(candidate)

    def keeping(self, candidate: Candidate) -> ActivationPlanner:
        """What ``candidate`` keeps for the backward pass, for any batch."""
        wanted = candidate.keeping
        if wanted not in self._keeping:
            self._keeping[wanted] = ActivationPlanner(
                self.training.stack, self._kernels, self.training.shape.precision.dtype, wanted
            )
        return self._keeping[wanted]

    @cached_property
    def trace(self) -> BlockTrace | None:
        """A block's operators; None where its family's code does not run without values."""
        training = self.training
        try:
            return trace_block(training.stack, training.seq_len, self._kernels, training.shape.precision.dtype)
        except Exception:
            return None

    @cached_property
    def rates(self) -> TaskRates:
        """The machine's, with the device's in FLOPs as the task list counts them: 2 per parameter and token."""
        machine, training = self.machine, self.training
        if self._operator_seconds is not None:
            assert machine.profile is not None and self.trace is not None
            measured = machine.profile.rates(1.0 - keep_of(self.trace, ()).saved_fraction)
            return replace(
                machine.rates, flops_per_second=measured.flops_per_second,
                backward_flops_per_second=measured.backward_flops_per_second,
            )  # fmt: skip
        if not machine.all_flops or self.trace is None:
            return machine.rates
        listed = 2 * training.block_parameters / len(training.shape.blocks) * training.seq_len
        return replace(machine.rates, flops_per_second=machine.rates.flops_per_second * listed / self.trace.flops())

    @cached_property
    def _operator_seconds(self) -> list[float] | None:
        """Of each of the trace's operators for a micro-batch of the profile, if it has measured just these."""
        profile = self.machine.profile
        if profile is None or self.trace is None:
            return None
        if [(one.name, one.ordinal) for one in profile.operators] != [
            (o.name, o.ordinal) for o in self.trace.operators
        ]:
            return None
        seconds = [one.seconds for one in profile.operators]
        # One at a time they take longer than the whole pass: each is waited for, in Python.
        return [one * min(1.0, profile.block_forward_seconds / sum(seconds)) for one in seconds]

    def cost(self, operator: Operator) -> float:
        """What it costs to compute ``operator`` again: measured, or as a GPU's roofline has it."""
        if self._operator_seconds is None:
            return roofline(operator)
        assert self.trace is not None
        return self._operator_seconds[self.trace.operators.index(operator)]

    def recomputation(self, candidate: Candidate, micro_rows: int) -> Recomputation:
        """What of a block's forward pass is computed again, in FLOPs of the backward pass's rate."""
        found = self.keeping(candidate).recomputation(micro_rows, self.training.seq_len)
        if self._operator_seconds is None or not found.layers:
            return found
        profile = self.machine.profile
        assert profile is not None and self.trace is not None
        seconds = self._left_out(candidate.keeping.operators)
        if profile.kept_bytes:  # leaving operators out one by one saves less than what they take one by one
            most = self._left_out(worth_keeping(self.trace))
            seconds *= max(0.0, profile.block_backward_seconds - profile.kept_backward_seconds) / most
        backward = 3 - found.unneeded  # what was measured, in forward passes' FLOPs
        return replace(found, saved=found.unneeded + backward * seconds / profile.block_backward_seconds)

    def _left_out(self, operators: Iterable[tuple[str, int]]) -> float:
        """Seconds of what a micro-batch of the profile need not compute again if these calls' outputs are kept."""
        assert self._operator_seconds is not None and self.trace is not None
        kept = [self.trace.find(*one) for one in operators]
        left_out = self.trace.required() - self.trace.required(frozenset(one for one in kept if one is not None))
        return sum(self._operator_seconds[index] for index in left_out)

    def _keep_seconds(self, kept_bytes: int, micro_tokens: int) -> float:
        """Per token, by which a forward pass takes longer if it keeps so many bytes of a micro-batch."""
        profile = self.machine.profile
        if profile is None or not profile.kept_bytes:
            return 0.0
        longer = max(0.0, profile.kept_forward_seconds - profile.block_forward_seconds)
        return longer * kept_bytes / profile.kept_bytes / micro_tokens

    def memory(self, candidate: Candidate) -> MemoryPlan:
        """The buffers that ``candidate`` gets.

        Raises:
            UserError: they do not fit; says how much would.
        """
        training, machine, keeping = self.training, self.machine, self.keeping(candidate)
        planner = MemoryPlanner(
            training.shape, training.config, machine.device_bytes, machine.host_bytes, machine.cpu,
            deferred=len(self.deferred(candidate)), speculative=self.speculative(candidate),
            host_cache=training.host_cache, kept_layers=len(keeping.layers),
            kept_bytes=lambda batch: keeping.keep(batch.micro_rows, batch.seq_len).nbytes,
        )  # fmt: skip
        return planner.plan(training.rows, training.seq_len, candidate.micro_rows)

    @property
    def _kernels(self) -> str:
        return "cpu" if self.machine.cpu else "cuda"

    def uncommitted(self, candidate: Candidate) -> Evaluation:
        """The same steps if none of them is committed: what lives in host memory is not written."""
        return self._evaluate(candidate, merged=True, commit=False)

    def _evaluate(self, candidate: Candidate, merged: bool, commit: bool = True) -> Evaluation:
        training, memory = self.training, self.memory(candidate)
        layers = len(training.shape.blocks)
        plan = merge_micro_batches(memory, layers) if merged else memory
        recomputation = self.keeping(candidate).recomputation(memory.batch.micro_rows, training.seq_len)
        kept_bytes = self.keeping(candidate).keep(memory.batch.micro_rows, training.seq_len).nbytes
        rates = replace(self.rates, keep_seconds=self._keep_seconds(kept_bytes, memory.batch.micro_tokens))

        deferred = self.deferred(candidate)
        late = (bool(deferred) or training.clips) and bool(plan.resident) and commit
        steps = _STEPS_WRITING_LATE if late else _STEPS

        def run(clipped: bool | None) -> tuple[Simulation, StepList]:
            return simulate(
                training.shape, plan, rates, deferred, steps, training.clips,
                self.recomputation(candidate, memory.batch.micro_rows), commit, clipped,
            )  # fmt: skip

        speculative = self.speculative(candidate)
        simulation, tasks = run(False if speculative else None)
        seconds, again = simulation.step_seconds(), None
        if speculative:
            again = run(True)[0].step_seconds()
            seconds += training.clipped_share * (again - seconds)
        left_out = 1 - sum(recomputation.fraction(layer) for layer in range(layers)) / layers
        recomputed = (training.hardware_flops_per_token - training.model_flops_per_token) * training.tokens
        return Evaluation(
            candidate, memory, seconds, busy_seconds(tasks, rates), tasks, simulation, plan.kept_bytes,
            left_out * recomputed, again,
        )  # fmt: skip


def merge_micro_batches(plan: MemoryPlan, layers: int) -> MemoryPlan:
    """The same step in fewer, larger micro-batches, however large a device they would take."""
    several, counts = plan.batch.micro_batches, plan.counts
    wanted = max(1, _MOST_TASKS // (2 * layers))
    if several < 2 * wanted:
        return plan
    batch = Batch(plan.batch.rows, plan.batch.seq_len, -(-plan.batch.rows // wanted))
    factor = several / batch.micro_batches
    everything = (layers + 2) * batch.micro_batches + 2
    kept, spills = layers * batch.micro_batches, bool(counts.host_activations)
    device = max(4, int(counts.device_activations / factor)) if spills else everything
    device_kept = max(2, round(counts.device_kept / factor)) if counts.device_kept else 0
    # Where the drives have no part in it, all has its place in the host's memory, however that was rounded.
    least = 2 if counts.ssd_activations else max(2, everything - device + 1)
    least_kept = 2 if counts.ssd_kept else max(2, kept - device_kept + 1)
    merged = replace(
        counts,
        device_activations=device,
        host_activations=max(least, int(counts.host_activations / factor)) if spills else 0,
        ssd_activations=everything if counts.ssd_activations else 0,
        device_kept=device_kept,
        host_kept=max(least_kept, round(counts.host_kept / factor)) if counts.host_kept else 0,
        ssd_kept=kept if counts.ssd_kept else 0,
    )
    return replace(
        plan, batch=batch, counts=merged, activation_bytes=round(plan.activation_bytes * factor),
        kept_bytes=round(plan.kept_bytes * factor),
    )  # fmt: skip


def busy_seconds(tasks: StepList, rates: TaskRates) -> dict[Resource, float]:
    """Seconds for which the tasks of a step keep each resource busy: no step is shorter than the largest of them."""
    moved = dict.fromkeys(Resource, 0.0)
    for task in tasks.tasks:
        moved[task.op.resource] += rates.compute_seconds(task) if task.op.resource is Resource.GPU else task.nbytes
    return {
        Resource.GPU: moved[Resource.GPU],
        Resource.HOST_TO_DEVICE: moved[Resource.HOST_TO_DEVICE] / rates.upload_bytes_per_second,
        Resource.DEVICE_TO_HOST: moved[Resource.DEVICE_TO_HOST] / rates.download_bytes_per_second,
        Resource.SSD: tasks.ssd_read_bytes() / rates.read_bytes_per_second
        + tasks.ssd_written_bytes() / rates.write_bytes_per_second,
        Resource.ADAM: moved[Resource.ADAM] / rates.adam_parameters_per_second,
        **_network_seconds(tasks, moved, rates),
    }


def _network_seconds(tasks: StepList, moved: dict[Resource, float], rates: TaskRates) -> dict[Resource, float]:
    """The same of what connects ranks; nothing of that, where there is one."""
    result = {}
    for resource, rate in (
        (Resource.INTRA_NODE, rates.intra_node_bytes_per_second),
        (Resource.INTER_NODE, rates.inter_node_bytes_per_second),
    ):
        messages = sum(task.op.resource is resource for task in tasks.tasks)
        if messages:
            result[resource] = moved[resource] / rate + messages * rates.message_seconds
    return result
