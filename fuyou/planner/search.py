"""Find the fastest way to run a job on a machine, and the largest model that fits."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from common.errors import UserError
from common.models.presets import load_config, preset_names
from common.units import format_bytes
from fuyou.layout.record import Kind
from fuyou.model.recompute.policy import ActivationPolicy, savable_outputs
from fuyou.optimizer.clipping import ClipBy
from fuyou.planner.evaluate import Evaluator, busy_seconds
from fuyou.planner.machine import Machine
from fuyou.planner.plan import SAVE_NOTHING, Candidate, Plan, Point
from fuyou.planner.simulator import no_garbage_collection
from fuyou.planner.training_job import TrainingJob
from fuyou.schedule.scheduler import Scheduler
from fuyou.schedule.tasks import Resource

# Fractions of the blocks to defer that are tried, each with those that are tried next if it is the best. More than a
# half never helps: the forward pass is a quarter of the work.
FRACTIONS = {0.0: (), 1 / 8: (1 / 16, 3 / 16), 1 / 4: (3 / 16, 3 / 8, 1 / 2)}
NEAR = 1.005  # A step within this factor of its largest bound has nothing to gain from any other schedule
ALIKE = 1.01  # Micro-batches of two sizes are alike if their steps take equally long up to this factor
# Updates are no reason to wait where all that they use is busy for less than this fraction of a step
IDLE = 1 / 3
SLOWER = 1.1  # A step may take up to this factor longer to write less
WORTH = 0.002  # Gains below this fraction of a step are not worth other costs (gradients that wait take host memory)


def search(job: TrainingJob, machine: Machine) -> Plan:
    """Return the fastest way to run ``job`` on ``machine``, by simulating the task lists, or what is missing."""
    evaluator = Evaluator(job, machine)
    try:
        best = choose(evaluator)
    except UserError as error:
        return Plan(evaluator.job, machine, missing=(str(error),), ssd_bytes=evaluator.job.record_bytes)
    points = frontier(evaluator)
    return replace(
        best,
        missing=missing_space(best.ssd_bytes, machine),
        frontier=tuple(
            Point(each.step_seconds, each.written_bytes, each.candidate == best.candidate) for each in points
        ),
    )


def choose(evaluator: Evaluator) -> Plan:
    """Return the candidate that writes least among those of nearly the shortest step, or as ``drive_life`` requires.

    Raises:
        UserError: if no candidate fits; says how much would.
    """
    with no_garbage_collection():
        for clip_by in evaluator.job.clip_choices:
            _try_candidates(evaluator, clip_by)
        points = frontier(evaluator)
        days = evaluator.job.drive_life
    if days == 0:
        return points[0]
    if days is None:
        return [each for each in points if each.step_seconds <= SLOWER * points[0].step_seconds][-1]
    life = evaluator.machine.drive_days
    return next((each for each in points if life(each.written_bytes, each.step_seconds) >= days), points[-1])


def frontier(evaluator: Evaluator) -> list[Plan]:
    """Return the evaluated candidates that none beats in time and bytes, fastest first."""
    points = _undominated(evaluator.tried())
    # Merged micro-batches can be off by some percent, by which whole steps would be out of order.
    return _undominated(evaluator.evaluate(each.candidate, merged=False) for each in points)


def _undominated(evaluations: Iterable[Plan]) -> list[Plan]:
    points: list[Plan] = []
    for each in sorted(evaluations, key=lambda each: (each.step_seconds, each.written_bytes)):
        if not points or each.written_bytes < (1 - WORTH) * points[-1].written_bytes:
            points.append(each)
    return points


def _try_candidates(evaluator: Evaluator, clip_by: ClipBy) -> None:
    """Evaluate the candidates that clip in this way and may have the shortest step.

    Sizes of micro-batches are tried first; then, for similar ones, how much to defer and what to save: smaller
    micro-batches leave memory on the device, so that more can come ahead of its use.
    """
    job = evaluator.job
    fraction = job.deferred_fraction or 0.0
    activation_policy = job.activation_policy or SAVE_NOTHING
    best = evaluator.evaluate(Candidate(job.micro_batch, fraction, activation_policy, clip_by))
    alike = [best]
    if job.micro_batch is None:
        chosen = evaluator.memory(best.candidate).batch.micro_rows
        # With frozen pieces, each micro-batch uploads all parameters, so that fewer are better.
        frozen_pieces = bool(job.layout.orders) and not job.layout.sizes[Kind.BLOCK].trained_elements
        smaller = set() if frozen_pieces else {-(-chosen // 2), -(-chosen // 4)}
        for rows in sorted((smaller | {min(job.rows, 2 * chosen)}) - {chosen}):
            candidate = Candidate(rows, fraction, activation_policy, clip_by)
            if evaluator.fits(candidate):
                alike.append(evaluator.evaluate(candidate))
        least = min(evaluation.step_seconds for evaluation in alike)
        alike = [evaluation for evaluation in alike if evaluation.step_seconds <= ALIKE * least]
    for each in alike:
        best = _search_deferral(evaluator, each)
        if job.activation_policy is None:
            saving = _search_activation_policy(evaluator, best)
            if saving is not best:  # the balance between computing and the drives has changed
                _search_deferral(evaluator, saving)


def _search_deferral(evaluator: Evaluator, best: Plan) -> Plan:
    all_wait = evaluator.job.clips and best.candidate.clip_by is ClipBy.DEFERRAL
    if evaluator.job.deferred_fraction is None and not all_wait:
        before = best
        for fraction in FRACTIONS:
            best = _better(evaluator, best, replace(best.candidate, deferred_fraction=fraction))
        for fraction in FRACTIONS.get(best.candidate.deferred_fraction, ()) if best is not before else ():
            best = _better(evaluator, best, replace(best.candidate, deferred_fraction=fraction))
    return best


def _search_activation_policy(evaluator: Evaluator, best: Plan) -> Plan:
    """Save more and more operator outputs, those with the most FLOPs per byte first, while steps get shorter.

    First the same outputs in all blocks; then more of them in some of the blocks.
    """
    layout = evaluator.job.layout
    chunks = evaluator.memory(best.candidate).batch.chunks > 1
    if best.bound is not Resource.GPU or evaluator.trace is None or layout.orders or chunks:
        return best
    layers = len(layout.blocks)
    operators: tuple[tuple[str, int], ...] = ()
    choices = []
    for output in savable_outputs(evaluator.trace):
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
        best = better
        taken = number
    # A few of the larger sets, in some of the blocks: the last outputs that are worth keeping save the most in all.
    for number in sorted({taken, (taken + len(choices)) // 2, len(choices) - 1} - {len(choices)}):
        for quarters in (1, 2, 3):
            activation_policy = ActivationPolicy(choices[number], max(1, layers * quarters // 4))
            best = _better(evaluator, best, replace(best.candidate, activation_policy=activation_policy))
    return best


def _better(evaluator: Evaluator, best: Plan, candidate: Candidate) -> Plan:
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
    saved = evaluator.saved_seconds(candidate) - evaluator.saved_seconds(best.candidate)
    least = best.busy[Resource.GPU] - saved + evaluator.spilling_seconds(candidate)
    if least > (1 - WORTH) * best.step_seconds:
        return best
    other = evaluator.evaluate(candidate)
    return other if other.step_seconds < (1 - WORTH) * best.step_seconds else best


def missing_space(needed: int, machine: Machine) -> tuple[str, ...]:
    """Return what the drives lack, as sentences."""
    if machine.store_bytes is None or needed <= machine.store_bytes:
        return ()
    return (
        f"The run takes {format_bytes(needed)} on SSD, and there are {format_bytes(machine.store_bytes)}. Add drives.",
    )


def forward_seconds(result: Plan) -> float:
    """Return the seconds of a forward pass over one batch, by the resource that takes longest."""
    assert result.memory is not None
    memory = result.memory
    job = result.job
    scheduler = Scheduler(job.layout, memory.counts, resident=memory.resident, direct_reads=job.direct_reads)
    tasks = scheduler.evaluation(0, memory.batch_shape(memory.batch))
    return max(busy_seconds(tasks, Evaluator(result.job, result.machine).rates).values())


def largest_model(
    make: Callable[[str], TrainingJob], fits: Callable[[TrainingJob], bool]
) -> TrainingJob | None:
    """Return the preset with the most parameters that fits, or None."""

    def size(name: str) -> int:
        config = load_config(name)[0].get_text_config()
        return int(config.num_hidden_layers * config.hidden_size**2)

    jobs = (make(name) for name in sorted(preset_names(), key=size, reverse=True))
    return next((job for job in jobs if fits(job)), None)


def fits(job: TrainingJob, machine: Machine) -> bool:
    evaluator = Evaluator(job, machine)
    return evaluator.fits(Candidate(job.micro_batch, 0.0)) and not missing_space(job.record_bytes, machine)
