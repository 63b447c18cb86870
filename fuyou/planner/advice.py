"""Advice beside a plan: the largest batch, the largest model, and the changes that would help most."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from common.errors import UserError
from common.models.presets import load_config, preset_names
from common.units import format_bytes
from fuyou.layout.optimizer_state import ADAMW, OPTIMIZERS
from fuyou.layout.record import Precision
from fuyou.optimizer.clipping import ClipBy
from fuyou.planner.evaluate import Candidate, Evaluator
from fuyou.planner.machine import Machine
from fuyou.planner.run_plan import RunPlan, missing_space, quick_search, ssd_bytes
from fuyou.planner.training_job import TrainingJob
from fuyou.schedule.tasks import Resource

MOST_ROWS = 1 << 16
"""Largest batch that is looked for."""
LEAST_GAIN = 1.051
"""Speedup below which a change is not worth naming."""


@dataclass(frozen=True)
class Change:
    """A change to machine or settings, and what it would bring."""

    what: str
    """``4 more SSDs``"""
    speedup: float | None
    """Factor on tokens per second; None if no plan fits now, and one does after the change."""


@dataclass(frozen=True)
class RarerCommits:
    """A run that commits every N-th step only."""

    every: int
    """Steps from one commit to the next: as many as a crash may lose."""
    step_seconds: float
    """Average seconds of a step."""
    written_bytes_per_day: float
    drive_days: float | None
    """Days until the drives' warranted writes are used up; None if that is not known."""


def rarer_commits(base: RunPlan, every: int = 8) -> RarerCommits | None:
    """Return what committing every N-th step only would bring; None if no record lives in host memory: nothing."""
    if base.memory is None or not base.memory.resident:
        return None
    evaluator = Evaluator(base.job, base.machine)
    candidate = Candidate(base.memory.batch.micro_rows, base.deferred_fraction, base.activation_policy)
    uncommitted = evaluator.evaluate_uncommitted(candidate)
    seconds, written = base.compared_seconds, float(base.written_bytes)
    if base.clip_by is ClipBy.SPECULATION:  # for which every step must be committed
        committed = evaluator.evaluate(candidate)
        seconds, written = committed.step_seconds, committed.tasks.ssd_written_bytes()
    seconds = (seconds + (every - 1) * uncommitted.step_seconds) / every
    seconds *= base.step_seconds / base.compared_seconds  # both were of merged micro-batches
    written = (written + (every - 1) * uncommitted.tasks.ssd_written_bytes()) / every
    per_day = written * 86400 / seconds
    endurance = base.machine.endurance_bytes
    return RarerCommits(every, seconds, per_day, endurance / per_day if endurance is not None and per_day else None)


def clipping_cost(base: RunPlan) -> float | None:
    """Return how many times as long an average step takes because of clipping by the global norm."""
    if not base.job.clips or base.memory is None:
        return None
    near = Candidate(base.memory.batch.micro_rows, 0.0, base.activation_policy)
    without = quick_search(Evaluator(replace(base.job, clips=False), base.machine), near)
    return base.compared_seconds / without.step_seconds


def largest_batch(job: TrainingJob, machine: Machine) -> int:
    """Return the largest number of sequences per step that fits (at most :data:`MOST_ROWS`); 0 if not one does."""

    def fits(rows: int) -> bool:
        evaluator = Evaluator(job.with_batch(rows), machine)
        micro = None if job.micro_batch is None else min(job.micro_batch, rows)
        try:
            memory = evaluator.memory(Candidate(micro, job.deferred_fraction or 0.0))
        except UserError:
            return False
        needed = job.record_bytes + memory.counts.ssd_activations * memory.activation_bytes
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
    """Return the changes that help most, best first; each is found by planning again."""
    found = []
    for what, other, machine in _changes(base):
        speed = _tokens_per_second(base, other, machine)
        if speed is None:
            continue
        if not base.fits:
            found.append((speed, Change(what, None)))
        else:
            speedup = speed * base.compared_seconds / base.job.tokens
            if speedup > LEAST_GAIN:
                found.append((speed, Change(what, speedup)))
    return [change for _, change in sorted(found, key=lambda pair: -pair[0])[:count]]


def _tokens_per_second(base: RunPlan, job: TrainingJob, machine: Machine) -> float | None:
    """Return the tokens per second of a plan like ``base``; None if it does not fit."""
    fraction = base.deferred_fraction if base.deferred_fraction < 1 else 0.0  # all: only because of clipping
    clip_by = base.clip_by if base.clip_by in job.clip_choices else job.clip_choices[0]
    evaluator = Evaluator(job, machine)
    micro = base.memory.batch.micro_rows if base.memory is not None else job.micro_batch
    try:
        best = quick_search(evaluator, Candidate(micro, fraction, base.activation_policy, clip_by))
    except UserError:
        return None
    if missing_space(ssd_bytes(evaluator, best), machine):
        return None
    return job.tokens / best.step_seconds


def _changes(base: RunPlan) -> Iterator[tuple[str, TrainingJob, Machine]]:
    """Yield changes that may help because they relieve what bounds the step; if nothing fits, all of them."""
    job, machine, rates = base.job, base.machine, base.machine.rates

    def busy(resource: Resource) -> bool:
        """Return whether ``resource`` is busy long enough for more of it to help."""
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
            f"{format_bytes(2 * machine.device_bytes)} of device memory",
            job,
            replace(machine, device_bytes=2 * machine.device_bytes),
        )
    if base.fits and (busy(Resource.SSD) or busy(Resource.ADAM)):
        yield f"a batch of {2 * job.rows * job.shape.share.world_size}", job.with_batch(2 * job.rows), machine
    if not base.fits and job.rows > 1:
        rows = largest_batch(job, machine)
        if 0 < rows < job.rows:
            yield f"a batch of {rows * job.shape.share.world_size}", job.with_batch(rows), machine
    if job.clips:
        yield f"no update that waits for the norm ({job.option_without_norm})", replace(job, clips=False), machine
    precision = job.shape.precision
    if precision.optimizer == ADAMW:
        by_blocks = job.shape.with_precision(Precision(precision.dtype, torch.float32, "adamw8bit"))
        yield "moments in 8 bits (--optimizer adamw8bit)", replace(job, shape=by_blocks), machine
    if precision.optimizer_dtype != torch.bfloat16 and not OPTIMIZERS[precision.optimizer].blockwise:
        halved = job.shape.with_precision(replace(precision, optimizer_dtype=torch.bfloat16))
        yield "bf16 moments (--optimizer-dtype bf16)", replace(job, shape=halved), machine
    if not base.fits and not job.single_slot:
        yield "one slot instead of two (--single-slot)", replace(job, single_slot=True), machine


def largest_model(make: Callable[[str], TrainingJob], fits: Callable[[TrainingJob], bool]) -> TrainingJob | None:
    """Return the preset with most parameters that fits, or None.

    Args:
        make: returns the job for a preset's name; may raise UserError if the preset cannot be trained so.
        fits: returns whether a job fits.
    """

    def size(name: str) -> int:
        config = load_config(name)[0].get_text_config()
        return int(config.num_hidden_layers * config.hidden_size**2)

    for name in sorted(preset_names(), key=size, reverse=True):
        candidate = make(name)
        if fits(candidate):
            return candidate
    return None


def fits_our_scheme(candidate: TrainingJob, machine: Machine) -> bool:
    """Return whether our scheme has the memory and the space for ``candidate``; simulates nothing."""
    evaluator = Evaluator(candidate, machine)
    return evaluator.fits(Candidate(candidate.micro_batch, 0.0)) and not missing_space(candidate.record_bytes, machine)
