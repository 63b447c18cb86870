"""A run that is about to begin on this machine, and what is known of the machine with it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fuyou.planner.profiling import Profile, ProfiledWorkload, load
from fuyou.planner.training import Training
from fuyou.runtime.devices import Device
from fuyou.schedule.memory_plan import MemoryPlan, MemoryPlanner


@dataclass(frozen=True)
class PlannerContext:
    """The run, where it would run, and what follows from these: worked out when it is first asked for, once.

    All that follows raises ``UserError`` where not even one block fits the budgets.
    """

    training: Training
    device: Device
    """What computes."""
    limits: tuple[int, int]
    """Bytes of host and of device memory."""
    directories: Sequence[Path]
    """One per drive."""

    @cached_property
    def memory(self) -> MemoryPlan:
        """The buffers of the run if nothing is chosen for it."""
        training, (host, memory) = self.training, self.limits
        planner = MemoryPlanner(training.shape, training.config, memory, host, self.device.shares_host_memory)
        return planner.plan(training.rows, training.seq_len, training.micro_batch)

    @cached_property
    def workload(self) -> ProfiledWorkload:
        """What is to be measured for it: the micro-batch that it would have here."""
        training = self.training
        return ProfiledWorkload.planned(training.config, training.shape.precision, self.memory, self.directories)

    @cached_property
    def profile(self) -> Profile | None:
        """The profile that is kept of this machine and model; None: there is none. Nothing is measured."""
        return load(self.workload, self.device)
