"""What the engine asks the planner at the start of a run."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from common.errors import UserError
from fuyou.config import EngineConfig
from fuyou.optimizer.clipping import ClipBy
from fuyou.planner.context import PlannerContext
from fuyou.planner.evaluate import Evaluator
from fuyou.planner.machine import RankLinks, one_of_several, profiled_machine
from fuyou.planner.run_plan import most_clipped, search
from fuyou.recompute.policy import ActivationPolicy


@dataclass(frozen=True)
class Choice:
    """What the planner has chosen."""

    micro_batch: int
    deferred_fraction: float
    keeping: ActivationPolicy
    clip_by: ClipBy
    most_clipped: float
    """Share of the steps up to which speculation takes less time than deferral, where there was a choice."""

    def complete(self, config: EngineConfig) -> EngineConfig:
        """Return ``config`` with what was left open as it was chosen."""
        return config.with_options(
            micro_batch=self.micro_batch,
            deferred_fraction=config.optimizer.deferred_fraction or self.deferred_fraction,
            kept_activations=config.kept_activations or self.keeping,
            clip_by=self.clip_by.value,
            most_clipped=self.most_clipped,
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON, for other ranks."""
        return {**asdict(self), "clip_by": self.clip_by.value}

    @classmethod
    def from_dict(cls, told: dict[str, Any]) -> "Choice":
        """Undo :meth:`to_dict`."""
        operators = tuple((name, ordinal) for name, ordinal in told["keeping"]["operators"])
        keeping = ActivationPolicy(operators, told["keeping"]["layers"])
        return cls(**{**told, "keeping": keeping, "clip_by": ClipBy(told["clip_by"])})


def choose(prospect: PlannerContext, links: RankLinks | None = None) -> Choice | None:
    """The fastest way to run what is about to run here, by the profile that is kept of this machine and model.

    Only what leaves every number as it is: the micro-batch is the one that the memory plan would take anyway. Nothing
    is measured: without a profile there is no choice. Costs some milliseconds for the profile and, for the simulations,
    0.1 s for a small model to 3 s for one of 160 layers.

    Args:
        prospect: what is fixed in its training stays as it is.
        links: to the other ranks, of which each does what the training says, if there are any.
    """
    training, (host, memory) = prospect.training, prospect.limits
    try:
        profile = prospect.profile
        if profile is None:
            return None
        rows, ranks = prospect.memory.batch.micro_rows, training.shape.share.ranks_per_node
        shared, drives = prospect.device.shares_host_memory, len(prospect.directories)
        machine = profiled_machine(profile, shared, memory, host * ranks, drives, None)
        if links is not None:
            machine = one_of_several(machine, ranks, links)
        evaluator = Evaluator(replace(training, micro_batch=rows), machine)
        best = search(evaluator)
        most = most_clipped(evaluator, best)
    except UserError:
        return None  # the engine will say what does not fit
    return Choice(rows, best.candidate.deferred_fraction, best.candidate.keeping, best.candidate.clip_by, most)
