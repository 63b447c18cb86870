"""All-gathers of one size on an emulated cluster: the flat ring, the hierarchical ring, and HO-Ring (PaRO 3.4, 4.4).

    python scripts/bench_ho_ring.py --nodes 3 --ranks 3 --mib 64 --rate 250mbit --inside 4,8,16

Links between nodes carry `--rate` each way. Of each node's ranks, every one can send the others of its node
`--inside` times its share of that rate: loopback devices are paced, too. In one run, one after the other in every
round, the same bytes are gathered by

* gloo: its own all-gather over all ranks;
* flat: one ring through all ranks, written with the same point-to-point messages as the others;
* hierarchical: a ring across nodes, then one inside;
* ho: both at once (`fcdp.comms.ho_ring.HoRing`).

With `--reduce` the same bytes are reduced and scattered instead: hierarchical and ho as the engine does it; "ho at
once", which sends a node's sum of a block straight to the node that it is for as soon as it is there, whatever else is
under way; and "ho ring": the sum goes from node to node, each of which adds its own, as PaRO's ring would.

Every result is checked. Times are medians over rounds of the slowest rank's. Needs root (see netcluster.py).
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import click
import torch
import torch.distributed as dist
from cluster_workers import lead, report, set_rate
from netcluster import Cluster, rate_bits

import fcdp
from common.errors import FinetuneError
from fcdp.comms.ho_ring import HoRing
from fcdp.comms.rank_level import RankLevel
from fcdp.strategy.routes import Axis
from fcdp.traffic import Traffic

PAPER = {"flat": 288, "hierarchical": 183, "ho": 162}
"""Milliseconds for 1 GB on 16 DGX nodes (PaRO 4.4)."""


class Worker:
    """One rank: gathers what the parent asks for, and has it change the rate in between."""

    def __init__(self, mib: float, reduce: bool):
        dist.init_process_group("gloo")
        self.topology = topology = fcdp.Topology.from_environment(device="cpu")
        traffic = Traffic()
        ranks = topology.ranks_per_node
        self.intra_node = RankLevel(topology, Axis(1, ranks), "gather", traffic)
        self.inter_node = RankLevel(topology, Axis(ranks, topology.nodes), "gather", traffic)
        self.ho = HoRing(self.intra_node, self.inter_node)
        self.traffic, self.reduces = traffic, reduce
        cell = int(mib * 2**20 / 4 / topology.world_size)
        self.right = torch.arange(topology.world_size * cell, dtype=torch.float32).view(
            topology.nodes, topology.ranks_per_node, cell
        )

    def run(self, rounds: int, intra_node: list[str]) -> None:
        """All kinds at all rates."""
        topology = self.topology
        kinds: dict[str, Callable[..., None]] = {
            "gloo": self._gloo,
            "flat": self._flat,
            "hierarchical": self._hierarchical,
            "ho": lambda cells: self.ho.gather(cells.view(1, topology.world_size, -1))(),
        }
        if self.reduces:
            kinds = {
                "hierarchical": self._reduce_by_level,
                "ho": self.ho.reduce_scatter,
                "ho at once": self._reduce_at_once,
                "ho ring": self._reduce_in_a_ring,
            }
        for rate in intra_node:
            set_rate(rate)
            seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
            for round_ in range(rounds + 1):
                for kind, collective in kinds.items():
                    taken = self._time_reduction(kind, collective) if self.reduces else self._time(collective)
                    if round_:  # the first one opens connections
                        seconds[kind].append(taken)
            report({"intra_node": rate, "seconds": seconds})
        self.topology.close()
        dist.destroy_process_group()

    def _time(self, gather: Callable[[torch.Tensor], None]) -> float:
        cells = torch.zeros_like(self.right)
        self._own(cells).copy_(self._own(self.right))
        dist.barrier()
        started = time.perf_counter()
        gather(cells)
        taken = torch.tensor(time.perf_counter() - started)
        if not torch.equal(cells, self.right):
            raise FinetuneError(f"Rank {self.topology.rank} has not gathered what it should have.")
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        return float(taken)

    def _time_reduction(self, kind: str, reduce: Callable[..., None]) -> float:
        """The seconds of one reduction; its result and the bytes that it has sent are checked."""
        world, rank = self.topology.world_size, self.topology.rank
        rows = (self.right * (rank + 1)).view(1, world, -1)
        output = torch.empty((1, rows.size(2)))
        before = self.traffic.inter_node
        dist.barrier()
        started = time.perf_counter()
        reduce(rows, output)
        taken = torch.tensor(time.perf_counter() - started)
        sent = torch.tensor(self.traffic.inter_node - before)
        torch.testing.assert_close(output[0], self.right.view(world, -1)[rank] * (world * (world + 1) / 2))
        dist.all_reduce(sent)
        nodes = self.topology.nodes
        formula = (nodes - 1) * rows.numel() * rows.element_size()  # of all nodes: (n-1)/n of the buffer each
        if int(sent) != formula:
            raise FinetuneError(f"{kind} has sent {int(sent):,} bytes, not {formula:,}.")
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        return float(taken)

    def _reduce_by_level(self, rows: torch.Tensor, output: torch.Tensor) -> None:
        cells = rows.view(self.topology.nodes, self.topology.ranks_per_node, -1)
        mine = torch.empty((self.topology.nodes, rows.size(2)))
        self.intra_node.reduce_scatter(cells, mine)
        self.inter_node.reduce_scatter(mine[None], output)

    def _reduce_at_once(self, rows: torch.Tensor, output: torch.Tensor) -> None:
        """What `HoRing` does, but without waiting for a block before the next one is sent."""
        nodes, node = self.inter_node.size, self.inter_node.index
        blocks = rows.unflatten(1, (nodes, -1))
        mine, sums = torch.empty((2, nodes, *output.shape))
        arriving = []
        for step in range(1, nodes + 1):
            block, source = (node + step) % nodes, (node - step) % nodes
            self.intra_node.reduce_scatter(blocks[:, block], mine[block])
            if block != node:
                arriving.append(self.inter_node.shift(mine[block], block, sums[source], source))
        for wait in arriving:
            wait()
        sums[node] = mine[node]
        output.copy_(sum(sums[1:], start=sums[0]))

    def _reduce_in_a_ring(self, rows: torch.Tensor, output: torch.Tensor) -> None:
        """A block's sum begins at the node after its own and ends there; a block is summed inside while the one before
        it is on its way."""
        nodes, node = self.inter_node.size, self.inter_node.index
        blocks = rows.unflatten(1, (nodes, -1))
        after, before = (node + 1) % nodes, (node - 1) % nodes
        carried, arrived = torch.empty_like(output), torch.empty_like(output)
        self.intra_node.reduce_scatter(blocks[:, before], carried)
        for step in range(1, nodes):
            wait = self.inter_node.shift(carried, after, arrived, before)
            mine = torch.empty_like(output)
            self.intra_node.reduce_scatter(blocks[:, (node - 1 - step) % nodes], mine)
            wait()
            carried = arrived + mine
        output.copy_(carried)

    def _own(self, cells: torch.Tensor) -> torch.Tensor:
        return cells[self.topology.node, self.topology.local_rank]

    def _gloo(self, cells: torch.Tensor) -> None:
        dist.all_gather(list(cells.view(self.topology.world_size, -1)), self._own(cells).clone())

    def _flat(self, cells: torch.Tensor) -> None:
        _ring(cells.view(self.topology.world_size, -1), self.topology.rank, None)

    def _hierarchical(self, cells: torch.Tensor) -> None:
        levels = (self.inter_node, self.intra_node)
        inter_node, intra_node = (self.topology.group(level.axis, "gather") for level in levels)
        _ring(cells[:, self.intra_node.index], self.inter_node.index, inter_node)
        for block in cells:
            _ring(block, self.intra_node.index, intra_node)


def _ring(cells: torch.Tensor, index: int, group: dist.ProcessGroup | None) -> None:
    """Every rank hands on to the next one what it got last, its own cell first."""
    size = cells.size(0)
    if size == 1:
        return
    for step in range(size - 1):
        mine, coming = (index - step) % size, (index - step - 1) % size
        receiving = dist.irecv(cells[coming], group=group, group_src=(index - 1) % size)
        sending = dist.isend(cells[mine], group=group, group_dst=(index + 1) % size)
        assert receiving is not None and sending is not None
        receiving.wait()
        sending.wait()


def measure(cluster: Cluster, ranks: int, rate: str, arguments: list[str]) -> list[dict[str, Any]]:
    """Run the workers and collect what they report.

    Raises:
        FinetuneError: a worker failed.
    """

    def pace(multiple: str) -> None:
        """A rank's share of its node's link, times its multiple, for all ranks of the node."""
        bits = (rate_bits(rate) or 0.0) * float(multiple)
        cluster.set_intra_node_rate(f"{bits / 1e6:.3f}mbit")

    return list(lead(cluster, ranks, __file__, arguments, pace))


def reductions(results: list[dict[str, Any]]) -> str:
    """The results of reductions as Markdown."""
    kinds = list(results[0]["seconds"])
    lines = [f"| inside | {' | '.join(f'{kind}, s' for kind in kinds)} |", "|---" * (len(kinds) + 1) + "|"]
    for result in results:
        cells = (f"{statistics.median(taken):.3f} ({min(taken):.3f})" for taken in result["seconds"].values())
        lines.append(f"| {result['intra_node']} | {' | '.join(cells)} |")
    return "\n".join(["Medians, and the least:", "", *lines])


def table(results: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    lines = [
        "| inside, times the rate between nodes | gloo, s | flat ring, s | hierarchical, s | HO-Ring, s "
        "| HO-Ring less than flat | less than hierarchical |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        median = {kind: statistics.median(seconds) for kind, seconds in result["seconds"].items()}
        times = " | ".join(f"{seconds:.3f}" for seconds in median.values())
        saved = " | ".join(f"{1 - median['ho'] / median[kind]:.1%}" for kind in ("flat", "hierarchical"))
        lines.append(f"| {result['intra_node']} | {times} | {saved} |")
    saved = " | ".join(f"{1 - PAPER['ho'] / PAPER[kind]:.1%}" for kind in ("flat", "hierarchical"))
    times = " | ".join(f"{PAPER[kind] / 1e3:.3f}" for kind in ("flat", "hierarchical", "ho"))
    lines.append(f"| PaRO, 1 GB, 16 nodes of 8 | | {times} | {saved} |")
    return "\n".join(lines)


@click.command(help=__doc__)
@click.option("--nodes", default=3, show_default=True, type=int)
@click.option("--ranks", default=3, show_default=True, type=int, help="Per node.")
@click.option("--mib", default=64.0, show_default=True, type=float, help="Size of the gathered buffer.")
@click.option("--rate", default="250mbit", show_default=True, help="Of every node's link.")
@click.option("--inside", default="4,8,16", show_default=True, help="Multiples of it inside nodes.")
@click.option("--rounds", default=5, show_default=True, type=int)
@click.option("--reduce", is_flag=True, help="Reduce-scatters instead of all-gathers.")
def main(nodes: int, ranks: int, mib: float, rate: str, inside: str, rounds: int, reduce: bool) -> None:
    """The command: the parent, and with RANK in the environment a worker."""
    if "RANK" in os.environ:
        Worker(mib, reduce).run(rounds, inside.split(","))
        return
    try:
        with Cluster(nodes, rate) as cluster:
            results = measure(cluster, ranks, rate, sys.argv[1:])
    except FinetuneError as error:
        click.echo(f"bench_ho_ring: {error}", err=True)
        sys.exit(error.exit_status)
    click.echo(reductions(results) if reduce else table(results))


if __name__ == "__main__":
    main()
