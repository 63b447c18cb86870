"""Find the fastest way to run a job on a machine, what bounds it, and the largest model that fits."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from common.errors import UserError
from common.models.presets import load_config, preset_names
from common.units import format_bytes
from fuyou.layout.record import Kind
from fuyou.layout.record_parts import ADAMW
from fuyou.model.recompute.policy import ActivationPolicy, savable_outputs
from fuyou.optimizer.clipping import ClipBy
from fuyou.planner.evaluate import SAVE_NOTHING, Candidate, Evaluation, Evaluator, busy_seconds
from fuyou.planner.machine import Machine
from fuyou.planner.simulated_machine import Simulation
from fuyou.planner.training_job import TrainingJob
from fuyou.schedule.memory_plan import MemoryPlan
from fuyou.schedule.scheduler import Scheduler
from fuyou.schedule.tasks import Resource, StepList

# Fractions of the blocks to defer that are tried, each with those that are tried next if it is the best. More than a
# half never helps: the forward pass is a quarter of the work.
FRACTIONS = {0.0: (), 1 / 8: (1 / 16, 3 / 16), 1 / 4: (3 / 16, 3 / 8, 1 / 2)}
NEAR = 1.005  # A step within this factor of its largest bound has nothing to gain from any other schedule
ALIKE = 1.01  # Micro-batches of two sizes are alike if their steps take equally long up to this factor
IDLE = 1 / 3  # Updates are no reason to wait where all that they use is busy for less than this fraction of a step
SLOWER = 1.1  # A step may take up to this factor longer to write less
WORTH = 0.002  # Gains below this fraction of a step are not worth other costs (gradients that wait take host memory)


@dataclass(frozen=True)
class Point:
    """A schedule on the frontier of time and bytes written."""

    step_seconds: float
    written_bytes: int  # Bytes written to SSD per step and rank
    chosen: bool


@dataclass(frozen=True)
class RunPlan:
    """Plan of a run: its memory, traffic, and speed; if it does not fit, what is missing."""

    job: TrainingJob
    machine: Machine
    missing: tuple[str, ...] = ()  # Sentences that say what the machine lacks; none if the run fits
    memory: MemoryPlan | None = None
    activation_policy: ActivationPolicy = SAVE_NOTHING  # Operator outputs that are saved for the backward pass
    deferred_fraction: float = 0.0
    clip_by: ClipBy | None = None  # Way in which gradients are clipped; None: they are not
    clipped_seconds: float | None = None  # Seconds of a clipped step that updates twice
    kept_activation_bytes: int = 0  # Bytes of saved activations of one step, beyond the blocks' inputs
    step_seconds: float = 0.0  # Average over all steps; what follows is for one that is not clipped
    busy: dict[Resource, float] = field(default_factory=dict)  # Seconds of work in one step, by resource
    tasks: StepList | None = None  # Tasks of a step in the steady state, with the simulator's times
    simulation: Simulation | None = None  # Times at which each resource works
    saved_flops: float = 0.0  # FLOPs that a step leaves out of the recomputation of all blocks
    frontier: tuple[Point, ...] = ()  # Schedules that none beats in time and bytes written, fastest first
    ssd_bytes: int = 0
    device_peak_bytes: int = 0
    host_peak_bytes: int = 0

    @property
    def fits(self) -> bool:
        return not self.missing

    @property
    def bound(self) -> Resource:
        return max(self.busy, key=lambda resource: self.busy[resource])

    @property
    def tokens_per_second(self) -> float:
        return self.job.tokens / self.step_seconds

    @property
    def flops_per_second(self) -> float:
        """Return FLOPs per second without recomputation."""
        return self.tokens_per_second * self.job.model_flops_per_token

    @property
    def hardware_flops_per_second(self) -> float:
        """Return FLOPs per second including recomputation."""
        done = self.job.tokens * self.job.hardware_flops_per_token - self.saved_flops
        return done / self.step_seconds

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Return what was assumed without a measurement, of the machine and of how the model runs on it."""
        if self.machine.profile is not None:
            return self.machine.assumptions
        slots = [slot for record in self.job.shape.records for slot in record.parameters]
        assumed = list(self.machine.assumptions)
        if any(slot.activity < 1 for slot in slots):
            assumed.append("tokens are spread evenly over experts, whose products run at the rate of dense ones")
        if any(record.decoded_nbytes for record in self.job.shape.records):
            assumed.append("decoding frozen weights takes the device no time")
        return tuple(assumed)

    @property
    def read_bytes(self) -> int:
        """Return the bytes read from SSD per step and rank."""
        return self.tasks.ssd_read_bytes() if self.tasks else 0

    @property
    def written_bytes(self) -> int:
        return self.tasks.ssd_written_bytes() if self.tasks else 0

    @property
    def sent_bytes(self) -> int:
        return self.tasks.sent_bytes() if self.tasks else 0

    @property
    def written_bytes_per_day(self) -> float:
        return self.written_bytes * 86400 / self.step_seconds

    @property
    def drive_days(self) -> float | None:
        """Return the days until the drives' warranted writes are used up; None if these are not known."""
        if self.machine.endurance_bytes is None or not self.written_bytes:
            return None
        return self.machine.drive_days(self.written_bytes, self.step_seconds)

    @property
    def gpu_bound_tokens(self) -> float:
        """Return the tokens per step from which the GPU is the bound (T*)."""
        return gpu_bound_tokens(self.job, self.machine)

    def to_json(self) -> dict[str, Any]:
        batch = self.memory.batch if self.memory else None
        known = self.memory is not None and self.step_seconds > 0

        def number(value: Any) -> Any:
            return value if known else None

        return {
            "model": self.job.name,
            "fits": self.fits,
            "missing": list(self.missing),
            "parameters": self.job.parameters,
            "nodes": self.job.shape.share.nodes,
            "ranks_per_node": self.job.shape.share.ranks_per_node,
            "batch_size": self.job.rows * self.job.shape.share.world_size,
            "seq_len": self.job.seq_len,
            "device": self.machine.device,
            "drives": self.machine.drives,
            "drive_count": self.machine.drive_count,
            "step_seconds": number(self.step_seconds),
            "tokens_per_second": number(known and self.tokens_per_second),
            "flops_per_second": number(known and self.flops_per_second),
            "hardware_flops_per_second": number(known and self.hardware_flops_per_second),
            "bound": number(known and self.bound.value),
            "bound_seconds": number({resource.value: seconds for resource, seconds in self.busy.items()}),
            "device_peak_bytes": number(self.device_peak_bytes),
            "host_peak_bytes": number(self.host_peak_bytes),
            "ssd_bytes": self.ssd_bytes,
            "ssd_read_bytes_per_step": number(self.read_bytes),
            "ssd_written_bytes_per_step": number(self.written_bytes),
            "network_sent_bytes_per_step": number(self.sent_bytes),
            "ssd_written_bytes_per_day": number(known and self.written_bytes_per_day),
            "drive_life_days": number(known and self.drive_days),
            "frontier": [asdict(point) for point in self.frontier],
            "micro_batch": batch and batch.micro_rows,
            "micro_batches": batch and batch.micro_batches,
            "deferred_fraction": number(self.deferred_fraction),
            "clip_by": number(self.clip_by and self.clip_by.value),
            "clipped_share": number(self.clip_by and self.job.clipped_share),
            "clipped_step_seconds": number(self.clipped_seconds),
            "kept_activation_bytes": number(self.kept_activation_bytes),
            "gpu_bound_tokens": self.gpu_bound_tokens,
            "assumptions": list(self.assumptions),
        }


