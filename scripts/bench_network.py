"""Inter-node bytes and step times of FCDP, plain FSDP2 and hybrid sharding on an emulated cluster.

    python scripts/bench_network.py --nodes 2 --ranks 2 --rates 1gbit,2.5gbit,10gbit,unlimited --out bench.json

For every case (model, full or LoRA, micro-batches) and strategy the same processes train at one rate after the other;
rates change under them. Bytes are those of the nodes' network devices, as counted and less headers, next to what the
planner's formulas say; the peak is the most that tensors held. *Exposed* is a step's time less that of the same step
with the network unlimited: what communication costs that computing does not hide. Times are medians. Needs root (see
netcluster.py).
"""

import dataclasses
import os
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any, cast

import click
import torch
import torch.distributed as dist
from cluster_workers import lead, llama_config, make_model, report, set_rate, write_record
from live_bytes import LiveBytes
from netcluster import Cluster, network_bytes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import fcdp
from common.errors import FinetuneError
from fcdp.grouping import find_units, split_units

VOCABULARY = 2048
STRATEGIES = ("fsdp2", "fsdp2-hybrid", "fcdp", "fcdp-iig")
"""FSDP2 untouched, over all ranks or inside nodes; and any strategy that ``fcdp.fully_shard`` knows."""


@dataclass(frozen=True)
class Case:
    """What is trained."""

    name: str
    hidden: int
    layers: int
    lora: bool = False
    micro_batches: int = 1
    tokens: int = 128  # In each micro-batch of each rank


CASES = [
    Case("full, 28 M parameters, 1 micro-batch", 512, 8),
    Case("full, 28 M parameters, 4 micro-batches", 512, 8, micro_batches=4),
    Case("LoRA, 320 M parameters, 1 micro-batch", 1024, 24, lora=True, tokens=256),
]


@dataclass
class Measured:
    """One case with one strategy at one rate."""

    case: str
    strategy: str
    rate: str
    seconds: list[float]  # Of each step, on the slowest rank
    sent_bytes: float  # By the busiest node per step: its network device's counter
    sent_payload: float  # The same less packet headers
    first_step_payload: float
    formula_bytes: float
    formula_first_bytes: float
    peak_bytes: float  # The most that tensors of rank 0 held, without cached shards
    exposed_seconds: float | None = None  # Median step less the median with the network unlimited

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def model_of(case: Case) -> nn.Module:
    """A Llama; with LoRA on queries and values its base is stored in bf16."""
    dtype = torch.bfloat16 if case.lora else torch.float32
    model: Any = make_model(llama_config(case.hidden, case.layers, VOCABULARY), dtype)
    if case.lora:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    return cast(nn.Module, model)


