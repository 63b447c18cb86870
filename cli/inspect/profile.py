"""Measure this machine with a model, or a cluster with all its ranks, and print a table (``finetune profile``)."""

import math
import os
from pathlib import Path

import torch.distributed as dist

from cli.job.machine import (
    device_at_hand,
    directories_at_hand,
    sequence_length,
    training_of,
    with_dtype,
    with_dtype_of_all,
)
from cli.job.strategy import PROFILE, measure_cluster
from cli.options.settings import Settings
from cli.train.ranks.meeting import meet
from cli.train.ranks.process import RankProcess
from common.hardware.machine import describe_machine
from common.models.presets import load_config
from common.units import format_bytes, format_count, format_seconds
from fcdp.planner.collectives import MeasuredRates
from fuyou.planner import PlannerContext
from fuyou.planner.profiling import Profile, save
from fuyou.planner.profiling.cache import describe, profile_path
from fuyou.planner.profiling.measure import measure
from fuyou.runtime.device import memory_limits

Row = tuple[str, str, str]  # Row of the table: what was measured, how much it was, and a remark


def run_profile(settings: Settings) -> None:
    """Measure with the micro-batch of a run with these options, save the profile, and print it."""
    device = device_at_hand(settings.gpu)
    settings = with_dtype(settings)
    directories = directories_at_hand(settings)
    limits = memory_limits(device, settings.host_memory, settings.device_memory)
    context = PlannerContext(training_of(settings), device, limits, directories)
    workload = context.workload
    print(f"machine  {describe_machine()}")
    print(
        f"model    {settings.model}, micro-batches of {workload.rows} x {workload.seq_len} tokens in {settings.dtype} "
        f"on {device.name}",
        flush=True,
    )
    profile = save(measure(workload, device, past_cache=True), workload, device)
    print("\n".join(table(profile, len(directories))))
    print(f"Measured in {profile.measured_in_seconds:.1f} s; kept in {profile_path(describe(workload, device))}")


def table(profile: Profile, drives: int) -> list[str]:
    per_token = 2.0 * profile.block_parameters * profile.tokens
    reached = [
        f"{factor * per_token / seconds / 1e12:.3g} TFLOP/s"
        for factor, seconds in ((1, profile.block_forward_seconds), (4, profile.block_backward_seconds))
    ]
    shortened = f"; measured on {profile.measured_tokens:,} tokens" if profile.measured_tokens < profile.tokens else ""
    threads = f"{profile.adam_threads} thread{'s' if profile.adam_threads > 1 else ''}"
    sections: dict[str, list[Row]] = {
        f"computing, per micro-batch of {profile.tokens:,} tokens{shortened}": [
            ("matrix products", f"{profile.matmul_flops_per_second / 1e12:.3g} TFLOP/s", "shapes of the block"),
            ("embedding forward", _time(profile.embed_forward_seconds), ""),
            ("block forward", _time(profile.block_forward_seconds), reached[0]),
            ("block backward", _time(profile.block_backward_seconds), f"{reached[1]}, recomputation counted"),
            ("head forward, backward", _time(profile.head_seconds), ""),
            ("embedding backward", _time(profile.embed_backward_seconds), ""),
        ],
        "copies between host and device": [
            ("to the device", _rate(profile.upload_bytes_per_second), "both directions busy"),
            ("from the device", _rate(profile.download_bytes_per_second), "both directions busy"),
        ],
        f"SSDs, {drives} director{'y' if drives == 1 else 'ies'}": [
            ("read", _rate(profile.read_bytes_per_second), ""),
            (
                "write",
                _rate(profile.write_bytes_per_second),
                f"after up to 30 s; {_rate(profile.burst_write_bytes_per_second)} at first",
            ),
            ("commit", _time(profile.commit_seconds), ""),
        ],
        f"optimizer, {threads}": [("Adam", f"{format_count(profile.adam_parameters_per_second)}/s", "parameters")],
    }
    rows = [row for section in sections.values() for row in section]
    wide, wider = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)
    lines = []
    for heading, section in sections.items():
        if section:
            lines += ["", heading]
            lines += [f"  {what:{wide}}  {amount:>{wider}}  {remark}".rstrip() for what, amount, remark in section]
    return [*lines, ""]


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.3g} GB/s"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def profile_cluster_of_ranks(settings: Settings, rank: RankProcess) -> None:
    """Measure the cluster; every rank calls this."""
    *_, topology = meet(settings, rank)
    settings = with_dtype_of_all(settings, str(topology.device), restarted=False)
    config, _ = load_config(settings.model)
    rows = settings.micro_batch or max(1, math.ceil(settings.batch_size / topology.world_size))
    seq_len = sequence_length(settings.seq_len, config)
    path = settings.output_directory / PROFILE

    rank.enter("while the cluster was measured")
    if rank.is_rank0:
        path.parent.mkdir(parents=True, exist_ok=True)
    measured = measure_cluster(settings, topology, rows, seq_len)
    if rank.is_rank0:
        print("\n".join(_cluster_table(measured)))
        print(f"Kept in {path}. To plan with it: finetune plan --cluster {_shortest(path)} --model {settings.model}")
    dist.barrier()
    topology.close()
    dist.destroy_process_group()


def _cluster_table(measured: MeasuredRates) -> list[str]:
    sizes = sorted({timing.nbytes for timing in measured.timings})
    rows = [("ranks", "ring", "collective", *(format_bytes(size) for size in sizes))]
    kinds = dict.fromkeys((timing.mesh, timing.ring, timing.operation) for timing in measured.timings)
    seconds = {
        (timing.mesh, timing.ring, timing.operation, timing.nbytes): timing.seconds for timing in measured.timings
    }
    for mesh, ring, operation in kinds:
        if operation == "all_reduce" or (ring != "flat" and sum(extent > 1 for extent in mesh) == 1):
            continue  # the sum of the two, and the same again
        times = (format_seconds(seconds[mesh, ring, operation, size]) for size in sizes)
        rows.append(("x".join(map(str, mesh)), ring, operation.replace("_", "-"), *times))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _shortest(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