def gpu_bound_tokens(job: TrainingJob, machine: Machine) -> float:
    """Return T*: the tokens per step from which computing takes longer than everything independent of the batch.

    ``T* = peak / 8 x max(14/R + 12/W, 1/adam)`` for states of 10 bytes and parameters of 2, with R and W the rates of
    all drives together; 8 FLOPs per parameter and token are forward, recomputation, and backward. Deferral must spread
    the traffic evenly over the step for that.

    With N nodes of M ranks, each rank moves ``(4 + 10/N) / M`` and ``(2 + 10/N) / M`` bytes, updates one parameter of N
    M, and sends ``4 (N - 1) / (N M)`` bytes to other nodes.
    """
    precision, rates, share = job.shape.precision, machine.rates, job.shape.share
    written = (precision.parameter_bytes + precision.state_bytes / share.nodes) / share.ranks_per_node
    read = written + precision.parameter_bytes / share.ranks_per_node
    sent = (precision.gradient_bytes + precision.parameter_bytes) * (share.nodes - 1) / share.world_size
    seconds_per_parameter = max(
        read / rates.read_bytes_per_second + written / rates.write_bytes_per_second,
        1 / (share.world_size * rates.adam_parameters_per_second),
        sent / rates.inter_node_bytes_per_second,
    )
    return rates.flops_per_second / 8 * seconds_per_parameter * share.world_size


