"""``finetune --plan`` out of core: what a run would take, and how fast it would be."""

import json
import math
import re
import shutil
import textwrap
from dataclasses import replace
from pathlib import Path

from cli.job.machine import device_at_hand, directories_at_hand, training_of
from cli.job.quiet import quiet_transformers
from cli.options.computing_dtype import ELSEWHERE, with_dtype
from cli.options.naming import naming
from cli.options.settings import Settings
from cli.plan.compare_engines import InMemory, in_memory
from cli.plan.plan_page import write_plan_page
from cli.plan.whole_run import planned_steps, run_rows
from cli.report.results import RESOURCES
from common.errors import UserError
from common.hardware.machine import memory_available_bytes
from common.hardware.presets import drive_names, drive_preset, gpu_names, gpu_preset
from common.units import format_bytes, format_count, format_seconds, parse_bytes
from fuyou.calibration import profile_or_measure
from fuyou.layout.share import Share
from fuyou.optimizer.clipping import ClipBy
from fuyou.planner import (
    Machine,
    PaperScheme,
    PlannerContext,
    RankLinks,
    RunPlan,
    TrainingJob,
    machine_of_one_rank,
    plan,
    preset_machine,
    profiled_machine,
)
from fuyou.planner.advice import (
    MOST_ROWS,
    best_changes,
    clipping_cost,
    fits_our_scheme,
    largest_batch,
    largest_model,
    rarer_commits,
)
from fuyou.runtime.devices.device import Device, memory_limits
from fuyou.runtime.devices.emulated import is_emulated
from fuyou.runtime.trace import write_trace
from fuyou.schedule.tasks import Resource

WIDTH = 100
_BAR = 24
_LABEL = 10
DOES_NOT_FIT = 1
"""Exit status of a plan that does not fit."""


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
    other: InMemory | None = None
    if wanted is not None and share is not None:
        wanted, network = wanted.among(share), _network(settings.network, share.nodes)
        other = in_memory(wanted, machine, network)
        machine = machine_of_one_rank(
            machine, share.ranks_per_node, RankLinks.assumed(machine, share.ranks_per_node, network)
        )
    if wanted is None:
        lacking = f"No preset fits on {machine.device} with {format_bytes(machine.host_bytes)} of host memory."
        print(json.dumps({"model": None, "fits": False, "missing": [lacking]}) if settings.json else lacking)
        return DOES_NOT_FIT
    result = _plan(wanted, machine, settings.scheme)
    if settings.trace is not None:
        _write_trace(result, settings.trace)
    if settings.json:
        content = result.to_json() | ({} if other is None else {"in_memory": other.to_json()})
        print(json.dumps(content, indent=2))
    if not settings.json or settings.html is not None:
        lines = describe(result)
        for label, text in run_rows(result, settings).items() if result.memory is not None else ():
            lines += _row(label, text)
        if other is not None:
            lines += ["", *_row("in memory", other.verdict(result))]
        if settings.html is not None:
            write_plan_page(result, lines, settings.html.expanduser())
        if not settings.json:
            print("\n".join(lines))
    return 0 if result.fits else DOES_NOT_FIT


def _plan(wanted: TrainingJob, machine: Machine, scheme: str) -> RunPlan:
    return PaperScheme(wanted, machine).plan() if scheme == "fuyou" else plan(wanted, machine)


def _largest(settings: Settings, machine: Machine) -> TrainingJob | None:
    """Return the training of the largest preset that fits; None: none fits."""

    def fits(candidate: TrainingJob) -> bool:
        if settings.scheme == "fuyou":
            return not PaperScheme(candidate, machine).missing()
        return fits_our_scheme(candidate, machine)

    return largest_model(lambda name: training_of(replace(settings, model=name)), fits)


# -- the machine ------------------------------------------------------------------------------------------------------


def _machine(settings: Settings) -> Machine:
    """Return the machine that presets describe if ``--drive`` is given, else the one at hand, profiled."""
    if settings.drive is not None:
        if settings.gpu in ("auto", "cpu") or is_emulated(settings.gpu):
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
    """Open the device at hand.

    Raises:
        UserError: it is not there; for a GPU with a preset, says that only its drives need to be named.
    """
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
    """Return the bytes per second of ``25Gbit/s`` or ``3GB/s``.

    Raises:
        UserError: it is neither, or not given for several nodes.
    """
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


