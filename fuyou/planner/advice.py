"""What else could be done: the largest batch, the largest model, and the changes that would help most."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from common.errors import UserError
from common.models.presets import load_config, preset_names
from common.units import format_bytes
from fuyou.layout.record import Precision
from fuyou.optimizer.clipping import ClipBy
from fuyou.planner.evaluate import Candidate, Evaluator
from fuyou.planner.machine import Machine
from fuyou.planner.run_plan import RunPlan, missing_space, quick, ssd_bytes
from fuyou.planner.training import Training
from fuyou.schedule.tasks import Resource

#: Larger batches are not looked for.
MOST_ROWS = 1 << 16
#: A change that gains less than this is none.
LEAST_GAIN = 1.03


@dataclass(frozen=True)
class Change:
    """Something to change, and what it would bring."""

    what: str
    """``4 more SSDs``"""
    speedup: float | None
    """Tokens per second over what they are now; None if now there is no plan that fits, and then there is."""


@dataclass(frozen=True)
class RarerCommits:
    """A run that commits every N-th step only."""

    every: int
    """N: a crash loses up to so many steps."""
    step_seconds: float
    """On average."""
    written_bytes_per_day: float
    drive_days: float | None
    """Until the drives' warranted writes are used up; None if nobody says how many these are."""


def rarer_commits(base: RunPlan, every: int = 8) -> RarerCommits | None:
    """What it would bring to commit every N-th step only; None where no record lives in host memory: nothing then."""
    if base.memory is None or not base.memory.resident:
        return None
    evaluator = Evaluator(base.training, base.machine)
    candidate = Candidate(base.memory.batch.micro_rows, base.deferred_fraction, base.keeping)
    others = evaluator.uncommitted(candidate)
    seconds, written = base.compared_seconds, float(base.written_bytes)
    if base.clip_by is ClipBy.SPECULATION:  # for which every step must be committed
        committed = evaluator.evaluate(candidate)
        seconds, written = committed.step_seconds, committed.tasks.ssd_written_bytes()
    seconds = (seconds + (every - 1) * others.step_seconds) / every
    seconds *= base.step_seconds / base.compared_seconds  # both were of merged micro-batches
    written = (written + (every - 1) * others.tasks.ssd_written_bytes()) / every
    per_day = written * 86400 / seconds
    endurance = base.machine.endurance_bytes
    return RarerCommits(every, seconds, per_day, endurance / per_day if endurance is not None and per_day else None)


def clipping_cost(base: RunPlan) -> float | None:
    """How many times as long a step takes on average because of clipping by the global norm."""
    if not base.training.clips or base.memory is None:
        return None
    near = Candidate(base.memory.batch.micro_rows, 0.0, base.keeping)
    without = quick(Evaluator(replace(base.training, clips=False), base.machine), near)
    return base.compared_seconds / without.step_seconds


