"""``finetune --plan`` out of core: what a run would take, and how fast it would be."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

from cli.job.machine import device_at_hand, directories_at_hand, precision_of, training_of
from cli.job.quiet import quiet_transformers
from cli.options.computing_dtype import ELSEWHERE, with_dtype
from cli.options.naming import naming
from cli.options.settings import Settings
from cli.plan.described import describe, row
from cli.plan.plan_page import write_plan_page
from cli.plan.whole_run import planned_steps, run_rows
from common.errors import UserError
from common.hardware.machine import memory_available_bytes
from common.hardware.presets import drive_names, drive_preset, gpu_names, gpu_preset
from common.units import format_bytes, parse_bytes
from fuyou.layout.share import Share
from fuyou.planner import (
    Machine,
    PlannerContext,
    RankLinks,
    RunPlan,
    TrainingJob,
    machine_of_one_rank,
    plan,
    preset_machine,
    profile_or_measure,
    profiled_machine,
)
from fuyou.planner.advice import fits, largest_model
from fuyou.runtime.devices.device import Device, memory_limits
from fuyou.runtime.trace import write_trace

DOES_NOT_FIT = 1  # Exit status of a plan that does not fit


def run_plan(settings: Settings) -> int:
    """Plan, print, and return the exit status.

    Args:
        settings: of the run and the plan; with ``max_model`` they name no model.

    Raises:
        UserError: something typed does not exist.
    """
    share = None if settings.nodes is None else Share(settings.nodes, settings.gpus_per_node or 1)
    settings = replace(settings, nodes=None, gpus_per_node=None)  # a rank is planned as a machine, then shared
    if not settings.debug:
        quiet_transformers()
    settings = with_dtype(settings, None if settings.drive is None else ELSEWHERE)
    planned_steps(settings, 1)  # what is mistyped comes out before the simulation
    machine = _machine(settings)
    wanted = _largest(settings, machine) if settings.max_model else training_of(settings)
    if wanted is not None and share is not None:
        wanted, network = wanted.among(share), _network(settings.network, share.nodes)
        machine = machine_of_one_rank(
            machine, share.ranks_per_node, RankLinks.assumed(machine, share.ranks_per_node, network)
        )
    if wanted is None:
        lacking = f"No preset fits on {machine.device} with {format_bytes(machine.host_bytes)} of host memory."
        print(json.dumps({"model": None, "fits": False, "missing": [lacking]}) if settings.json else lacking)
        return DOES_NOT_FIT
    result = plan(wanted, machine)
    if settings.trace is not None:
        _write_trace(result, settings.trace)
    if settings.json:
        print(json.dumps(result.to_json(), indent=2))
    if not settings.json or settings.html is not None:
        lines = describe(result)
        for label, text in run_rows(result, settings).items() if result.memory is not None else ():
            lines += row(label, text)
        if settings.html is not None:
            write_plan_page(result, lines, settings.html.expanduser())
        if not settings.json:
            print("\n".join(lines))
    return 0 if result.fits else DOES_NOT_FIT


def _largest(settings: Settings, machine: Machine) -> TrainingJob | None:
    return largest_model(
        lambda name: training_of(replace(settings, model=name)), lambda candidate: fits(candidate, machine)
    )


# -- the machine ------------------------------------------------------------------------------------------------------


def _machine(settings: Settings) -> Machine:
    """Return the machine that presets describe if ``--drive`` is given, else the one at hand, profiled."""
    if settings.drive is not None:
        if settings.gpu in ("auto", "cpu"):
            raise UserError(
                f"--drive plans for hardware by name: name the GPU as well, --gpu {' | '.join(gpu_names())}."
            )
        host = settings.host_memory or memory_available_bytes() * 4 // 5
        with naming("--gpu"):
            gpu = gpu_preset(settings.gpu)
        with naming("--drive"):
            drive = drive_preset(settings.drive)
        return preset_machine(
            gpu,
            drive,
            settings.ssds or 1,
            host,
            device_bytes=settings.device_memory,
            state_bytes=precision_of(settings).state_bytes,
        )
    if settings.ssds is not None:
        raise UserError(f"--ssds counts drives of one kind: name it with --drive {' | '.join(drive_names())}.")
    if settings.max_model:
        raise UserError("--max-model needs hardware by name: --gpu NAME --drive NAME --ssds N --host-memory SIZE.")
    return _machine_at_hand(settings)


def _machine_at_hand(settings: Settings) -> Machine:
    device, directories = _open(settings.gpu), directories_at_hand(settings)
    host, memory = memory_limits(device, settings.host_memory, settings.device_memory)
    profile = profile_or_measure(PlannerContext(training_of(settings), device, (host, memory), directories))
    free = min(shutil.disk_usage(path).free for path in directories) * len(directories)
    return profiled_machine(profile, device.shares_host_memory, memory, host, len(directories), free)


def _open(name: str) -> Device:
    try:
        return device_at_hand(name)
    except UserError as error:
        try:
            gpu_preset(name)
        except UserError:
            raise error from None
        raise UserError(
            f"--gpu {name} is not in this machine: to plan for it, say which drives it has, --drive NAME --ssds N "
            f"({', '.join(drive_names())})."
        ) from None


def _network(text: str | None, nodes: int) -> float:
    if text is None:
        if nodes > 1:
            raise UserError("A plan for several nodes with SSDs needs to know what connects them: --network 25Gbit/s.")
        return math.inf
    written = re.fullmatch(r"\s*([\d.]+\s*[kKMGT]i?)(bit|b|B)(?:/s|ps)?\s*", text)
    try:
        rate = parse_bytes(f"{written[1]}B") / (1 if written[2] == "B" else 8) if written else 0.0
    except UserError:
        rate = 0.0
    if rate <= 0:
        raise UserError(f"--network {text} is not a rate with its unit: write 25Gbit/s, or 3GB/s.")
    return rate


def _write_trace(result: RunPlan, path: Path) -> None:
    if result.tasks is None or result.simulation is None:
        raise UserError("--trace: a run that does not fit has no step to draw.")
    ends = result.simulation.step_ends
    write_trace(path, [result.tasks], result.job.shape.records, (ends[-2], ends[-1]), result.simulation.intervals)
