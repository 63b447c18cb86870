"""AMSP's sharding of optimizer states by whole tensors (IV-C2, "inter-tensor"), beside ours by parts of each.

    python scripts/bench_inter_tensor.py                                    # balance and plan: pure computing
    python scripts/bench_inter_tensor.py --emulate --nodes 2 --ranks 2      # and its broadcasts, on an emulated cluster

* Balance: the largest rank's share of a greedy split (largest tensor first, to the rank that has least, as in PyTorch's
  ``ZeroRedundancyOptimizer``) over an even share.
* Plan: the step of AMSP's choices on 128 nodes with 8 A800 (2,048 sequences of 2,048 tokens) as they are trained here,
  and with AMSP's all-reduces and broadcasts, each rank's part of which is as large as the largest.
* Emulated (root, see netcluster.py): the same bytes of new parameters gathered with gloo's all-gather, by our levels,
  and by broadcasts that are all under way at once, each of a rank's tensors of a greedy split of a small Llama.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import click
import torch
import torch.distributed as dist
from cluster_workers import lead, llama_config, make_model, report
from netcluster import Cluster
from reproduce_strategies import table

import fcdp
from common.errors import FinetuneError
from common.models.meta_model import build_meta_model
from common.models.presets import load_config
from fcdp.comms.levels import make_levels
from fcdp.planner import Workload, estimate, load_cluster
from fcdp.strategy.mesh import Levels
from fcdp.strategy.names import PRESETS
from fcdp.strategy.routes import axes_between
from fcdp.traffic import Traffic


def greedy(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Whole tensors by rank: the largest first, to the rank that has least."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for size in sorted(sizes, reverse=True):
        min(shares, key=sum).append(size)
    return shares


def imbalance(sizes: Sequence[int], ranks: int) -> float:
    """The largest share over an even one."""
    return max(map(sum, greedy(sizes, ranks))) * ranks / sum(sizes)


def sizes_of(model: str) -> list[int]:
    """Elements of each parameter."""
    return [parameter.numel() for parameter in build_meta_model(load_config(model)[0]).parameters()]


def balance() -> str:
    """The balance of both models over growing numbers of ranks."""
    ranks = (2, 4, 8, 16, 32, 64, 256, 1024)
    rows = []
    for model in ("llama-7b", "llama-13b"):
        sizes = sizes_of(model)
        rows.append((f"{model}, {len(sizes)} tensors", *(f"{imbalance(sizes, count):.3f}" for count in ranks)))
    return table(("largest share over an even one, ranks", *map(str, ranks)), rows)


def planned() -> str:
    """Both ways of AMSP's choices, planned."""
    cluster = load_cluster("a800-hdr").resized(Levels((8, 128)))
    rows = []
    for model, name in (("llama-7b", "amsp-7b"), ("llama-13b", "amsp-13b")):
        workload = Workload.of_model(load_config(model)[0], seq_len=2048, micro_batches=2)
        layout = PRESETS[name].on(cluster.levels)
        skew = imbalance(sizes_of(model), layout.os.over(layout.p).shards)
        for way, whole in (("by parts", False), ("whole tensors", True)):
            found = estimate(layout, workload, cluster, checkpointing=False, select_and_drop=whole)
            spread = next(
                seconds
                for collective, seconds in zip(found.collectives, found.seconds, strict=True)
                if collective.phase == "spread"
            )
            states = found.memory.optimizer * (skew if whole else 1)
            rows.append((
                f"{name}, {way}", f"{found.step_seconds:.3f}", f"{spread * (skew if whole else 1) * 1e3:.0f}",
                f"{states / 1e9:.2f}",
            ))  # fmt: skip
    return table(("choice", "step, s", "spreading new P, ms", "GB of OS"), rows)


class Worker:
    """One rank of the emulated cluster."""

    def __init__(self, hidden: int):
        dist.init_process_group("gloo")
        self.topology = topology = fcdp.Topology.from_environment(device="cpu")
        sizes = [parameter.numel() for parameter in make_model(llama_config(hidden, 4, 2048)).parameters()]
        world = topology.world_size
        self.shares = greedy(sizes, world)
        self.cells = torch.zeros((world, -(-sum(sizes) // world)), dtype=torch.bfloat16)
        axes = axes_between(1, world, topology.levels, "hierarchical")
        self.levels = make_levels(topology, axes, "gather", Traffic(), "hierarchical")[::-1]

    def run(self, rounds: int) -> None:
        """Every way in every round."""
        ways: dict[str, Callable[[], None]] = {
            "gloo's all-gather": lambda: dist.all_gather(list(self.cells), self.cells[self.topology.rank].clone()),
            "by level": self._by_level,
            "broadcasts": self._broadcasts,
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for round_ in range(rounds + 1):
            for way, spread in ways.items():
                dist.barrier()
                start_time = time.perf_counter()
                spread()
                taken = torch.tensor(time.perf_counter() - start_time)
                dist.all_reduce(taken, op=dist.ReduceOp.MAX)
                if round_:  # the first one opens connections
                    seconds[way].append(float(taken))
        report({"seconds": seconds, "mib": self.cells.nbytes / 2**20})
        self.topology.close()
        dist.destroy_process_group()

    def _by_level(self) -> None:
        inner = self.topology.world_size
        for level in self.levels:
            inner //= level.size
            rows = self.cells.view(-1, level.size, inner, self.cells.size(1))
            level.gather(rows[:, :, self.topology.rank % inner])()

    def _broadcasts(self) -> None:
        works: list[Any] = []
        for rank, tensors in enumerate(self.shares):
            works += [dist.broadcast(torch.zeros(size, dtype=torch.bfloat16), rank, async_op=True) for size in tensors]
        for work in works:
            work.wait()


@click.command(help=__doc__)
@click.option("--emulate", is_flag=True)
@click.option("--nodes", default=2, show_default=True, type=int)
@click.option("--ranks", default=2, show_default=True, type=int, help="Per node.")
@click.option("--rate", default="100mbit", show_default=True, help="Of every node's link.")
@click.option("--hidden", default=256, show_default=True, type=int, help="Width of the Llama of four blocks.")
@click.option("--rounds", default=5, show_default=True, type=int)
def main(emulate: bool, nodes: int, ranks: int, rate: str, hidden: int, rounds: int) -> None:
    """The command: the parent, and with RANK in the environment a worker."""
    if "RANK" in os.environ:
        Worker(hidden).run(rounds)
        return
    click.echo(f"{balance()}\n\n{planned()}")
    if not emulate:
        return
    try:
        with Cluster(nodes, rate) as cluster:
            (result,) = lead(cluster, ranks, __file__, sys.argv[1:])
    except FinetuneError as error:
        click.echo(f"bench_inter_tensor: {error}", err=True)
        sys.exit(error.exit_status)
    click.echo(f"\n{result['mib']:.1f} MiB over {nodes} x {ranks} ranks at {rate}, medians and the least:\n")
    cells = [f"{statistics.median(taken):.3f} ({min(taken):.3f})" for taken in result["seconds"].values()]
    click.echo(table(tuple(f"{way}, s" for way in result["seconds"]), [cells]))


if __name__ == "__main__":
    main()