def largest_batch(training: Training, machine: Machine) -> int:
    """Most sequences per step that fit (at most :data:`MOST_ROWS`); 0 if not even one does."""

    def fits(rows: int) -> bool:
        evaluator = Evaluator(training.with_batch(rows), machine)
        micro = None if training.micro_batch is None else min(training.micro_batch, rows)
        try:
            memory = evaluator.memory(Candidate(micro, training.deferred_fraction or 0.0))
        except UserError:
            return False
        needed = training.record_bytes + memory.counts.ssd_activations * memory.activation_bytes
        return not missing_space(needed, machine)

    if not fits(1):
        return 0
    low = 1
    while low < MOST_ROWS and fits(2 * low):
        low *= 2
    high = 2 * low
    while high - low > max(1, low // 64) and low < MOST_ROWS:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def best_changes(base: RunPlan, count: int = 2) -> list[Change]:
    """The changes that help most, best first: each by planning again."""
    found = []
    for what, other, machine in _changes(base):
        speed = _tokens_per_second(base, other, machine)
        if speed is None:
            continue
        if not base.fits:
            found.append((speed, Change(what, None)))
        else:
            speedup = speed * base.compared_seconds / base.training.tokens
            if speedup > LEAST_GAIN:
                found.append((speed, Change(what, speedup)))
    return [change for _, change in sorted(found, key=lambda pair: -pair[0])[:count]]


def _tokens_per_second(base: RunPlan, training: Training, machine: Machine) -> float | None:
    """Of a plan like ``base``; None if it does not fit."""
    fraction = base.deferred_fraction if base.deferred_fraction < 1 else 0.0  # all: only because of clipping
    way = base.clip_by if base.clip_by in training.clip_ways else training.clip_ways[0]
    evaluator = Evaluator(training, machine)
    micro = base.memory.batch.micro_rows if base.memory is not None else training.micro_batch
    try:
        best = quick(evaluator, Candidate(micro, fraction, base.keeping, way))
    except UserError:
        return None
    if missing_space(ssd_bytes(evaluator, best), machine):
        return None
    return training.tokens / best.step_seconds


def _changes(base: RunPlan) -> Iterator[tuple[str, Training, Machine]]:
    """What might help, as far as it touches what bounds the step (or anything, if nothing fits)."""
    job, machine, rates = base.training, base.machine, base.machine.rates

    def busy(resource: Resource) -> bool:
        """Whether ``resource`` is busy long enough for more of it to help."""
        return not base.fits or base.busy.get(resource, 0.0) > 0.5 * base.step_seconds

    def faster(**factors: float) -> Machine:
        return replace(machine, rates=replace(rates, **{name: getattr(rates, name) * f for name, f in factors.items()}))

    if busy(Resource.SSD):
        more = machine.drive_count
        yield f"{more} more SSD{'s' if more > 1 else ''}", job, machine.with_drives(machine.drive_count + more)
    if busy(Resource.ADAM):
        yield "an optimizer twice as fast (memory bandwidth)", job, faster(adam_parameters_per_second=2)
    if busy(Resource.GPU):
        yield "a device twice as fast", job, faster(flops_per_second=2)
    if busy(Resource.HOST_TO_DEVICE) or busy(Resource.DEVICE_TO_HOST):
        yield "a link twice as fast", job, faster(upload_bytes_per_second=2, download_bytes_per_second=2)
    if base.fits and busy(Resource.INTER_NODE):
        yield "a network twice as fast", job, faster(inter_node_bytes_per_second=2)
    yield (
        f"{format_bytes(2 * machine.host_bytes * job.shape.share.ranks_per_node)} of host memory",
        job,
        replace(machine, host_bytes=2 * machine.host_bytes),
    )
    if not machine.cpu and not base.fits:
        yield (
            f"{format_bytes(2 * machine.device_bytes)} of device memory", job,
            replace(machine, device_bytes=2 * machine.device_bytes),
        )  # fmt: skip
    if base.fits and (busy(Resource.SSD) or busy(Resource.ADAM)):
        yield f"a batch of {2 * job.rows * job.shape.share.world_size}", job.with_batch(2 * job.rows), machine
    if not base.fits and job.rows > 1:
        rows = largest_batch(job, machine)
        if 0 < rows < job.rows:
            yield f"a batch of {rows * job.shape.share.world_size}", job.with_batch(rows), machine
    if job.clips:
        yield f"no update that waits for the norm ({job.asks_for_norm})", replace(job, clips=False), machine
    precision = job.shape.precision
    if precision.optimizer_dtype != torch.bfloat16:
        halved = job.shape.with_precision(Precision(precision.dtype, torch.bfloat16))
        yield "bf16 moments (--optimizer-dtype bf16)", replace(job, shape=halved), machine
    if not base.fits and not job.single_slot:
        yield "one slot instead of two (--single-slot)", replace(job, single_slot=True), machine


def largest_model(make: Callable[[str], Training], fits: Callable[[Training], bool]) -> Training | None:
    """The preset with most parameters that fits, or None.

    Args:
        make: of a preset's name; may raise UserError where the preset cannot be trained so.
        fits: whether it can be trained.
    """

    def size(name: str) -> int:
        config = load_config(name)[0].get_text_config()
        return int(config.num_hidden_layers * config.hidden_size**2)

    for name in sorted(preset_names(), key=size, reverse=True):
        candidate = make(name)
        if fits(candidate):
            return candidate
    return None


def fits_ours(candidate: Training, machine: Machine) -> bool:
    """Whether our scheme trains ``candidate`` on ``machine``; looks at memory and space, simulates nothing."""
    evaluator = Evaluator(candidate, machine)
    return evaluator.fits(Candidate(candidate.micro_batch, 0.0)) and not missing_space(candidate.record_bytes, machine)