# -- for people -------------------------------------------------------------------------------------------------------


def describe(result: RunPlan) -> list[str]:
    """Return the plan as lines of at most :data:`WIDTH` columns."""
    job, machine, share = result.job, result.machine, result.job.shape.share
    several = f"{machine.drive_count} x " if machine.drive_count > 1 else ""
    scheme = ", as the paper's Fuyou would run it" if result.scheme == "fuyou" else ""
    among = f"{share.nodes} nodes of " if share.nodes > 1 else ""
    among += f"{share.ranks_per_node} x " if share.ranks_per_node > 1 else ""
    lines = [
        *textwrap.wrap(f"{job.name} on {among}{machine.device} with {several}{machine.drives}{scheme}", WIDTH),
        f"{format_count(job.parameters)} parameters; a step of {job.rows * share.world_size:,} x {job.seq_len:,} tokens"
        + (f"; below is one of {share.world_size} ranks" if share.world_size > 1 else ""),
        "",
    ]
    if result.memory is None:
        lines += _row("does not fit", " ".join(result.missing), 14)
        changes = [change.what for change in best_changes(result)] if result.scheme == "ours" else []
        if changes:
            lines += _row("would fit", " or ".join(changes), 14)
        return lines
    lines += [*_speed(result), "", *_bars(result), "", *_places(result), "", *_limits(result)]
    return lines


def _speed(result: RunPlan) -> list[str]:
    rows = []
    if not result.fits:
        rows += _row("does not fit", " ".join(result.missing), 14)
    rows += _row(
        "step",
        f"{format_seconds(result.step_seconds)}: {format_count(result.tokens_per_second)} tokens/s, "
        f"{result.flops_per_second / 1e12:.3g} TFLOP/s "
        f"({result.hardware_flops_per_second / 1e12:.3g} with recomputation)",
    )
    bound = result.busy[result.bound]
    return rows + _row(
        "bound",
        f"{RESOURCES[result.bound.value]}, {format_seconds(bound)} ({bound / result.step_seconds:.0%} of the step)",
    )


def _bars(result: RunPlan) -> list[str]:
    rows, label = [], "busy"
    for resource in (resource for resource in Resource if resource in result.busy):
        share = min(1.0, result.busy[resource] / result.step_seconds)
        filled = round(share * _BAR)
        rows.append(
            f"{label:{_LABEL}}{RESOURCES[resource.value]:<24}{'█' * filled}{'░' * (_BAR - filled)} {share:>5.0%}"
            f"{format_seconds(result.busy[resource]):>14}"
        )
        label = ""
    return rows


def _places(result: RunPlan) -> list[str]:
    assert result.memory is not None
    counts, job, machine = result.memory.counts, result.job, result.machine
    layers = len(job.shape.blocks)
    device = [
        f"{_many(counts.device_blocks, 'block')}, {_many(counts.device_block_gradients, 'gradient')}",
        _many(counts.device_activations, "block input"),
        counts.device_kept and f"{counts.device_kept:,} sets of kept outputs",
        f"{format_bytes(result.memory.workspace_bytes)} to compute in",
    ]
    ring = result.memory.ring_chunks * result.memory.chunk_elements * job.shape.precision.state_bytes
    host = [
        f"{min(counts.host_blocks, layers)} of {layers} blocks, {_many(counts.host_block_gradients, 'gradient')}",
        f"{format_bytes(ring)} of optimizer states on their way",
        result.memory.resident and f"optimizer states of {_many(len(result.memory.resident), 'record')} pinned",
        counts.host_activations and _many(counts.host_activations, "block input"),
        counts.host_kept and f"{counts.host_kept:,} sets of kept outputs",
    ]
    slots = 1 if job.single_slot or result.scheme == "fuyou" else 2
    ssd = [
        f"parameters and optimizer states{'' if slots == 1 else ', two slots'}",
        counts.ssd_activations and "block inputs",
        counts.ssd_kept and "kept outputs",
    ]
    rows = []
    for label, used, there, what in (
        ("device", result.device_peak_bytes, machine.device_bytes, device),
        ("host", result.host_peak_bytes, machine.host_bytes, host),
        ("SSD", result.ssd_bytes, machine.store_bytes, ssd),
    ):
        room = "" if there is None else f" of {format_bytes(there)}"
        rows += _row(label, f"{format_bytes(used) + room:<24}{'; '.join(part for part in what if part)}")
    return rows


