"""What relaxes the bound of a plan, and the largest model that fits a machine."""

from collections.abc import Callable

from common.models.presets import load_config, preset_names
from fuyou.layout.optimizer_state import ADAMW
from fuyou.layout.record import Kind
from fuyou.planner.evaluate import Candidate, Evaluator
from fuyou.planner.machine import Machine
from fuyou.planner.run_plan import RunPlan, missing_space
from fuyou.planner.training_job import TrainingJob
from fuyou.schedule.tasks import Resource

_HARDWARE = {
    Resource.GPU: "a faster device",
    Resource.HOST_TO_DEVICE: "a faster link to the device",
    Resource.DEVICE_TO_HOST: "a faster link from the device",
    Resource.SSD: "more or faster SSDs",
    Resource.ADAM: "faster host memory",
    Resource.INTRA_NODE: "faster links inside the nodes",
    Resource.INTER_NODE: "a faster network",
}
# Resources whose work is the same for a larger batch, or nearly so.
_PER_STEP = (Resource.SSD, Resource.ADAM, Resource.INTER_NODE)


def what_relaxes(plan: RunPlan) -> list[str]:
    """Return what would make a step of a plan that is bound by one resource shorter, or worth more tokens."""
    ways = [_HARDWARE[plan.bound]]
    if plan.bound in _PER_STEP:
        ways.append("a larger --batch-size")
    shape = plan.job.shape
    if plan.bound is Resource.SSD and shape.precision.optimizer == ADAMW and shape.trained_elements(Kind.BLOCK):
        ways.append("--optimizer adamw8bit")
    return ways


def largest_model(make: Callable[[str], TrainingJob], fits: Callable[[TrainingJob], bool]) -> TrainingJob | None:
    """Return the preset with most parameters that fits, or None.

    Args:
        make: returns the job for a preset's name; may raise UserError if the preset cannot be trained so.
        fits: returns whether a job fits.
    """

    def size(name: str) -> int:
        config = load_config(name)[0].get_text_config()
        return int(config.num_hidden_layers * config.hidden_size**2)

    jobs = (make(name) for name in sorted(preset_names(), key=size, reverse=True))
    return next((job for job in jobs if fits(job)), None)


def fits(job: TrainingJob, machine: Machine) -> bool:
    """Return whether a machine has the memory and the space for ``job``; simulates nothing."""
    evaluator = Evaluator(job, machine)
    return evaluator.fits(Candidate(job.micro_batch, 0.0)) and not missing_space(job.record_bytes, machine)