def plan(job: TrainingJob, machine: Machine) -> RunPlan:
    """Return the fastest way to run ``job`` on ``machine``, by simulating the task lists, or what is missing."""
    evaluator = Evaluator(job, machine)
    job = evaluator.job
    try:
        best = search(evaluator)
    except UserError as error:
        return RunPlan(job, machine, missing=(str(error),), ssd_bytes=job.record_bytes)
    points = frontier(evaluator, job.clip_choices)
    job = job.causal() if best.memory.batch.chunks > 1 else job
    needed = ssd_bytes(evaluator, best)
    missing, speculates = missing_space(needed, machine), evaluator.update_policy(best.candidate).speculative
    return RunPlan(
        job,
        machine,
        missing=missing,
        memory=best.memory,
        activation_policy=best.candidate.activation_policy,
        deferred_fraction=1.0 if job.clips and not speculates else best.candidate.deferred_fraction,
        clip_by=best.candidate.clip_by if job.clips else None,
        clipped_seconds=best.clipped_seconds,
        kept_activation_bytes=best.tasks.kept_bytes(best.kept_bytes),
        step_seconds=best.step_seconds,
        busy=best.busy,
        tasks=best.tasks,
        simulation=best.simulation,
        saved_flops=best.saved_flops,
        frontier=tuple(
            Point(each.step_seconds, each.written_bytes, each.candidate == best.candidate) for each in points
        ),
        ssd_bytes=needed,
        device_peak_bytes=best.memory.device_bytes,
        host_peak_bytes=best.memory.host_bytes,
    )


def search(evaluator: Evaluator) -> Evaluation:
    """Return the candidate that writes least among those of nearly the shortest step, or as ``drive_life`` requires.

    Raises:
        UserError: if no candidate fits; says how much would.
    """
    return _search_ways(evaluator, evaluator.job.clip_choices)


def max_clipped_share(evaluator: Evaluator, best: Evaluation) -> float:
    """Return the share of clipped steps from which deferral is faster than ``best``; infinity without a choice."""
    never, always = best.simulation.step_seconds(), best.clipped_seconds
    if always is None or always <= never or len(evaluator.job.clip_choices) == 1:
        return math.inf
    return (_search_ways(evaluator, (ClipBy.DEFERRAL,)).step_seconds - never) / (always - never)


def frontier(evaluator: Evaluator, ways: Sequence[ClipBy]) -> list[Evaluation]:
    """Return the evaluated candidates that clip in these ways and that none beats in time and bytes, fastest first."""
    points = _undominated(each for each in evaluator.tried() if each.candidate.clip_by in ways)
    # Merged micro-batches can be off by some percent, by which whole steps would be out of order.
    return _undominated(evaluator.evaluate(each.candidate, merged=False) for each in points)


def _undominated(evaluations: Iterable[Evaluation]) -> list[Evaluation]:
    points: list[Evaluation] = []
    for each in sorted(evaluations, key=lambda each: (each.step_seconds, each.written_bytes)):
        if not points or each.written_bytes < (1 - WORTH) * points[-1].written_bytes:
            points.append(each)
    return points


def _search_ways(evaluator: Evaluator, ways: Sequence[ClipBy]) -> Evaluation:
    for clip_by in ways:
        _search(evaluator, clip_by)
    points, days = frontier(evaluator, ways), evaluator.job.drive_life
    if days == 0:
        return points[0]
    if days is None:
        return [each for each in points if each.step_seconds <= SLOWER * points[0].step_seconds][-1]
    life = evaluator.machine.drive_days
    return next((each for each in points if life(each.written_bytes, each.step_seconds) >= days), points[-1])


