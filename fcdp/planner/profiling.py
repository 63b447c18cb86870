"""Profiling a cluster: the planner's numbers, measured on the process groups and devices that will train.

All ranks measure together, so that links and memory are as busy as in training (AMSP IV-A), with the engine's levels,
rings and buffers, in bf16."""

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from common.hardware.machine import memory_limit_bytes
from common.models.flops import hardware_flops_per_token
from fcdp.comms.levels import make_levels
from fcdp.comms.rank_level import CommLevel
from fcdp.comms.reduce_scatter import scatter
from fcdp.planner.cluster import CollectiveTiming, MeasuredRates
from fcdp.planner.cost import OPTIMIZER_BYTES
from fcdp.planner.search import scopes_of
from fcdp.strategy.mesh import Mesh
from fcdp.strategy.strategy import Ring, axes_between
from fcdp.strategy.topology import Topology
from fcdp.traffic import Traffic
from fuyou.layout.record import Precision
from fuyou.planner.profiling.blocks import BlockBench, streamed_layout
from fuyou.planner.profiling.measure import measure_link
from fuyou.runtime.device import open_device

SIZES = (16 << 10, 256 << 10, 4 << 20, 32 << 20)  # bytes; on CUDA also four times the largest
MOST_SECONDS = 2.0  # larger buffers than one that takes this long have its bandwidth
REPEAT_SECONDS = 0.3
MOST_REPETITIONS = 7
RINGS: tuple[Ring, ...] = ("flat", "hierarchical", "ho")

_OPTIMIZER_ELEMENTS = 4 << 20
_COPIED_BYTES = 64 << 20


def profile_cluster(
    topology: Topology,
    config: PreTrainedConfig,
    path: Path,
    *,
    rows: int,
    seq_len: int,
    dtype: str = "bf16",
    say: Callable[[str], None] = lambda line: None,
) -> MeasuredRates:
    """Measure the cluster, and have rank 0 write what ``finetune --cluster`` reads to ``path``. Collective.

    A micro-batch has ``rows`` of ``seq_len``. ``say`` is called with what is measured next."""
    device = topology.device
    say("computing")
    computing = measure_computing(topology, config, rows, seq_len, dtype)
    measured = MeasuredRates(measure_collectives(topology, say=say))
    if topology.rank == 0:
        host = memory_limit_bytes()
        on_device = host // topology.ranks_per_node
        if device.type == "cuda":
            on_device = torch.cuda.get_device_properties(device).total_memory
        measured.save(
            path,
            title=f"Measured on {topology.nodes} nodes of {topology.ranks_per_node}, {rows} x {seq_len} tokens at once",
            levels=list(topology.levels.sizes),
            device_memory_bytes=on_device,
            host_memory_bytes=host,
            overlaps=device.type == "cuda",
            **computing,
        )
    dist.barrier()
    return measured


