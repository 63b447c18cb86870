"""Plan a run out of core (``finetune plan``)."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from cli.job.machine import ELSEWHERE, device_name, directories_at_hand, job_at_hand, plan_at_hand
from cli.options.option import naming
from cli.options.settings import Settings
from cli.plan.alternatives import Alternative, adapts_experts, on_one_node, without_experts
from cli.plan.described import describe, row, write_plan_page
from common.data.files import find_files
from common.errors import UserError
from common.hardware.presets import drive_names, drive_preset, gpu_names, gpu_preset
from common.models.adapters.options import DENSE_LINEAR
from common.units import counted, format_bytes, format_count, format_seconds, parse_bytes
from fuyou.layout.share import Share
from fuyou.planner import (
    Machine,
    Plan,
    RankLinks,
    RunPlan,
    TrainingJob,
    machine_of_one_rank,
    preset_machine,
    profile_or_measure,
    profiled_machine,
    search,
)
from fuyou.planner.evaluate import Evaluator
from fuyou.planner.search import fits, forward_seconds, largest_model
from fuyou.planner.trace import write_trace

BYTES_PER_TOKEN = 4  # Bytes of a data file that make a token, about: English text in JSON


def planned_steps(settings: Settings, tokens_per_step: int) -> tuple[int, str] | None:
    """Return the number of steps, each of all ranks' tokens, and how it was estimated; None if no option tells it."""
    if settings.steps is not None:
        return settings.steps, ""
    if not settings.data:
        return None
    files = find_files(tuple(file for files, _ in settings.data_sets for file in files))
    held_out = settings.eval_split or 0.0
    tokens = (1 - held_out) * sum(file.stat().st_size for file in files) / BYTES_PER_TOKEN
    steps = max(1, math.ceil(tokens * (settings.epochs or 1) / tokens_per_step))
    return (
        steps,
        f", estimated: {format_count(round(tokens))} tokens in {counted(len(files), 'file')} by their size",
    )


def run_rows(result: Plan, settings: Settings) -> dict[str, str]:
    """Return lines about the whole run, by their label."""
    rows = {}
    share = result.job.layout.share
    planned = planned_steps(settings, result.job.tokens * share.world_size)
    if planned is not None:
        steps, how = planned
        written = steps * result.written_bytes
        endurance = result.machine.endurance_bytes
        wear = f", {written / endurance:.1%} of the drives' warranted writes" if endurance else ""
        rows["run"] = (
            f"{counted(steps, 'step')} in {format_seconds(steps * result.step_seconds)}{how}; "
            f"{format_bytes(written)} written{wear}"
        )
    if settings.traits.needs_reference:
        seconds = forward_seconds(result)
        whole = "" if planned is None else f", at most {format_seconds(planned[0] * seconds)} in all"
        rows["reference"] = (
            f"each batch of the data passes forward once before the first step, {format_seconds(seconds)} each{whole}"
        )
    return rows


DOES_NOT_FIT = 1  # Exit status of a plan that does not fit
# For a run on a machine that is planned by its name: most of the 64 GiB of a usual desktop
_HOST_MEMORY = "48GiB"


