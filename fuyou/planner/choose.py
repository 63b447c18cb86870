"""What the engine asks the planner at the start of a run."""

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from common.errors import UserError
from fuyou.clipping import ClipBy
from fuyou.devices import Device
from fuyou.keeping import Keeping
from fuyou.memory_plan import MemoryPlan, MemoryPlanner
from fuyou.planner.evaluate import Evaluator
from fuyou.planner.machine import Links, one_of_several, profiled_machine
from fuyou.planner.plan import most_clipped, search
from fuyou.planner.training import Training
from fuyou.planner.trial import as_the_engine_runs_it
from fuyou.profiling import Profile, Workload, load_or_measure
from fuyou.profiling import measure as measure_parts
from fuyou.profiling.cache import load


@dataclass(frozen=True)
class Choice:
    """What the planner has chosen."""

    micro_batch: int
    deferred_fraction: float
    keeping: Keeping
    clip_by: ClipBy
    most_clipped: float
    """Share of the steps up to which speculation takes less time than deferral, where there was a choice."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON, for other ranks."""
        return {**asdict(self), "clip_by": self.clip_by.value}

    @classmethod
    def from_dict(cls, told: dict[str, Any]) -> "Choice":
        """Undo :meth:`to_dict`."""
        operators = tuple((name, ordinal) for name, ordinal in told["keeping"]["operators"])
        keeping = Keeping(operators, told["keeping"]["layers"])
        return cls(**{**told, "keeping": keeping, "clip_by": ClipBy(told["clip_by"])})


def workload_of(training: Training, device: Device, limits: tuple[int, int], directories: Sequence[Path]) -> Workload:
    """What is to be measured for ``training``: the micro-batch that it would have here.

    Args:
        training: what is going to run.
        device: what computes.
        limits: bytes of host and of device memory.
        directories: one per drive.

    Raises:
        UserError: not even one block fits the budgets.
    """
    memory = _memory(training, device, limits)
    return Workload.planned(training.config, training.shape.precision, memory, directories)


def profile_of(
    training: Training, device: Device, limits: tuple[int, int], directories: Sequence[Path], *, measure: bool
) -> Profile | None:
    """What is known of this machine with the micro-batch that this run would have.

    Args:
        training, device, limits, directories: as for :func:`workload_of`.
        measure: whether to measure what is not known, which takes a dozen seconds; else the answer is None.

    Raises:
        UserError: not even one block fits the budgets.
    """
    workload = workload_of(training, device, limits, directories)
    if not measure:
        return load(workload, device)
    return load_or_measure(workload, device, partial(measured, limits=limits))


def measured(workload: Workload, device: Device, limits: tuple[int, int]) -> Profile:
    """What this machine does with ``workload``, measured afresh: every part alone, then some blocks in the engine."""
    return as_the_engine_runs_it(measure_parts(workload, device), workload, device, limits)


def choose(
    training: Training, device: Device, limits: tuple[int, int], directories: Sequence[Path], links: Links | None = None
) -> Choice | None:
    """The fastest way to run ``training`` here, by the profile that is kept of this machine and model.

    Only what leaves every number as it is: the micro-batch is the one that the memory plan would take anyway. Nothing
    is measured: without a profile there is no choice. Costs some milliseconds for the profile and, for the simulations,
    0.1 s for a small model to 3 s for one of 160 layers.

    Args:
        training: what is going to run; what is fixed in it stays as it is.
        device: what computes.
        limits: bytes of host and of device memory.
        directories: one per drive.
        links: to the other ranks, of which each does what ``training`` says, if there are any.
    """
    try:
        profile = profile_of(training, device, limits, directories, measure=False)
        if profile is None:
            return None
        rows = _memory(training, device, limits).batch.micro_rows
        ranks, (host, memory) = training.shape.share.ranks_per_node, limits
        machine = profiled_machine(profile, device.shares_host_memory, memory, host * ranks, len(directories), None)
        if links is not None:
            machine = one_of_several(machine, ranks, links)
        evaluator = Evaluator(replace(training, micro_batch=rows), machine)
        best = search(evaluator)
        most = most_clipped(evaluator, best)
    except UserError:
        return None  # the engine will say what does not fit
    return Choice(rows, best.candidate.deferred_fraction, best.candidate.keeping, best.candidate.clip_by, most)


def is_profiled(training: Training, device: Device, limits: tuple[int, int], directories: Sequence[Path]) -> bool:
    """Whether :func:`choose`, with the same arguments, has a profile to choose by."""
    with contextlib.suppress(UserError):
        return profile_of(training, device, limits, directories, measure=False) is not None
    return False


def _memory(training: Training, device: Device, limits: tuple[int, int]) -> MemoryPlan:
    """The buffers of a run for which nothing is chosen."""
    host, memory = limits
    planner = MemoryPlanner(training.shape, training.config, memory, host, device.shares_host_memory)
    return planner.plan(training.rows, training.seq_len, training.micro_batch)
