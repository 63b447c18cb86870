"""A preset without data, whose throughput on random tokens is measured; and the plan of a run for another machine."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from cli.job.job import Job
from cli.options.command import with_command
from common.errors import UserError
from common.hardware.directory_drive import drive_of
from common.hardware.machine import Gpu, pick_gpu
from common.hardware.presets import gpu_preset
from common.units import counted, format_bytes
from fuyou.planner.simulator import TaskRates, simulate
from fuyou.schedule.tasks import StepList

_USUAL_DRIVE = "samsung-990-pro-4tb"  # What a plan takes where the drives at hand have no preset
_ANY_RATES = TaskRates(1e12, 1e10, 1e10, 1e9, 1e9, 1e9)  # No number of bytes depends on them


def announcement(job: Job) -> str:
    """Return what a run on random tokens does, with the bytes that it will write to the drives."""
    created = sum(record.first_nbytes for record in job.stored.layout.records)
    assert job.plan is not None
    steady = simulate(
        job.stored.layout, job.plan.memory, _ANY_RATES, commit_every=job.engine.store.commit_every
    )
    written = steady.mean(StepList.ssd_written_bytes)
    return (
        f"{job.settings.model} has random weights, and there are no data: this measures throughput, in "
        f"{counted(job.steps, 'step')} on random tokens. It writes {format_bytes(created)} to the drives at first and "
        f"about {format_bytes(round(written))} per step, {format_bytes(round(created + job.steps * written))} in all."
    )


def gpu_or_plan(gpu: str, arguments: Sequence[str], drives: Sequence[Path]) -> Gpu | None:
    """Return the GPU that ``--gpu`` names; None: the CPU.

    Args:
        arguments: of the run, for a plan.
        drives: what ``--ssd`` names, whether it is there or not.

    Raises:
        UserError: it is not in this machine; of a known GPU with the command that plans the run.
    """
    try:
        return pick_gpu(gpu)
    except UserError as error:
        try:
            gpu_preset(gpu)
        except UserError:
            raise error from None
        raise UserError(f"{error} To plan this run for one: {_plan_command(arguments, drives)}") from None


def _plan_command(arguments: Sequence[str], drives: Sequence[Path]) -> str:
    words = []
    is_ssd = False
    for word in with_command(arguments)[1:]:
        if word.startswith("-"):
            is_ssd = word.partition("=")[0] == "--ssd"
        if not is_ssd:
            words.append(word)
    presets = [drive_of(path).preset for path in drives if path.is_dir()]
    drive = next((preset.name for preset in presets if preset is not None), _USUAL_DRIVE)
    return shlex.join(["finetune", "plan", *words, "--drive", drive, "--ssds", str(max(1, len(drives)))])
