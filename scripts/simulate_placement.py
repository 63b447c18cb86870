"""Cached shards on the device: by utilisation as it is after each block's forward (FCDP IV-D), or by the step's peak.

    python scripts/simulate_placement.py --model llama-7b --cluster a40-10gbe --levels 2,4,4 --threshold 0.9

One rank's memory over two steps with the strategy fcdp, block by block, by the planner's figures: states, activations
(all of them, or block inputs where blocks are recomputed), what the head takes, and each block's cached shard, which is
kept or not when its forward is done. Ours is the engine's own rule (``fcdp/cache/placement.py``), at its second step;
the paper's looks at memory in use at that moment. Nothing is run on a device.
"""

from collections.abc import Callable

import click
from reproduce_strategies import table

from common.models.presets import load_config
from common.units import format_bytes
from fcdp.cache.placement import AdaptivePlacement, DeviceMemory, DevicePlacement
from fcdp.planner import Cluster, Workload, load_cluster
from fcdp.planner.memory import memory_of
from fcdp.strategy.mesh import Levels
from fcdp.strategy.names import PRESETS
from fcdp.strategy.strategy import StrategyMeshes


class LivePlacement:
    """The paper's rule: a shard stays if memory in use is below the threshold now."""

    def __init__(self, memory: DeviceMemory, threshold: float):
        self._memory, self._limit = memory, threshold * memory.total
        self.held_bytes = 0

    def admit(self, nbytes: int) -> bool:
        """Return whether a shard of ``nbytes`` may go to the device now."""
        if self._memory.in_use() + nbytes > self._limit:
            return False
        self.held_bytes += nbytes
        return True

    def may_stay(self) -> bool:
        """Return whether memory in use is below the threshold now."""
        return self._memory.in_use() <= self._limit

    def leave(self, nbytes: int) -> None:
        """Count a shard as gone."""
        self.held_bytes -= nbytes

    def end_step(self) -> None:
        """Nothing is remembered."""


def simulate(
    layout: StrategyMeshes,
    workload: Workload,
    cluster: Cluster,
    recompute: bool,
    make: Callable[[DeviceMemory], AdaptivePlacement | LivePlacement],
) -> tuple[int, float]:
    """Run two steps. Return how many shards the second one's backward found on the device, and its peak in bytes."""
    memory = memory_of(layout, workload, checkpointing=recompute)
    shard = int(memory.cached / workload.blocks)
    head = workload.tokens * workload.logits_bytes
    each = (memory.activations - head) / workload.blocks
    kept = AdaptiveUse(memory.states + memory.working)
    rule = make(DeviceMemory(cluster.device_memory_bytes, lambda: int(kept.in_use + rule.held_bytes)))
    on_device: set[int] = set()
    peak, found = 0.0, 0
    for _ in range(2):
        peak = 0.0
        for block in range(workload.blocks):
            kept.in_use += each
            _place(rule, block, shard, on_device)
            peak = max(peak, kept.in_use + rule.held_bytes)
        kept.in_use += head
        peak = max(peak, kept.in_use + rule.held_bytes)
        found = len(on_device)
        for block in reversed(range(workload.blocks)):
            _place(rule, block, shard, on_device)
            kept.in_use -= each + (head if block == workload.blocks - 1 else 0.0)
        rule.end_step()
    return found, peak


class AdaptiveUse:
    """Bytes in use by everything but cached shards."""

    def __init__(self, in_use: float):
        self.in_use = in_use


def _place(rule: DevicePlacement, block: int, shard: int, on_device: set[int]) -> None:
    """Do what a cached shard does at each use: leave if it must, come if it may."""
    if block in on_device and not rule.may_stay():
        on_device.remove(block)
        rule.leave(shard)
    elif block not in on_device and rule.admit(shard):
        on_device.add(block)


@click.command(help=__doc__)
@click.option("--model", default="llama-7b", show_default=True)
@click.option("--cluster", default="a40-10gbe", show_default=True)
@click.option("--levels", default="2,4,4", show_default=True)
@click.option("--seq-len", default=2048, show_default=True, type=int)
@click.option("--threshold", default=0.9, show_default=True, type=float)
def main(model: str, cluster: str, levels: str, seq_len: int, threshold: float) -> None:
    """Print a row for each micro-batch that fits without any shard on the device."""
    hardware = load_cluster(cluster).resized(Levels.parse(levels))
    layout = PRESETS["fcdp"].on(hardware.levels)
    rows = []
    for recompute in (False, True):
        for micro_batch in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48):
            workload = Workload.of_model(load_config(model)[0], seq_len=seq_len, micro_batch=micro_batch)
            alone = memory_of(layout, workload, checkpointing=recompute).device
            if alone > hardware.device_memory_bytes:
                break
            cells = []
            for make in (
                lambda memory: AdaptivePlacement(memory, threshold),
                lambda memory: LivePlacement(memory, threshold),
            ):
                found, peak = simulate(layout, workload, hardware, recompute, make)
                cells += [f"{found} of {workload.blocks}", f"{peak / hardware.device_memory_bytes:.0%}"]
            rows.append(("recomputed" if recompute else "kept", micro_batch, format_bytes(alone), *cells))
    headings = ("activations", "sequences", "without shards", "by the peak", "peak", "live", "peak")
    click.echo(f"{model} on {hardware.title}, {format_bytes(hardware.device_memory_bytes)}, threshold {threshold:g}")
    click.echo(table(headings, rows))


if __name__ == "__main__":
    main()
