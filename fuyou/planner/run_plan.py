"""The plan: how a step is best run on a machine, and what it comes to."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

from common.errors import UserError
from common.units import format_bytes
from fuyou.optimizer.clipping import ClipBy
from fuyou.planner.evaluate import NOTHING, Candidate, Evaluation, Evaluator
from fuyou.planner.machine import Machine
from fuyou.planner.simulator import Simulation
from fuyou.planner.training import Training
from fuyou.recompute.policy import ActivationPolicy, keepable
from fuyou.schedule.memory_plan import MemoryPlan
from fuyou.schedule.tasks import Resource, StepList

#: Fractions of the blocks whose updates may wait for the next forward pass, and what else is tried if one of them is
#: good. More than a half never helps: the forward pass is a quarter of the work.
FRACTIONS = {0.0: (), 1 / 8: (1 / 16, 3 / 16), 1 / 4: (3 / 16, 3 / 8, 1 / 2)}
#: A step within this of its largest bound has nothing to gain from any other schedule.
NEAR = 1.005
#: Micro-batches of two sizes are alike if a step takes no longer than this with one of them, over the other.
ALIKE = 1.01
#: Gains below this part of a step are not worth other costs (gradients that wait take host memory).
WORTH = 0.002


@dataclass(frozen=True)
class RunPlan:
    """What a run will take and how fast it will be. Of a run that does not fit: what is missing."""

    training: Training
    machine: Machine
    scheme: str = "ours"
    """``ours``, or ``fuyou``: the paper's."""
    missing: tuple[str, ...] = ()
    """What it lacks, in sentences; empty if it fits."""
    memory: MemoryPlan | None = None
    keeping: ActivationPolicy = NOTHING
    """Which operator outputs are kept for the backward pass."""
    deferred_fraction: float = 0.0
    clip_by: ClipBy | None = None
    """How gradients are clipped; None: they are not."""
    clipped_seconds: float | None = None
    """Of a step if each is clipped and its updates are done twice; None where they never are."""
    kept_activation_bytes: int = 0
    """Of one step, beyond the blocks' inputs."""
    step_seconds: float = 0.0
    """On average over steps that are clipped and steps that are not; what follows is of one that is not."""
    compared_seconds: float = 0.0
    """The same with micro-batches merged, as candidates are compared: other plans are only comparable to this."""
    busy: dict[Resource, float] = field(default_factory=dict)
    """Seconds of work in one step, by resource."""
    tasks: StepList | None = None
    """Of a step in the steady state, with the simulator's times."""
    simulation: Simulation | None = None
    """When what worked."""
    saved_flops: float = 0.0
    """Of a step's recomputation of all blocks, what it leaves out."""
    ssd_bytes: int = 0
    device_peak_bytes: int = 0
    host_peak_bytes: int = 0

    @property
    def fits(self) -> bool:
        return not self.missing

    @property
    def bound(self) -> Resource:
        """What keeps the step from being shorter."""
        return max(self.busy, key=lambda resource: self.busy[resource])

    @property
    def tokens_per_second(self) -> float:
        return self.training.tokens / self.step_seconds

    @property
    def flops_per_second(self) -> float:
        """Recomputation not counted."""
        return self.tokens_per_second * self.training.model_flops_per_token

    @property
    def hardware_flops_per_second(self) -> float:
        """Recomputation counted, as far as it is done."""
        done = self.training.tokens * self.training.hardware_flops_per_token - self.saved_flops
        return done / self.step_seconds

    @property
    def read_bytes(self) -> int:
        """From SSD, per step and rank."""
        return self.tasks.ssd_read_bytes() if self.tasks else 0

    @property
    def written_bytes(self) -> int:
        """To SSD, per step and rank."""
        return self.tasks.ssd_written_bytes() if self.tasks else 0

    @property
    def sent_bytes(self) -> int:
        """To other nodes, per step and rank."""
        return self.tasks.sent_bytes() if self.tasks else 0

    @property
    def written_bytes_per_day(self) -> float:
        return self.written_bytes * 86400 / self.step_seconds

    @property
    def drive_days(self) -> float | None:
        """Days of training after which the drives have taken what their maker warrants; None if nobody says."""
        if self.machine.endurance_bytes is None or not self.written_bytes:
            return None
        return self.machine.endurance_bytes / self.written_bytes_per_day

    @property
    def gpu_bound_tokens(self) -> float:
        """Tokens per step from which the GPU is the bound, T*: all else takes as long however many there are."""
        return gpu_bound_tokens(self.training, self.machine)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON has it. What is not known of a run that does not fit is None."""
        batch = self.memory.batch if self.memory else None
        known = self.memory is not None and self.step_seconds > 0

        def number(value: Any) -> Any:
            return value if known else None

        return {
            "model": self.training.name,
            "scheme": self.scheme,
            "fits": self.fits,
            "missing": list(self.missing),
            "parameters": self.training.parameters,
            "nodes": self.training.shape.share.nodes,
            "ranks_per_node": self.training.shape.share.ranks_per_node,
            "batch_size": self.training.rows * self.training.shape.share.world_size,
            "seq_len": self.training.seq_len,
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
            "micro_batch": batch and batch.micro_rows,
            "micro_batches": batch and batch.micro_batches,
            "deferred_fraction": number(self.deferred_fraction),
            "clip_by": number(self.clip_by and self.clip_by.value),
            "clipped_share": number(self.clip_by and self.training.clipped_share),
            "clipped_step_seconds": number(self.clipped_seconds),
            "kept_activation_bytes": number(self.kept_activation_bytes),
            "gpu_bound_tokens": self.gpu_bound_tokens,
            "assumptions": list(self.machine.assumptions),
        }


def gpu_bound_tokens(training: Training, machine: Machine) -> float:
    """T*: tokens per step from which computing takes longer than everything that does not depend on the batch.

    ``T* = peak / 8 x max(14/R + 12/W, 1/adam)`` for states of 10 bytes beside parameters of 2, with R and W the rates
    of all drives together; 8 FLOPs per parameter and token are forward, recomputation and backward. Deferral has to
    spread the traffic evenly over the step for that.

    Of N nodes with M ranks, each rank moves ``(4 + 10/N) / M`` and ``(2 + 10/N) / M`` bytes, updates one parameter of
    N M, and sends ``4 (N - 1) / (N M)`` bytes to other nodes.
    """
    precision, rates, share = training.shape.precision, machine.rates, training.shape.share
    written = (precision.parameter_bytes + precision.state_bytes / share.nodes) / share.ranks_per_node
    read = written + precision.parameter_bytes / share.ranks_per_node
    sent = (precision.gradient_bytes + precision.parameter_bytes) * (share.nodes - 1) / share.world_size
    seconds_per_parameter = max(
        read / rates.read_bytes_per_second + written / rates.write_bytes_per_second,
        1 / (share.world_size * rates.adam_parameters_per_second),
        sent / rates.inter_node_bytes_per_second,
    )
    return rates.flops_per_second / 8 * seconds_per_parameter * share.world_size


def plan(training: Training, machine: Machine) -> RunPlan:
    """The fastest way to run ``training`` on ``machine`` that fits, by simulation of the task lists that would be run.

    A run that does not fit gives a plan that says what is missing.
    """
    evaluator = Evaluator(training, machine)
    try:
        best = search(evaluator)
    except UserError as error:
        return RunPlan(training, machine, missing=(str(error),), ssd_bytes=training.record_bytes)
    compared_seconds = best.step_seconds
    if best.memory.batch.micro_batches > 1:
        best = evaluator.evaluate(best.candidate, merged=False)
    needed = ssd_bytes(evaluator, best)
    missing, speculates = missing_space(needed, machine), evaluator.speculative(best.candidate)
    return RunPlan(
        training, machine, missing=missing, memory=best.memory, keeping=best.candidate.keeping,
        deferred_fraction=1.0 if training.clips and not speculates else best.candidate.deferred_fraction,
        clip_by=best.candidate.clip_by if training.clips else None, clipped_seconds=best.clipped_seconds,
        kept_activation_bytes=best.tasks.kept_bytes(best.kept_bytes), step_seconds=best.step_seconds,
        compared_seconds=compared_seconds, busy=best.busy, tasks=best.tasks, simulation=best.simulation,
        saved_flops=best.saved_flops, ssd_bytes=needed, device_peak_bytes=best.memory.device_bytes,
        host_peak_bytes=best.memory.host_bytes,
    )  # fmt: skip


def search(evaluator: Evaluator) -> Evaluation:
    """The candidate with the shortest step, whichever way gradients are clipped.

    Raises:
        UserError: no candidate fits; says how much would.
    """
    return min((_search(evaluator, way) for way in evaluator.training.clip_ways), key=lambda found: found.step_seconds)


def most_clipped(evaluator: Evaluator, best: Evaluation) -> float:
    """The share of clipped steps from which deferral takes less time than ``best``; infinite if that is it, or is not
    open to choice."""
    never, always = best.simulation.step_seconds(), best.clipped_seconds
    if always is None or always <= never or len(evaluator.training.clip_ways) == 1:
        return math.inf
    return (_search(evaluator, ClipBy.DEFERRAL).step_seconds - never) / (always - never)


def _search(evaluator: Evaluator, clip_by: ClipBy) -> Evaluation:
    """The same, clipping in one way.

    Sizes of micro-batches first; of those that are alike, how much to defer and what to keep: smaller ones leave room
    on the device, so that more can come ahead of its use.
    """
    training = evaluator.training
    fraction, keeping = training.deferred_fraction or 0.0, training.keeping or NOTHING
    best = evaluator.evaluate(Candidate(training.micro_batch, fraction, keeping, clip_by))
    alike = [best]
    if training.micro_batch is None:
        taken = best.memory.batch.micro_rows
        for rows in sorted({-(-taken // 2), -(-taken // 4), min(training.rows, 2 * taken)} - {taken}):
            candidate = Candidate(rows, fraction, keeping, clip_by)
            if evaluator.fits(candidate):
                alike.append(evaluator.evaluate(candidate))
        least = min(one.step_seconds for one in alike)
        alike = [one for one in alike if one.step_seconds <= ALIKE * least]
    found = [_search_rest(evaluator, one) for one in alike]
    if len(found) == 1:
        return found[0]
    # Merged micro-batches of two sizes are not alike: what is right between these is whole steps.
    return min(found, key=lambda one: evaluator.evaluate(one.candidate, merged=False).step_seconds)


def _search_rest(evaluator: Evaluator, best: Evaluation) -> Evaluation:
    """The same with micro-batches of one size: what to defer, and what to keep."""
    best = _search_deferral(evaluator, best)
    if evaluator.training.keeping is None:
        kept = _search_keeping(evaluator, best)
        if kept is not best:  # the balance between computing and the drives has changed
            best = _search_deferral(evaluator, kept)
    return best


def _search_deferral(evaluator: Evaluator, best: Evaluation) -> Evaluation:
    """Some of the updates during the next forward pass, if that makes the step shorter."""
    all_wait = evaluator.training.clips and best.candidate.clip_by is ClipBy.DEFERRAL
    if evaluator.training.deferred_fraction is None and not all_wait:
        before = best
        for fraction in FRACTIONS:
            best = _better(evaluator, best, replace(best.candidate, deferred_fraction=fraction))
        for fraction in FRACTIONS.get(best.candidate.deferred_fraction, ()) if best is not before else ():
            best = _better(evaluator, best, replace(best.candidate, deferred_fraction=fraction))
    return best


def _search_keeping(evaluator: Evaluator, best: Evaluation) -> Evaluation:
    """More and more operator outputs, those that save the most computing per byte first, while steps get shorter.

    Outputs of all blocks first; then more of them in some of the blocks.
    """
    if best.bound is not Resource.GPU or evaluator.trace is None:
        return best
    layers = len(evaluator.training.shape.blocks)
    operators: tuple[tuple[str, int], ...] = ()
    choices = []
    for output in keepable(evaluator.trace, cost=evaluator.cost).outputs:
        operators = (*operators, (output.operator, output.ordinal))
        if output.saved_flops > 0:
            choices.append(operators)
    if not choices:
        return best
    taken = 0
    for number, operators in enumerate(choices, 1):
        better = _better(evaluator, best, replace(best.candidate, keeping=ActivationPolicy(operators, layers)))
        if better is best:
            break
        best, taken = better, number
    # A few of the larger sets, in some of the blocks: the last outputs that are worth keeping save the most in all.
    for number in sorted({taken, (taken + len(choices)) // 2, len(choices) - 1} - {len(choices)}):
        for quarters in (1, 2, 3):
            keeping = ActivationPolicy(choices[number], max(1, layers * quarters // 4))
            best = _better(evaluator, best, replace(best.candidate, keeping=keeping))
    return best


def quick(evaluator: Evaluator, near: Candidate) -> Evaluation:
    """The best of a few candidates like ``near``: for comparing machines.

    Raises:
        UserError: none fits.
    """
    near = replace(near, micro_rows=None if near.micro_rows is None else min(near.micro_rows, evaluator.training.rows))
    first = near if evaluator.fits(near) else Candidate(evaluator.training.micro_batch, 0.0, clip_by=near.clip_by)
    best = evaluator.evaluate(first)
    for fraction, keeping in ((near.deferred_fraction, NOTHING), (1 / 8, near.keeping), (1 / 8, NOTHING)):
        best = _better(evaluator, best, Candidate(first.micro_rows, fraction, keeping, near.clip_by))
    return best


def _better(evaluator: Evaluator, best: Evaluation, candidate: Candidate) -> Evaluation:
    """``candidate`` if it makes a shorter step, else ``best``. Not tried where nothing is to be gained."""
    nothing_to_gain = best.step_seconds <= NEAR * best.bound_seconds and candidate.keeping == best.candidate.keeping
    if nothing_to_gain or not evaluator.fits(candidate):
        return best
    other = evaluator.evaluate(candidate)
    return other if other.step_seconds < (1 - WORTH) * best.step_seconds else best


def ssd_bytes(evaluator: Evaluator, evaluation: Evaluation) -> int:
    """Room that a run takes on SSD: records in all slots, activations, gradients that wait there."""
    training, memory = evaluator.training, evaluation.memory
    total = training.record_bytes + memory.counts.ssd_activations * memory.activation_bytes
    total += memory.counts.ssd_kept * memory.kept_bytes
    if memory.spills_gradients(training.shape, evaluator.held(evaluation.candidate)):
        total += sum(record.gradient_nbytes for record in training.shape.records)
    return total


def missing_space(needed: int, machine: Machine) -> tuple[str, ...]:
    """What the drives lack."""
    if machine.store_bytes is None or needed <= machine.store_bytes:
        return ()
    return (
        f"The run takes {format_bytes(needed)} on SSD, and there are {format_bytes(machine.store_bytes)}. Add drives, "
        "or give up protection against crashes with --single-slot, which takes half.",
    )
