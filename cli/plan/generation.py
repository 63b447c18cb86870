"""``finetune --plan --generate``: how fast the run's weights would generate, between its steps."""

import re

from cli.options.settings import Settings
from common.errors import UserError
from fuyou.layout.key_values import KeyValueCache
from fuyou.model.caching import find_key_values
from fuyou.planner import Machine, TrainingJob
from fuyou.planner.generation import GenerationJob, GenerationPlan, plan_generation
from fuyou.runtime.devices.device import Device


def wanted_generation(settings: Settings) -> GenerationJob | None:
    """Return what is to be generated; None: nothing.

    Raises:
        UserError: it is not written as ``8x512x64``.
    """
    if settings.generate is None:
        return None
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", settings.generate)
    if found is None:
        raise UserError(
            f"--generate {settings.generate} is not prompts x their tokens x new tokens: write 8x512x64, for instance."
        )
    rows, prompt, new = (int(number) for number in found.groups())
    return GenerationJob(rows, prompt, new)


def planned_generation(
    generation: GenerationJob, job: TrainingJob, machine: Machine, device: Device | None
) -> GenerationPlan:
    """Return how fast it would be.

    Args:
        generation: what is generated.
        job: the run.
        machine: that it runs on.
        device: the machine's device, if it is at hand.

    Raises:
        UserError: there is no room for it, or the model cannot generate so.
    """
    if job.shape.orders:
        raise UserError("--generate plans for blocks that fit on the device as they are: leave it out.")
    itemsize = job.shape.precision.dtype.itemsize
    layers = find_key_values(job.stack)
    sizes = KeyValueCache(layers, itemsize, generation.rows, generation.prompt + generation.new, device_layers=0)
    return plan_generation(job, machine, generation, sizes, device)