class Planning:
    """The plans of one command line: of the run itself, and of what else there is to know.

    Attributes:
        machine: one node.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._share = None if settings.nodes is None else Share(settings.nodes, settings.gpus_per_node or 1)
        self._network = math.inf if self._share is None else _network(settings.network, self._share.nodes)
        self._device = ELSEWHERE if settings.drive is not None else _device(settings)
        self._plan = None
        if settings.drive is None:
            self._plan = plan_at_hand(settings, self._device, directories_at_hand(settings))
        self.machine = _machine_by_name(settings) if self._plan is None else _machine_at_hand(self._plan)

    def job(self, **changes: Any) -> TrainingJob:
        """Return the job of one rank that is alone, with other options where there are ``changes``."""
        if self._plan is not None and not changes:
            return self._plan.job
        return job_at_hand(replace(self._settings, **changes), self._device)

    def largest_job(self) -> TrainingJob | None:
        return largest_model(
            lambda name: self.job(model=name, max_model=False), lambda job: fits(job, self.machine)
        )

    def plan(self, job: TrainingJob) -> Plan:
        return search(*self._of_one_rank(job, self._share))

    def alternatives(self, job: TrainingJob, result: Plan) -> list[Alternative]:
        """Return what to know before paying for ``result``, the plan of ``job``."""
        others = []
        share = self._share
        lora_rank = self._settings.lora_rank
        if share is not None and share.nodes > 1:
            others.append(
                on_one_node(result, search(*self._of_one_rank(job, Share(1, share.ranks_per_node))))
            )
        if adapts_experts(job):
            other = None
            if lora_rank is not None:
                model = self._settings.model or job.name
                other = self.plan(self.job(model=model, max_model=False, lora_targets=(DENSE_LINEAR,)))
            others.append(without_experts(result, other))
        return [other for other in others if other is not None]

    def _of_one_rank(self, job: TrainingJob, share: Share | None) -> tuple[TrainingJob, Machine]:
        if share is None:
            return job, self.machine
        network = self._network if share.nodes > 1 else math.inf
        links = RankLinks.assumed(self.machine, share.ranks_per_node, network)
        return job.among(share), machine_of_one_rank(self.machine, share.ranks_per_node, links)


def run_plan(settings: Settings) -> int:
    """Plan, print the plan, and return the exit status."""
    planned_steps(settings, 1)  # what is mistyped comes out before the simulation
    planning = Planning(settings)
    job = planning.largest_job() if settings.max_model else planning.job()
    if job is None:
        machine = planning.machine
        lacking = (
            f"No preset fits on {machine.device} with {format_bytes(machine.host_bytes)} of host memory."
        )
        print(json.dumps({"model": None, "fits": False, "missing": [lacking]}) if settings.json else lacking)
        return DOES_NOT_FIT
    result = planning.plan(job)
    others = planning.alternatives(job, result)
    if settings.trace is not None:
        _write_trace(result, settings.trace)
    if settings.json:
        print(
            json.dumps({**result.to_json(), "alternatives": [other.to_json() for other in others]}, indent=2)
        )
    if not settings.json or settings.html is not None:
        lines = describe(result)
        for label, text in run_rows(result, settings).items() if result.memory is not None else ():
            lines += row(label, text)
        for other in others:
            lines += row(other.label, other.text)
        if settings.html is not None:
            write_plan_page(result, lines, settings.html.expanduser())
        if not settings.json:
            print("\n".join(lines))
    return 0 if result.fits else DOES_NOT_FIT


def _machine_by_name(settings: Settings) -> Machine:
    if settings.gpu in ("auto", "cpu"):
        raise UserError(
            f"--drive plans for hardware by name: name the GPU as well, --gpu {' | '.join(gpu_names())}."
        )
    host = parse_bytes(settings.host_memory or _HOST_MEMORY)
    device = None if settings.device_memory is None else parse_bytes(settings.device_memory)
    with naming("--gpu"):
        gpu = gpu_preset(settings.gpu)
    with naming("--drive"):
        drive = drive_preset(settings.drive or "")
    state_bytes = settings.engine.precision.state_bytes
    machine = preset_machine(
        gpu, drive, settings.ssds or 1, host, device_bytes=device, state_bytes=state_bytes
    )
    if settings.host_memory is None:
        said = f"{format_bytes(host)} of host memory for the run (--host-memory)"
        machine = replace(machine, assumptions=(said, *machine.assumptions))
    return machine


def _machine_at_hand(plan: RunPlan) -> Machine:
    (host, memory), shared, directories = plan.limits, plan.device.shares_host_memory, plan.directories
    profile = profile_or_measure(plan)
    free = min(shutil.disk_usage(path).free for path in directories) * len(directories)
    return profiled_machine(profile, shared, memory, host, directories, free)


def _device(settings: Settings) -> str:
    """Return the device of this machine to plan for."""
    if settings.ssds is not None:
        raise UserError(
            f"--ssds counts drives of one kind: name it with --drive {' | '.join(drive_names())}."
        )
    if settings.max_model:
        raise UserError(
            "--max-model needs hardware by name: --gpu NAME --drive NAME --ssds N --host-memory SIZE."
        )
    try:
        return device_name(settings.gpu)
    except UserError as error:
        try:
            gpu_preset(settings.gpu)
        except UserError:
            raise error from None
        raise UserError(
            f"--gpu {settings.gpu} is not in this machine: to plan for it, say which drives it has, --drive NAME "
            f"--ssds N ({', '.join(drive_names())})."
        ) from None


def _network(text: str | None, nodes: int) -> float:
    if text is None:
        if nodes > 1:
            raise UserError(
                "A plan for --nodes with SSDs needs to know what connects them: --network 25Gbit/s."
            )
        return math.inf
    written = re.fullmatch(r"\s*([\d.]+\s*[kKMGT]i?)(bit|b|B)(?:/s|ps)?\s*", text)
    try:
        rate = parse_bytes(f"{written[1]}B") / (1 if written[2] == "B" else 8) if written else 0.0
    except UserError:
        rate = 0.0
    if rate <= 0:
        raise UserError(f"--network {text} is not a rate with its unit: write 25Gbit/s, or 3GB/s.")
    return rate


def _write_trace(result: Plan, path: Path) -> None:
    if result.memory is None:
        raise UserError("--trace: a run that does not fit has no step to draw.")
    steady = Evaluator(result.job, result.machine).simulated_step(result.candidate)
    ends = steady.simulation.step_ends
    busy = steady.simulation.intervals
    write_trace(path, [steady.cycle[-1]], result.job.layout.records, (ends[-2], ends[-1]), busy)
