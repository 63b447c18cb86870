"""Measure the cluster with all ranks, and save it for ``--cluster`` (``finetune --profile --nodes``)."""

import math
import os
from pathlib import Path

import torch.distributed as dist

from cli.job.machine import sequence_length
from cli.job.prepare import quiet_transformers
from cli.job.strategy import PROFILE, measure_cluster
from cli.options.computing_dtype import with_dtype_of_all
from cli.options.settings import Settings
from cli.train.ranks.meeting import device_of, meet
from cli.train.ranks.process import RankProcess
from common.models.presets import load_config
from common.units import format_bytes, format_seconds
from fcdp.planner.collectives import MeasuredRates
from fcdp.strategy.mesh import Levels
from fcdp.strategy.topology import Topology


def profile(settings: Settings, rank: RankProcess) -> None:
    """Measure the cluster; every rank calls this.

    Raises:
        UserError, FinetuneError: if there is no such model, or the ranks do not match.
    """
    if not settings.debug:
        quiet_transformers()
    device = device_of(settings, int(os.environ["LOCAL_RANK"]))
    _, placement = meet(settings, rank, device)
    settings = with_dtype_of_all(settings, str(device), restarted=False)
    levels = None if settings.levels is None else Levels.parse(settings.levels)
    switch = None if placement is None else placement.nodes_per_switch
    topology = Topology.from_environment(device=device, levels=levels, nodes_per_switch=switch)
    config, _ = load_config(settings.model)
    rows = settings.micro_batch or max(1, math.ceil(settings.batch_size / topology.world_size))
    seq_len = sequence_length(settings.seq_len, config)
    path = settings.output_directory / PROFILE

    rank.enter("while the cluster was measured")
    if rank.is_rank0:
        path.parent.mkdir(parents=True, exist_ok=True)
    measured = measure_cluster(settings, topology, rows, seq_len)
    if rank.is_rank0:
        print("\n".join(table(measured)))
        print(f"Kept in {path}. To plan with it: finetune --plan --cluster {_shortest(path)} --model {settings.model}")
    dist.barrier()
    topology.close()
    dist.destroy_process_group()


def table(measured: MeasuredRates) -> list[str]:
    """Return a table of seconds per collective and size."""
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
    """Return the path as one would type it."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