class Plain:
    """FSDP2 untouched: over all ranks, or (``hybrid``) inside nodes and replicated over them. Blocks are the same as
    with our strategies."""

    def __init__(self, model: nn.Module, topology: fcdp.Topology, hybrid: bool, policy: MixedPrecisionPolicy):
        self._model, self._topology, self._hybrid = model, topology, hybrid
        shape = (topology.nodes, topology.ranks_per_node) if hybrid else (topology.world_size,)
        self._shards = shape[-1]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("nodes", "ranks")[-len(shape) :])
        units = find_units(model)
        self._gathered = self._reduced = 0
        for group in split_units(units, apart=False):
            keep = units[group.unit].keep_after_forward
            sizes = [(p.requires_grad, self._padded(p) * 2) for p in group.registered()]
            self._gathered += sum(size for _, size in sizes) * (1 if keep else 2)
            self._reduced += sum(size for trained, size in sizes if trained)
            fully_shard(group.modules[0], mesh=mesh, mp_policy=policy, reshard_after_forward=not keep)

    def _padded(self, parameter: nn.Parameter) -> int:
        rows = -(-parameter.shape[0] // self._shards) * self._shards
        return rows * parameter.numel() // parameter.shape[0]

    def set_is_last_micro_batch(self, is_last: bool) -> None:
        """Gradients cross nodes once per step where they are replicated over them."""
        if self._hybrid:
            cast(FSDPModule, self._model).set_requires_all_reduce(is_last)

    def inter_node_bytes(self, micro_batches: int, *, first_step: bool = False) -> float:
        """What a node sends per step, by theory: flat rings cross the border of a node once in each direction, and
        gloo's reduce-scatter is an all-reduce, twice the bytes."""
        if self._hybrid:
            return 2 * (self._topology.nodes - 1) / self._topology.nodes * self._reduced
        return (self._shards - 1) / self._shards * (self._gathered + 2 * self._reduced) * micro_batches

    def close(self) -> None:
        """Nothing is open."""


class Worker:
    """One rank: trains what the parent asks for, and has it change the rate in between."""

    def __init__(self, cases: list[Case], strategies: list[str], rates: list[str], steps: int):
        dist.init_process_group("gloo")
        self.topology = fcdp.Topology.from_environment(device="cpu")
        self.cases, self.strategies, self.rates, self.steps = cases, strategies, rates, steps

    def run(self) -> None:
        """All cases with all strategies."""
        for case in self.cases:
            for strategy in self.strategies:
                self._measure(case, strategy)
        self.topology.close()
        dist.destroy_process_group()

    def _measure(self, case: Case, strategy: str) -> None:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
        model: Any = model_of(case)
        sharding: Plain | fcdp.Sharding
        if strategy.startswith("fsdp2"):
            sharding = Plain(model, self.topology, strategy == "fsdp2-hybrid", policy)
        else:
            fcdp.fully_shard(model, self.topology, strategy, mp_policy=policy)
            sharding = fcdp.sharding(model)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
        generator = torch.Generator().manual_seed(self.topology.rank)

        def step() -> list[float]:
            """Seconds on the slowest rank, bytes and payload that the busiest node sent."""
            batches = torch.randint(0, VOCABULARY, (case.micro_batches, 1, case.tokens), generator=generator)
            dist.barrier()
            before, started = network_bytes(), time.perf_counter()
            for index, ids in enumerate(batches):
                sharding.set_is_last_micro_batch(index == case.micro_batches - 1)
                (model(input_ids=ids, labels=ids).loss / case.micro_batches).backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()
            seconds, moved = time.perf_counter() - started, network_bytes() - before
            told = torch.tensor([seconds, moved.sent, moved.sent_payload], dtype=torch.float64)
            dist.all_reduce(told, op=dist.ReduceOp.MAX)
            return told.tolist()

        set_rate("unlimited")
        first = step()[2]
        shares = [gather.cached._host for gather in getattr(sharding, "_gathers", ()) if gather.cached]
        with LiveBytes(share for share in shares if share is not None) as live:
            live.see_all(model, optimizer)
            step()
        for rate in self.rates:
            set_rate(rate)
            steps = [step() for _ in range(self.steps)]
            formula = sharding.inter_node_bytes(case.micro_batches)
            formula_first = sharding.inter_node_bytes(case.micro_batches, first_step=True)
            seconds, sent, payload = zip(*steps, strict=True)
            sent, payload = statistics.median(sent), statistics.median(payload)
            result = Measured(
                case.name,
                strategy,
                rate,
                list(seconds),
                sent,
                payload,
                first,
                formula,
                formula_first,
                live.peak,
            )
            report(dataclasses.asdict(result))
        sharding.close()


def measure(cluster: Cluster, ranks: int, arguments: list[str]) -> list[Measured]:
    """Run the workers on ``cluster`` and collect what they report.

    Raises:
        FinetuneError: a worker failed.
    """
    results = []
    for fields in lead(cluster, ranks, __file__, arguments):
        results.append(Measured(**fields))
        last = results[-1]
        click.echo(f"{last.case}, {last.strategy}, {last.rate}: {last.median:.2f} s", err=True)
    return results


def add_exposed(results: list[Measured]) -> None:
    """Fill in what communication costs, where there is an unlimited run to compare with."""
    unlimited = {(r.case, r.strategy): r.median for r in results if r.rate == "unlimited"}
    for result in results:
        free = unlimited.get((result.case, result.strategy))
        result.exposed_seconds = None if free is None else result.median - free


def table(results: list[Measured]) -> str:
    """The results as Markdown."""
    lines = [
        "| case | strategy | MB sent per node and step | less headers | formula | off by | of FSDP2's "
        "| peak, MB | rate | step, s | exposed, s | of unlimited speed |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    plain = {(r.case, r.rate): r.sent_bytes for r in results if r.strategy == "fsdp2"}
    for r in results:
        off = r.sent_payload / r.formula_bytes - 1 if r.formula_bytes else 0.0
        part = exposed = retained = ""
        if (r.case, r.rate) in plain:
            part = f"{r.sent_bytes / plain[r.case, r.rate]:.4f}"
        if r.exposed_seconds is not None:
            exposed, retained = f"{r.exposed_seconds:.2f}", f"{1 - r.exposed_seconds / r.median:.0%}"
        megabytes = " | ".join(
            f"{count / 1e6:.2f}" for count in (r.sent_bytes, r.sent_payload, r.formula_bytes)
        )
        lines.append(
            f"| {r.case} | {r.strategy} | {megabytes} | {off:+.1%} | {part} "
            f"| {r.peak_bytes / 1e6:.1f} | {r.rate} | {r.median:.3f} | {exposed} | {retained} |"
        )
    return "\n".join(lines)


@click.command(help=__doc__)
@click.option("--nodes", default=2, show_default=True, type=int)
@click.option("--ranks", default=2, show_default=True, type=int, help="Per node.")
@click.option("--rates", default="1gbit,2.5gbit,10gbit,unlimited", show_default=True)
@click.option("--strategies", default=",".join(STRATEGIES), show_default=True)
@click.option("--cases", default=",".join(map(str, range(len(CASES)))), show_default=True, help="By number.")
@click.option("--steps", default=3, show_default=True, type=int, help="Timed steps at each rate.")
@click.option("--out", default=None, type=click.Path(dir_okay=False), help="Write all figures here, as JSON.")
def main(
    nodes: int, ranks: int, rates: str, strategies: str, cases: str, steps: int, out: str | None
) -> None:
    """The command: the parent, and with RANK in the environment a worker."""
    chosen = [CASES[int(number)] for number in cases.split(",")]
    if "RANK" in os.environ:
        Worker(chosen, strategies.split(","), rates.split(","), steps).run()
        return
    try:
        with Cluster(nodes) as cluster:
            results = measure(cluster, ranks, sys.argv[1:])
    except FinetuneError as error:
        click.echo(f"bench_network: {error}", err=True)
        sys.exit(error.exit_status)
    add_exposed(results)
    click.echo(table(results))
    cases_run = [dataclasses.asdict(case) for case in chosen]
    write_record(out, results, nodes=nodes, ranks_per_node=ranks, cases=cases_run)


if __name__ == "__main__":
    main()
