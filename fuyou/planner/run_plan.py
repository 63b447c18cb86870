"""A run on this machine before it begins: its model, the layout of its store, its memory, and what was measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from common.activity import activity
from fuyou.planner.profiling import Profile, ProfiledWorkload, load, save
from fuyou.planner.profiling.measure import measure
from fuyou.planner.training_job import TrainingJob, fitting_job
from fuyou.runtime.device import Device
from fuyou.schedule.memory_plan import MemoryPlan


@dataclass(frozen=True)
class RunPlan:
    """What a run on this machine is going to be; a command prints it, and an engine runs it.

    Every property raises ``UserError`` if not even one block fits the memory limits.
    """

    job: TrainingJob
    device: Device  # Device that computes
    limits: tuple[int, int]  # Bytes of host memory and of device memory
    directories: Sequence[Path]  # Directories of the run, one per drive

    @cached_property
    def _fitted(self) -> tuple[TrainingJob, MemoryPlan]:
        host, device = self.limits
        return fitting_job(self.job, device, host, self.device.shares_host_memory)

    @property
    def fitted(self) -> TrainingJob:
        """The job with blocks in pieces where whole ones do not fit."""
        return self._fitted[0]

    @property
    def memory(self) -> MemoryPlan:
        """The buffers of the run with default settings."""
        return self._fitted[1]

    @cached_property
    def workload(self) -> ProfiledWorkload:
        """Return what a profile for this run measures: its micro-batch."""
        job = self.job
        memory = self.memory
        return ProfiledWorkload(
            job.config,
            job.layout.precision,
            memory.batch.micro_rows,
            memory.batch.columns,
            tuple(self.directories),
            memory.head_columns,
            memory.chunk_elements,
        )

    @cached_property
    def profile(self) -> Profile | None:
        """Return the cached profile of this machine and model, or None."""
        return load(self.workload, self.device)


def profile_or_measure(plan: RunPlan) -> Profile:
    if plan.profile is not None:
        return plan.profile
    with activity("measuring this machine with this model, which is kept for the next time"):
        return save(measure(plan.workload, plan.device), plan.workload, plan.device)