def _limits(result: RunPlan) -> list[str]:
    assert result.memory is not None
    job, batch = result.job, result.memory.batch
    how = [_many(batch.micro_batches, "micro-batch", "es") + f" of {batch.micro_rows}"]
    if job.loss.outputs:
        how.append("the head runs twice, for a loss over log-probabilities")
    if job.loss.reference:
        how.append("every sequence also passes without the adapters, in the same visits of the weights")
    if result.clip_by is not None:
        how.append(_clipping(result))
    if 0 < result.deferred_fraction < 1:
        how.append(f"{result.deferred_fraction:.0%} of the blocks updated in the next forward pass")
    if result.kept_activation_bytes:
        how.append(f"{format_bytes(result.kept_activation_bytes)} of activations kept instead of computed again")
    rows = _row("schedule", "; ".join(how))
    traffic = f"{format_bytes(result.read_bytes)} read and {format_bytes(result.written_bytes)} written per step; "
    traffic += f"{format_bytes(result.written_bytes_per_day)} written per day"
    if job.shape.share.nodes > 1:
        traffic = f"{format_bytes(result.sent_bytes)} sent to other nodes, {traffic}"
    if result.drive_days is not None:
        traffic += f": {_days(result.drive_days)} until the drives' warranted writes are used up"
    rows += _row("drives", traffic)
    if result.scheme == "ours":
        rows += _commits(result)
        most = largest_batch(job, result.machine) * job.shape.share.world_size
        tokens = result.gpu_bound_tokens
        rows += _row(
            "batch",
            f"{'at least ' if most >= MOST_ROWS else ''}{most:,} sequences fit{_where_not(most)}; "
            "computing is the bound from "
            f"{tokens:,.0f} tokens per step ({-(-tokens // job.seq_len):,.0f} sequences)",
        )
        changes = [f"{change.what}: {change.speedup:.2g}x" for change in best_changes(result) if change.speedup]
        rows += _row("faster", "; ".join(changes) or "nothing that is simple to change would help by more than 5%")
    if result.machine.assumptions:
        rows += _row("assumed", "; ".join(result.machine.assumptions))
    return rows


def _where_not(most: int) -> str:
    """Return why not even one sequence fits: it is the drives' room, since the plan has found memory for a step."""
    return "" if most else ", as the drives are too small for the model"


def _clipping(result: RunPlan) -> str:
    """Return how gradients are clipped, and what that costs."""
    job, cost = result.job, clipping_cost(result)
    what = "clipping" if job.clipped_share else "leaving out what is not finite"
    if result.clip_by is ClipBy.SPECULATION:
        text = f"{what} by speculation, updates before the gradient's norm is known, done again where it is too large"
        if job.clipped_share:
            text += f" (expected in {job.clipped_share:.0%} of the steps)"
    else:
        text = f"{what} by deferral, all updates in the next forward pass, when the gradient's norm is known"
        if job.speculation_obstacle is not None:
            text += f" (speculation: {job.speculation_obstacle})"
    return text if cost is None else f"{text}: a step {cost:.2f} times as long as with {job.option_without_norm}"


def _commits(result: RunPlan) -> list[str]:
    """Return what rarer commits would save, where it is more than a little."""
    rarer = rarer_commits(result)
    if rarer is None or rarer.written_bytes_per_day * rarer.step_seconds > 0.95 * result.written_bytes * 86400:
        return []
    life = "" if rarer.drive_days is None else f", {_days(rarer.drive_days)} for the drives"
    return _row(
        "commits",
        f"every step; with --commit-every {rarer.every} a step takes {format_seconds(rarer.step_seconds)} and "
        f"{format_bytes(rarer.written_bytes_per_day)} are written per day{life}, but a crash loses up to {rarer.every} "
        "steps",
    )


def _row(label: str, text: str, width: int = _LABEL) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=f"{label:{width}}",
        subsequent_indent=" " * width,
        break_on_hyphens=False,
    )


def _many(count: int, what: str, plural: str = "s") -> str:
    return f"{count:,} {what}{plural if count != 1 else ''}"


def _days(days: float) -> str:
    return f"{days:,.0f} days" if days >= 10 else f"{days:.1f} days"