def _search(evaluator: Evaluator, clip_by: ClipBy) -> Evaluation:
    """Return the candidate with the shortest step that clips in this way.

    Sizes of micro-batches are tried first; then, for similar ones, how much to defer and what to save: smaller
    micro-batches leave memory on the device, so that more can come ahead of its use.
    """
    job = evaluator.job
    fraction, activation_policy = job.deferred_fraction or 0.0, job.activation_policy or SAVE_NOTHING
    best = evaluator.evaluate(Candidate(job.micro_batch, fraction, activation_policy, clip_by))
    alike = [best]
    if job.micro_batch is None:
        chosen = best.memory.batch.micro_rows
        # With frozen pieces, each micro-batch uploads all parameters, so that fewer are better.
        frozen_pieces = bool(job.shape.orders) and not job.shape.sizes[Kind.BLOCK].trained_elements
        smaller = set() if frozen_pieces else {-(-chosen // 2), -(-chosen // 4)}
        for rows in sorted((smaller | {min(job.rows, 2 * chosen)}) - {chosen}):
            candidate = Candidate(rows, fraction, activation_policy, clip_by)
            if evaluator.fits(candidate):
                alike.append(evaluator.evaluate(candidate))
        least = min(evaluation.step_seconds for evaluation in alike)
        alike = [evaluation for evaluation in alike if evaluation.step_seconds <= ALIKE * least]
    evaluations = [_search_rest(evaluator, evaluation) for evaluation in alike]
    if len(evaluations) == 1:
        return evaluations[0]
    # Merged micro-batches of two sizes are not alike: what is right between these is whole steps.
    return min(evaluations, key=lambda evaluation: evaluator.evaluate(evaluation.candidate, merged=False).step_seconds)


def _search_rest(evaluator: Evaluator, best: Evaluation) -> Evaluation:
    best = _search_deferral(evaluator, best)
    if evaluator.job.activation_policy is None:
        saving = _search_activation_policy(evaluator, best)
        if saving is not best:  # the balance between computing and the drives has changed
            best = _search_deferral(evaluator, saving)
    return best


def _search_deferral(evaluator: Evaluator, best: Evaluation) -> Evaluation:
    all_wait = evaluator.job.clips and best.candidate.clip_by is ClipBy.DEFERRAL
    if evaluator.job.deferred_fraction is None and not all_wait:
        before = best
        for fraction in FRACTIONS:
            best = _better(evaluator, best, replace(best.candidate, deferred_fraction=fraction))
        for fraction in FRACTIONS.get(best.candidate.deferred_fraction, ()) if best is not before else ():
            best = _better(evaluator, best, replace(best.candidate, deferred_fraction=fraction))
    return best


def _search_activation_policy(evaluator: Evaluator, best: Evaluation) -> Evaluation:
    """Save more and more operator outputs, those with the most FLOPs per byte first, while steps get shorter.

    First the same outputs in all blocks; then more of them in some of the blocks.
    """
    shape = evaluator.job.shape
    chunks = best.memory.batch.chunks > 1
    if best.bound is not Resource.GPU or evaluator.trace is None or shape.orders or chunks:
        return best
    layers = len(shape.blocks)
    operators: tuple[tuple[str, int], ...] = ()
    choices = []
    for output in savable_outputs(evaluator.trace, cost=evaluator.cost).outputs:
        operators = (*operators, (output.operator, output.ordinal))
        if output.saved_flops > 0:
            choices.append(operators)
    if not choices:
        return best
    taken = 0
    for number, operators in enumerate(choices, 1):
        better = _better(
            evaluator, best, replace(best.candidate, activation_policy=ActivationPolicy(operators, layers))
        )
        if better is best:
            break
        best, taken = better, number
    # A few of the larger sets, in some of the blocks: the last outputs that are worth keeping save the most in all.
    for number in sorted({taken, (taken + len(choices)) // 2, len(choices) - 1} - {len(choices)}):
        for quarters in (1, 2, 3):
            activation_policy = ActivationPolicy(choices[number], max(1, layers * quarters // 4))
            best = _better(evaluator, best, replace(best.candidate, activation_policy=activation_policy))
    return best


def _better(evaluator: Evaluator, best: Evaluation, candidate: Candidate) -> Evaluation:
    """Return ``candidate`` if its step is shorter, else ``best``; skips candidates that cannot be better."""
    used = max(best.busy[resource] for resource in (Resource.SSD, Resource.ADAM, Resource.DEVICE_TO_HOST))
    tight = (
        best.step_seconds <= NEAR * best.bound_seconds
        or best.update_seconds < WORTH * best.step_seconds
        or used < IDLE * best.step_seconds
    )
    nothing_to_gain = tight and candidate.activation_policy == best.candidate.activation_policy
    if nothing_to_gain or not evaluator.fits(candidate):
        return best
    other = evaluator.evaluate(candidate)
    return other if other.step_seconds < (1 - WORTH) * best.step_seconds else best


def ssd_bytes(evaluator: Evaluator, evaluation: Evaluation) -> int:
    """Return the bytes of a run on SSD: records in all slots, activations, and gradients that wait there."""
    job, memory = evaluator.job, evaluation.memory
    total = job.record_bytes + memory.counts.ssd_activations * memory.activation_bytes
    total += memory.counts.ssd_kept * memory.kept_bytes
    if memory.spills_gradients(job.shape, evaluator.update_policy(evaluation.candidate).held(job.shape)):
        total += sum(record.gradient_nbytes for record in job.shape.records)
    return total


def missing_space(needed: int, machine: Machine) -> tuple[str, ...]:
    """Return what the drives lack, as sentences."""
    if machine.store_bytes is None or needed <= machine.store_bytes:
        return ()
    return (
        f"The run takes {format_bytes(needed)} on SSD, and there are {format_bytes(machine.store_bytes)}. Add drives.",
    )


def forward_seconds(result: RunPlan) -> float:
    """Return the seconds of a forward pass over one batch, by the resource that takes longest."""
    assert result.memory is not None
    memory, job = result.memory, result.job
    scheduler = Scheduler(job.shape, memory.counts, resident=memory.resident, direct_reads=job.direct_reads)
    tasks = scheduler.evaluation(0, memory.batch_shape(memory.batch))
    return max(busy_seconds(tasks, Evaluator(result.job, result.machine).rates).values())


_HARDWARE = {
    Resource.GPU: "a faster device",
    Resource.HOST_TO_DEVICE: "a faster link to the device",
    Resource.DEVICE_TO_HOST: "a faster link from the device",
    Resource.SSD: "more or faster SSDs",
    Resource.ADAM: "faster host memory",
    Resource.INTRA_NODE: "faster links inside the nodes",
    Resource.INTER_NODE: "a faster network",
}
_PER_STEP = (Resource.SSD, Resource.ADAM, Resource.INTER_NODE)  # Work that hardly grows with the batch


def what_relaxes(plan: RunPlan) -> list[str]:
    """Return what would shorten a step of this plan, or give more tokens for it."""
    ways = [_HARDWARE[plan.bound]]
    if plan.bound in _PER_STEP:
        ways.append("a larger --batch-size")
    shape = plan.job.shape
    if plan.bound is Resource.SSD and shape.precision.optimizer == ADAMW and shape.sizes[Kind.BLOCK].trained_elements:
        ways.append("--optimizer adamw8bit")
    return ways


def largest_model(make: Callable[[str], TrainingJob], fits: Callable[[TrainingJob], bool]) -> TrainingJob | None:
    """Return the preset with the most parameters that fits, or None."""

    def size(name: str) -> int:
        config = load_config(name)[0].get_text_config()
        return int(config.num_hidden_layers * config.hidden_size**2)

    jobs = (make(name) for name in sorted(preset_names(), key=size, reverse=True))
    return next((job for job in jobs if fits(job)), None)


def fits(job: TrainingJob, machine: Machine) -> bool:
    evaluator = Evaluator(job, machine)
    return evaluator.fits(Candidate(job.micro_batch, 0.0)) and not missing_space(job.record_bytes, machine)
