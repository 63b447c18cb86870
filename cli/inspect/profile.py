"""Measure this machine with a model, or a cluster with all its ranks, and print a table (``finetune profile``)."""

import math
from collections.abc import Iterator

import torch.distributed as dist

from cli.job.machine import (
    device_name,
    directories_at_hand,
    plan_at_hand,
    sequence_length,
)
from cli.job.strategy import PROFILE, measure_cluster
from cli.options.settings import Settings
from cli.train.meeting import meet
from cli.train.process import RankProcess
from common.communication import all_gather_object
from common.hardware.machine import describe_machine
from common.models.presets import load_config
from common.units import counted, format_bytes, format_count, format_seconds
from fcdp.planner.cluster import MeasuredRates
from fuyou.config import AUTO
from fuyou.engine.common_decisions import dtype_of_all
from fuyou.layout.record import DTYPES
from fuyou.planner.profiling import Profile, save
from fuyou.planner.profiling.cache import describe, profile_path
from fuyou.planner.profiling.measure import measure


def run_profile(settings: Settings) -> None:
    """Measure with the micro-batch of a run with these options, save the profile, and print it."""
    directories = directories_at_hand(settings)
    plan = plan_at_hand(settings, device_name(settings.gpu), directories)
    device = plan.device
    workload = plan.workload
    print(f"machine  {describe_machine()}")
    dtype = next(name for name, dtype in DTYPES.items() if dtype == workload.precision.dtype)
    print(
        f"model    {settings.model}, micro-batches of {workload.rows} x {workload.seq_len} tokens in "
        f"{dtype} on {device.name}",
        flush=True,
    )
    profile = save(measure(workload, device, past_cache=True), workload, device)
    print("\n".join(_table(profile, len(directories))))
    print(
        f"Measured in {profile.measured_in_seconds:.1f} s; kept in {profile_path(describe(workload, device))}"
    )


def _table(profile: Profile, drives: int) -> Iterator[str]:
    """Yield the lines of a profile: what was measured, how much it was, and a remark."""

    def row(what: str, amount: str, remark: str = "") -> str:
        return f"  {what:22}  {amount:>13}  {remark}".rstrip()

    def rate(what: str, bytes_per_second: float, remark: str = "") -> str:
        return row(what, f"{bytes_per_second / 1e9:.3g} GB/s", remark)

    def time(what: str, seconds: float, factor: int = 0, remark: str = "") -> str:
        flops = 2.0 * factor * profile.block_parameters * profile.tokens
        reached = f"{flops / seconds / 1e12:.3g} TFLOP/s{remark}" if factor else ""
        return row(what, f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s", reached)

    shortened = (
        f"; measured on {profile.measured_tokens:,} tokens"
        if profile.measured_tokens < profile.tokens
        else ""
    )
    yield f"\ncomputing, per micro-batch of {profile.tokens:,} tokens{shortened}"
    yield row(
        "matrix products", f"{profile.matmul_flops_per_second / 1e12:.3g} TFLOP/s", "shapes of the block"
    )
    yield time("embedding forward", profile.embed_forward_seconds)
    yield time("block forward", profile.block_forward_seconds, 1)
    yield time("block backward", profile.block_backward_seconds, 4, ", recomputation counted")
    yield time("head forward, backward", profile.head_seconds)
    yield time("embedding backward", profile.embed_backward_seconds)
    yield "\ncopies between host and device, in both directions at once"
    yield rate("to the device", profile.upload_bytes_per_second)
    yield rate("from the device", profile.download_bytes_per_second)
    yield f"\nSSDs, {counted(drives, 'directory', 'directories')}"
    yield rate("read", profile.read_bytes_per_second)
    burst = f"after up to 30 s; {profile.burst_write_bytes_per_second / 1e9:.3g} GB/s at first"
    yield rate("write", profile.write_bytes_per_second, burst)
    yield time("commit", profile.commit_seconds)
    yield f"\noptimizer, {counted(profile.adam_threads, 'thread')}"
    yield row("Adam", f"{format_count(profile.adam_parameters_per_second)}/s", "parameters") + "\n"


def profile_cluster_of_ranks(settings: Settings, rank: RankProcess) -> None:
    """Measure the cluster; every rank calls this."""
    *_, topology = meet(settings, rank)
    dtype = settings.dtype
    if dtype == AUTO:
        dtype = dtype_of_all(None, str(topology.device), all_gather_object)
    config, _ = load_config(settings.model)
    rows = settings.micro_batch or max(1, math.ceil(settings.batch_size / topology.world_size))
    seq_len = sequence_length(settings.seq_len, config)
    path = settings.output_directory / PROFILE

    rank.enter("while the cluster was measured")
    if rank.is_rank0:
        path.parent.mkdir(parents=True, exist_ok=True)
    measured = measure_cluster(config, path, topology, rows, seq_len, dtype)
    if rank.is_rank0:
        print("\n".join(_cluster_table(measured)))
        print(f"Kept in {path}. To plan with it: finetune plan --cluster {path} --model {settings.model}")
    dist.barrier()
    topology.close()
    dist.destroy_process_group()


def _cluster_table(measured: MeasuredRates) -> list[str]:
    sizes = sorted({timing.nbytes for timing in measured.timings})
    rows = [("ranks", "ring", "collective", *(format_bytes(size) for size in sizes))]
    kinds = dict.fromkeys((timing.mesh, timing.ring, timing.operation) for timing in measured.timings)
    seconds = {
        (timing.mesh, timing.ring, timing.operation, timing.nbytes): timing.seconds
        for timing in measured.timings
    }
    for mesh, ring, operation in kinds:
        if operation == "all_reduce" or (ring != "flat" and sum(extent > 1 for extent in mesh) == 1):
            continue  # the sum of the two, and the same again
        times = (format_seconds(seconds[mesh, ring, operation, size]) for size in sizes)
        rows.append(("x".join(map(str, mesh)), ring, operation.replace("_", "-"), *times))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