def measure_computing(
    topology: Topology, config: PreTrainedConfig, rows: int, seq_len: int, dtype: str
) -> dict[str, float]:
    """Measure how fast devices compute, update and copy, all at once; the slowest one counts.

    Return fields of :class:`fcdp.planner.cluster.Cluster`; AdamW's bytes are those that the planner counts for it."""
    device = open_device(topology.device)
    stack, layout = streamed_layout(config, Precision.named(dtype), topology.device)
    dist.barrier()
    parts = BlockBench(stack, layout, device, rows, seq_len, seq_len).measure()
    blocks = len(layout.blocks) * (parts["block_forward_seconds"] + parts["block_backward_seconds"])
    others = ("embed_forward_seconds", "embed_backward_seconds", "head_seconds")
    seconds = blocks + sum(parts[name] for name in others)
    flops = rows * seq_len * hardware_flops_per_token(stack.model, seq_len)
    parameter: Any = torch.nn.Parameter(torch.zeros(_OPTIMIZER_ELEMENTS, device=topology.device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    update = min([_time_on_all_ranks(topology, optimizer.step) for _ in range(4)][1:])
    dist.barrier()
    copies = measure_link(device, _COPIED_BYTES)
    slowest = torch.tensor(
        [seconds / flops, update, 1 / min(copies.upload, copies.download)],
        dtype=torch.float64,
        device=topology.device,
    )
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    per_flop, update, per_byte = slowest.tolist()
    return {
        # Forward and backward with recomputation, head and embedding included
        "flops_per_second": 1 / per_flop,
        "memory_bytes_per_second": OPTIMIZER_BYTES * _OPTIMIZER_ELEMENTS / update,
        "host_link_bytes_per_second": 1 / per_byte,  # in the slower direction
    }


def measure_collectives(
    topology: Topology, sizes: Sequence[int] | None = None, say: Callable[[str], None] = lambda line: None
) -> list[CollectiveTiming]:
    """Measure collectives of all scopes, rings and sizes here; an all-reduce as reduce-scatter and all-gather."""
    if sizes is None:
        sizes = (*SIZES, 4 * SIZES[-1]) if topology.device.type == "cuda" else SIZES
    scopes = [scope.on(topology.levels) for scope in scopes_of(topology.levels)]
    # Every mesh between two scopes, with the sizes of blocks at its ends
    blocks: dict[Mesh, tuple[int, int]] = {}
    for inner, outer in itertools.permutations(scopes, 2):
        if outer.holds(inner):
            blocks.setdefault(outer.over(inner), (inner.shards, outer.shards))
    timings = []
    for mesh, (low, high) in blocks.items():
        levels_used = sum(extent > 1 for extent in mesh.extents)
        say(f"collectives over {'x'.join(map(str, mesh.extents))} ranks")
        # Along one level, all rings are the same.
        for rings in [RINGS] if levels_used == 1 else [(ring,) for ring in RINGS]:
            group = _Group(topology, low, high, rings[0])
            slowest = 0.0  # seconds per byte of the size before, the same on all ranks
            for nbytes in sorted(sizes):
                if slowest * nbytes > MOST_SECONDS:
                    break
                gather, reduce = group.seconds(nbytes)
                slowest = max(gather, reduce) / nbytes
                for ring in rings:
                    timings += [
                        CollectiveTiming("all_gather", ring, mesh.extents, nbytes, gather),
                        CollectiveTiming("reduce_scatter", ring, mesh.extents, nbytes, reduce),
                        CollectiveTiming("all_reduce", ring, mesh.extents, nbytes, gather + reduce),
                    ]
    return timings


class _Group:
    """The ranks between blocks of ``low`` and of ``high`` ranks, with one ring."""

    def __init__(self, topology: Topology, low: int, high: int, ring: Ring):
        axes = axes_between(low, high, topology.levels, ring)
        self._topology = topology
        self._low = low
        self._ranks = high // low
        self._index = topology.rank // low % self._ranks
        self._gather: list[CommLevel] = make_levels(topology, axes, "gather", Traffic(), ring)[::-1]
        self._reduce: list[CommLevel] = make_levels(topology, axes, "reduce", Traffic(), ring)

    def seconds(self, nbytes: int) -> tuple[float, float]:
        """Return the seconds of an all-gather whose result has ``nbytes``, and of a reduce-scatter of as many."""
        count = max(1, nbytes // (2 * self._ranks))
        cells = torch.ones((self._ranks, count), dtype=torch.bfloat16, device=self._topology.device)

        def gather() -> None:
            for level in self._gather:
                stride = level.axis.stride // self._low
                level.gather(cells.view(-1, level.size, stride, cells.size(1))[:, :, self._index % stride])()

        return self._median(gather), self._median(lambda: scatter(cells, self._reduce, True))

    def _median(self, work: Callable[[], object]) -> float:
        once = _time_on_all_ranks(self._topology, work)  # makes connections
        again = min(MOST_REPETITIONS, int(REPEAT_SECONDS / once) + 1)
        return sorted(_time_on_all_ranks(self._topology, work) for _ in range(again))[again // 2]


def _time_on_all_ranks(topology: Topology, work: Callable[[], object]) -> float:
    """Return the seconds from when all ranks begin ``work`` to when the last one has ended, equal on all ranks."""
    synchronize = torch.cuda.synchronize if topology.device.type == "cuda" else lambda: None
    synchronize()
    dist.barrier()
    start_time = time.perf_counter()
    work()
    synchronize()
    taken = torch.tensor(time.perf_counter() - start_time, dtype=torch.float64, device=topology.device)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)
