"""``finetune --plan`` with ``--teacher`` or ``--reference``: the other model's pass over the data before training."""

from dataclasses import dataclass
from typing import Any

from cli.job.consulted import check_consulted
from cli.job.machine import precision_of, sequence_length
from cli.options.naming import naming
from cli.options.settings import Settings
from cli.plan.whole_run import planned_steps
from common.models.adapters.options import AdapterOptions
from common.models.presets import load_config
from common.units import counted, format_bytes, format_seconds
from fuyou.planner import Machine, RunPlan, TrainingJob, describe_training, plan
from fuyou.planner.forward_pass import forward_seconds
from fuyou.schedule.batch import LossInputs


@dataclass(frozen=True)
class ConsultedPlan:
    """What the other model's pass takes."""

    name: str
    plan: RunPlan
    """Of an engine with this model, all of whose memory it has."""
    batches: int | None
    """Batches of the data; None: nothing says how many."""
    found_bytes: int
    """Bytes that are kept of each batch."""

    @property
    def fits(self) -> bool:
        """Whether the machine has room for it."""
        return self.plan.fits

    def describe(self) -> str:
        """Return a line for people."""
        if not self.fits:
            return f"{self.name} does not fit: {' '.join(self.plan.missing)}"
        seconds = forward_seconds(self.plan)
        many = "each batch" if self.batches is None else counted(self.batches, "batch", "batches")
        whole = "" if self.batches is None else f", {format_seconds(self.batches * seconds)} in all"
        kept = self.found_bytes * (self.batches or 1)
        return (
            f"{self.name} passes over {many} of the data before the first step, {format_seconds(seconds)} each{whole}; "
            f"{format_bytes(kept)} of it {'is' if self.batches else 'of each is'} kept"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the figures."""
        seconds = forward_seconds(self.plan) if self.fits else None
        memory = self.plan.memory
        return {
            "model": self.name,
            "fits": self.fits,
            "missing": list(self.plan.missing),
            "seconds_per_batch": seconds,
            "batches": self.batches,
            "host_bytes": None if memory is None else memory.host_bytes,
            "kept_bytes_per_batch": self.found_bytes,
        }


def planned_consultation(settings: Settings, job: TrainingJob, machine: Machine) -> ConsultedPlan | None:
    """Return what the other model takes; None: there is none.

    Args:
        settings: of the run.
        job: the run, as one of its ranks does it.
        machine: that it runs on.

    Raises:
        UserError: the other model does not go with the run's.
    """
    if settings.consulted is None:
        return None
    with naming("--model"):
        config, checkpoint = load_config(settings.model)
    check_consulted(settings, config, checkpoint)
    tokens = settings.teacher_tokens if settings.traits.needs_teacher else 0
    other = describe_training(
        settings.consulted[1],
        job.rows,
        sequence_length(settings.seq_len, config),
        precision=precision_of(settings),
        adapters=AdapterOptions(1).peft_config(),
        loss=LossInputs(2 * tokens or 1),
        single_slot=True,
        compiled=settings.compile,
    )
    steps = planned_steps(settings, job.tokens)
    kept = job.rows * (job.seq_len * 8 * tokens or 4)
    share = job.shape.share
    result = plan(other if share.world_size == 1 else other.among(share).with_batch(job.rows), machine)
    return ConsultedPlan(settings.consulted[1], result, None if steps is None else steps[0], kept)
