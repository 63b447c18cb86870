"""Describe a plan as text and as a page: what is trained where, how fast, and what bounds it."""

import math
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from cli.report.drawing import busy_bars, memory_bars, page, section, table
from cli.report.results import RESOURCES
from common.files import replace_file
from common.store.errors import described
from common.units import counted, format_bytes, format_count, format_seconds
from fuyou.optimizer.clipping import ClipBy
from fuyou.planner import Plan, TrainingJob
from fuyou.planner.plan import Point, what_relaxes
from fuyou.schedule.tasks import Resource

WIDTH = 80
_BAR = 24
_LABEL = 10


def describe(result: Plan) -> list[str]:
    """Return the plan as lines of at most :data:`WIDTH` columns."""
    job = result.job
    machine = result.machine
    share = result.job.layout.share
    several = f"{machine.drive_count} x " if machine.drive_count > 1 else ""
    adapters = sum(record.trained_count for record in job.layout.adapters)
    trained = f", {format_count(adapters)} of them in adapters" if adapters else ""
    among = f"{share.nodes} nodes of " if share.nodes > 1 else ""
    among += f"{share.ranks_per_node} x " if share.ranks_per_node > 1 else ""
    lines = [
        *textwrap.wrap(f"{job.name} on {among}{machine.device} with {several}{machine.drives}", WIDTH),
        f"{format_count(job.parameters)} parameters{trained}; "
        f"a step of {job.rows * share.world_size:,} x {job.seq_len:,} tokens"
        + (f"; below is one of {share.world_size} ranks" if share.world_size > 1 else ""),
        "",
    ]
    if result.memory is None:
        return lines + row("does not fit", " ".join(result.missing), 14)
    lines += [*_speed(result), "", *_bars(result), "", *_places(result), "", *_limits(result)]
    return lines


def _speed(result: Plan) -> list[str]:
    rows = []
    if not result.fits:
        rows += row("does not fit", " ".join(result.missing), 14)
    rows += row(
        "step",
        f"{format_seconds(result.step_seconds)}: {format_count(result.tokens_per_second)} tokens/s, "
        f"{result.flops_per_second / 1e12:.3g} TFLOP/s "
        f"({result.hardware_flops_per_second / 1e12:.3g} with recomputation)",
    )
    bound = result.busy[result.bound]
    return rows + row(
        "bound",
        f"{RESOURCES[result.bound.value]}, {format_seconds(bound)} ({bound / result.step_seconds:.0%} of the step); "
        f"relaxed by {', '.join(what_relaxes(result))}",
    )


def _bars(result: Plan) -> list[str]:
    rows = []
    label = "busy"
    for resource in (resource for resource in Resource if resource in result.busy):
        share = min(1.0, result.busy[resource] / result.step_seconds)
        filled = round(share * _BAR)
        rows.append(
            f"{label:{_LABEL}}{RESOURCES[resource.value]:<24}{'█' * filled}{'░' * (_BAR - filled)} {share:>5.0%}"
            f"{format_seconds(result.busy[resource]):>14}"
        )
        label = ""
    return rows


def _places(result: Plan) -> list[str]:
    assert result.memory is not None
    counts = result.memory.counts
    job = result.job
    machine = result.machine
    layers = len(job.layout.blocks)
    saved = "sets of saved outputs" if result.memory.batch.chunks == 1 else "rows of keys and values"
    device = [
        f"{counted(counts.device_blocks, 'block')}, {counted(counts.device_block_gradients, 'gradient')}",
        counted(counts.device_activations, "block input"),
        counts.device_saved and f"{counts.device_saved:,} {saved}",
        f"{format_bytes(result.memory.workspace_bytes)} to compute in",
    ]
    ring = result.memory.ring_chunks * job.layout.precision.state_nbytes(result.memory.chunk_elements)
    host = [
        f"{min(counts.host_blocks, layers)} of {layers} blocks, {counted(counts.host_block_gradients, 'gradient')}",
        f"{format_bytes(ring)} of optimizer states on their way",
        result.memory.resident
        and f"optimizer states of {counted(len(result.memory.resident), 'record')} pinned",
        counts.host_activations and counted(counts.host_activations, "block input"),
        counts.host_saved and f"{counts.host_saved:,} {saved}",
    ]
    ssd = [
        "parameters and optimizer states, two slots",
        counts.ssd_activations and "block inputs",
        counts.ssd_saved and ("saved outputs" if result.memory.batch.chunks == 1 else "keys and values"),
    ]
    rows = []
    for label, used, there, what in (
        ("device", result.device_peak_bytes, machine.device_bytes, device),
        ("host", result.host_peak_bytes, machine.host_bytes, host),
        ("SSD", result.ssd_bytes, machine.store_bytes, ssd),
    ):
        room = "" if there is None else f" of {format_bytes(there)}"
        rows += row(label, f"{format_bytes(used) + room:<24}{'; '.join(part for part in what if part)}")
    return rows


def _pieces(job: TrainingJob) -> list[str]:
    layout = job.layout
    if layout.piece_bytes is None:
        return []
    texts = [
        f"blocks in pieces of at most {format_bytes(layout.piece_bytes)} in the compute dtype, "
        f"{max(map(len, layout.blocks))} in the largest"
    ]
    if layout.widened:
        texts.append(
            f"{format_count(layout.widened)} weights of the compressed checkpoint in the compute dtype on SSD, as "
            "pieces would cut their tensors"
        )
    return texts


def _limits(result: Plan) -> list[str]:
    assert result.memory is not None
    job = result.job
    batch = result.memory.batch
    of = f"{batch.columns:,} tokens of a row" if batch.chunks > 1 else batch.micro_rows
    how = [counted(batch.micro_batches, "micro-batch", "micro-batches") + f" of {of}"]
    how += _pieces(job)
    if job.loss.outputs:
        how.append("the head runs twice, for a loss over log-probabilities")
    if result.clip_by is not None:
        how.append(_clipping(result))
    if 0 < result.deferred_fraction < 1:
        how.append(f"{result.deferred_fraction:.0%} of the blocks updated in the next forward pass")
    if result.saved_activation_bytes and batch.chunks > 1:
        how.append(f"{format_bytes(result.saved_activation_bytes)} of keys and values saved")
    elif result.saved_activation_bytes:
        how.append(
            f"{format_bytes(result.saved_activation_bytes)} of activations saved instead of computed again"
        )
    rows = row("schedule", "; ".join(how))
    traffic = (
        f"{format_bytes(result.read_bytes)} read and {format_bytes(result.written_bytes)} written per step; "
    )
    traffic += f"{format_bytes(result.written_bytes_per_day)} written per day"
    start = f"{format_bytes(result.start_bytes)} written before the first step"
    start += f", in {format_seconds(result.start_seconds)}"
    rows += row("start", start)
    if job.layout.share.nodes > 1:
        traffic = f"{format_bytes(result.sent_bytes)} sent to other nodes, {traffic}"
    if result.drive_days is not None:
        traffic += f": {format_days(result.drive_days)} days until the drives' warranted writes are used up"
        if result.drive_days < (job.drive_life or 0):
            traffic += f"; no plan reaches --drive-life {job.drive_life:,.0f}, and this one wears least"
    rows += row("drives", traffic)
    chosen = next((number for number, point in enumerate(result.frontier) if point.chosen), None)
    if chosen is not None:
        for label, number in (("faster", chosen - 1), ("less worn", chosen + 1)):
            if 0 <= number < len(result.frontier):
                rows += row(label, _neighbor(result, result.frontier[number]))
    tokens = result.gpu_bound_tokens
    sequences = counted(math.ceil(tokens / job.seq_len), "sequence")
    rows += row("batch", f"computing is the bound from {tokens:,.0f} tokens per step ({sequences})")
    if result.assumptions:
        rows += row("assumed", "; ".join(result.assumptions))
    return rows


def format_days(days: float) -> str:
    return f"{days:,.0f}" if days >= 10 else f"{days:.1f}"


def _neighbor(result: Plan, point: Point) -> str:
    text = (
        f"{format_seconds(point.step_seconds)} per step, {format_count(result.job.tokens / point.step_seconds)} "
        f"tokens/s, {format_bytes(point.written_bytes)} written"
    )
    if result.machine.endurance_bytes is None:
        return text
    days = result.machine.drive_days(point.written_bytes, point.step_seconds)
    return f"{text}: --drive-life {days:,.0f}"


def _clipping(result: Plan) -> str:
    job = result.job
    if result.clip_by is ClipBy.SPECULATION:
        text = (
            "clipping by speculation: updates run before the gradient's norm is known, and again if it is too large "
            f"(expected in {job.clipped_share:.0%} of the steps)"
        )
    else:
        text = "clipping by deferral: all updates run in the next forward pass, when the gradient's norm is known"
        if job.speculation_obstacle is not None:
            text += f" (speculation: {job.speculation_obstacle})"
    return text


def row(label: str, text: str, width: int = _LABEL) -> list[str]:
    """Return a labelled text as lines of at most :data:`WIDTH` columns; ``width`` is the label's."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=f"{label:{width}}", subsequent_indent=" " * width, break_on_hyphens=False
    )


def write_plan_page(result: Plan, lines: Sequence[str], path: Path) -> None:
    """Write the page of a plan, whose text is ``lines``."""
    with described("writing", path):
        replace_file(path, plan_page(result, lines))


def plan_page(result: Plan, lines: Sequence[str]) -> str:
    """Return the page of a plan; if it does not fit, with what is missing."""
    sections = []
    if result.memory is not None:
        busy = {RESOURCES[resource.value]: seconds for resource, seconds in result.busy.items()}
        step = f"a step: {format_seconds(result.step_seconds)}"
        sections.append(section(step, busy_bars(busy, result.step_seconds)))
        machine = result.machine
        tiers = [
            ("device", result.device_peak_bytes, machine.device_bytes),
            ("host", result.host_peak_bytes, machine.host_bytes),
            ("SSD", result.ssd_bytes, machine.store_bytes),
        ]
        sections.append(section("memory", memory_bars(tiers)))
    sections.append(section("the plan", table(_labelled(lines)), wide=True))
    head = lines[: lines.index("")]
    title = f"plan: {result.job.name}"
    return page(title, title, "; ".join([" ".join(head[:-1]), head[-1]]), sections)


def _labelled(lines: Sequence[str]) -> list[tuple[str, str]]:
    """Return what each label of a plan's text says, without the bars."""
    rows: list[tuple[str, str]] = []
    for line in (line for line in lines[lines.index("") + 1 :] if "░" not in line and "█" not in line):
        width = 14 if line.startswith("does not fit") else _LABEL
        if label := line[:width].strip():
            rows.append((label, re.sub(" {2,}", ": ", line[width:].strip())))
        elif line:
            rows[-1] = (rows[-1][0], f"{rows[-1][1]} {line.strip()}")
    return rows
