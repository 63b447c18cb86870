"""What strategies send and how long their steps take on an emulated cluster, against what the planner says.

    python scripts/bench_strategies.py volumes --out volumes.json
    python scripts/bench_strategies.py times --rates 1gbit,10gbit --out times.json

`volumes`: bytes between nodes per step for every strategy with 1 and 4 micro-batches, from the counters of the nodes'
network devices less packet headers, next to the planner's formula. `times`: step times of strategies that a user would
consider, for three shapes of model and batch and at several rates, next to the planner's prediction from a profile of
the same cluster taken in the same run; and how much slower than the best the planner's choice is.

All strategies of a command run in the same processes, one after the other. Needs root (see netcluster.py).
"""

import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click
import torch
import torch.distributed as dist
from cluster_workers import lead, llama_config, make_model, report, set_rate, write_record
from netcluster import Cluster, network_bytes
from torch.distributed.fsdp import MixedPrecisionPolicy

import fcdp
from common.errors import FinetuneError
from fcdp.planner import Cluster as PlannedCluster
from fcdp.planner import StrategyPlan, Workload, plan
from fcdp.planner.cluster import MeasuredRates
from fcdp.planner.profiling import measure_collectives, measure_computing
from fcdp.strategy.mesh import Levels
from fcdp.strategy.strategy import PARO, parse_strategy

NAMED = ("ddp", "zero1", "zero2", "zero3", "hybrid", "zero++-exact", "fcdp", "fcdp-iig", "G/G/G+host+second")
EVERY = (*NAMED, *(f"paro-{scopes.lower()}" for scopes in PARO))
VOCABULARY = 1024


@dataclass(frozen=True)
class Case:
    """What is trained."""

    hidden: int
    layers: int
    micro_batches: int = 1
    tokens: int = 64  # In each micro-batch of each rank

    @property
    def name(self) -> str:
        return f"{self.layers} x {self.hidden}, {self.micro_batches} x {self.tokens} tokens"

    def config(self) -> Any:
        """Of a Llama."""
        return llama_config(self.hidden, self.layers, VOCABULARY)

    def model(self) -> Any:
        """The same on every rank."""
        return make_model(self.config())


@dataclass
class Result:
    """One case with one strategy at one rate; bytes are those that a node sends per step, on average over nodes."""

    case: str
    micro_batches: int
    strategy: str
    rate: str
    seconds: float  # Median of the steps, each on its slowest rank
    sent_payload: float  # By the network devices' counters, less packet headers
    counted: float  # By the collectives' own count
    formula: float  # By the planner's formula, for the parameters as FSDP2 pads them
    model_bytes: float
    predicted_seconds: float | None = None
    computing_seconds: float | None = None  # Of the predicted ones
    chosen: bool = False
    """Whether the planner chooses this strategy for the case at this rate, among all that are measured."""


class Worker:
    """One rank: trains case by case and strategy by strategy, and has the rate changed in between."""

    def __init__(
        self, strategies: Sequence[str], rates: Sequence[str], steps: int, levels: Levels | None = None
    ):
        dist.init_process_group("gloo")
        self.topology = fcdp.Topology.from_environment(device="cpu", levels=levels)
        self.strategies, self.rates, self.steps = strategies, rates, steps

    def run(self, cases: Sequence[Case], *, predict: bool = False) -> None:
        """All cases with all strategies.

        Args:
            predict: measure the cluster first, and have the planner say how long steps will take.
        """
        links = {}
        for rate in self.rates if predict else ():
            set_rate(rate)
            links[rate] = MeasuredRates(measure_collectives(self.topology))
        for case in cases:
            plans = {rate: self._plan(case, rates) for rate, rates in links.items()}
            for strategy in self.strategies:
                for result in self._measure(case, strategy):
                    if plan := plans.get(result.rate):
                        by_name = {estimate.name: estimate for estimate in plan.estimates}
                        result.predicted_seconds = by_name[strategy].step_seconds
                        result.computing_seconds = by_name[strategy].compute_seconds
                        result.chosen = plan.choice is not None and plan.choice.name == strategy
                    report(dataclasses.asdict(result))
        self.topology.close()
        dist.destroy_process_group()

    def _plan(self, case: Case, rates: MeasuredRates) -> StrategyPlan:
        config, topology = case.config(), self.topology
        workload = Workload.of_model(config, seq_len=case.tokens, micro_batches=case.micro_batches)
        computing: dict[str, Any] = measure_computing(topology, config, 1, case.tokens, "bf16")
        flops = workload.forward_flops + workload.backward_flops(checkpointing=False)
        computing["flops_per_second"] = flops / self._compute_seconds(case)
        cluster = PlannedCluster(
            name="emulated", title="", levels=topology.levels, device_memory_bytes=1 << 40, host_memory_bytes=1 << 40,
            rates=rates, overlaps=False, **computing,
        )  # fmt: skip
        strategies = [parse_strategy(name) for name in self.strategies]
        return plan(workload, cluster, strategies=strategies, checkpointing=False)

    def _compute_seconds(self, case: Case) -> float:
        """Of one micro-batch that communicates nothing: gradients are only added up."""
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
        model: Any = fcdp.fully_shard(case.model(), self.topology, "ddp", mp_policy=policy)
        sharding = fcdp.sharding(model)
        sharding.set_is_last_micro_batch(False)
        ids = torch.zeros((1, case.tokens), dtype=torch.int64)
        taken = []
        for _ in range(6):
            dist.barrier()
            started = time.perf_counter()
            model(input_ids=ids, labels=ids).loss.backward()
            slowest = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            taken.append(float(slowest))
        sharding.close()
        return statistics.median(taken[1:])  # the first one unpacks parameters and makes buffers

    def _measure(self, case: Case, strategy: str) -> list[Result]:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
        model: Any = fcdp.fully_shard(case.model(), self.topology, strategy, mp_policy=policy)
        sharding = fcdp.sharding(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        generator = torch.Generator().manual_seed(self.topology.rank)

        def step() -> tuple[float, float, float]:
            """Seconds on the slowest rank; payload that a node sent, by counter and by count."""
            batches = torch.randint(0, VOCABULARY, (case.micro_batches, 1, case.tokens), generator=generator)
            dist.barrier()
            counted, before, started = sharding.traffic.inter_node, network_bytes(), time.perf_counter()
            for index, ids in enumerate(batches):
                sharding.set_is_last_micro_batch(index == case.micro_batches - 1)
                (model(input_ids=ids, labels=ids).loss / case.micro_batches).backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds = time.perf_counter() - started
            dist.barrier()
            # All its ranks say it
            payload = (network_bytes() - before).sent_payload / self.topology.ranks_per_node
            slowest = torch.tensor(seconds, dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            told = torch.tensor([payload, sharding.traffic.inter_node - counted], dtype=torch.float64)
            dist.all_reduce(told)
            payload, counted = (told / self.topology.nodes).tolist()
            return float(slowest), payload, counted

        results = []
        set_rate("unlimited")
        step()
        held = sum(group.cell_bytes for group in sharding.groups) * sharding.routes.shards
        formula = sharding.inter_node_bytes(case.micro_batches)
        for rate in self.rates:
            set_rate(rate)
            step()  # TCP finds its pace
            steps = [step() for _ in range(self.steps)]
            seconds, payload, counted = (statistics.median(values) for values in zip(*steps, strict=True))
            results.append(
                Result(
                    case.name, case.micro_batches, strategy, rate, seconds, payload, counted, formula, held
                )
            )
        sharding.close()
        return results


def volume_table(results: Sequence[Result]) -> str:
    """Bytes over those of the model, as Markdown."""
    lines = [
        "| strategy | P / G / OS | formula, 1 micro-batch | measured | formula, 4 | measured | off by at most |",
        "|---|---|---|---|---|---|---|",
    ]
    by_strategy: dict[str, dict[int, Result]] = {}
    for result in results:
        by_strategy.setdefault(result.strategy, {})[result.micro_batches] = result
    for name, by_rate in by_strategy.items():
        cells = [
            f"{nbytes / result.model_bytes:.3f}"
            for result in by_rate.values()
            for nbytes in (result.formula, result.sent_payload)
        ]
        off = max((abs(result.sent_payload / result.formula - 1) for result in by_rate.values()), default=0.0)
        strategy = parse_strategy(name)
        scopes = " ".join(map(str, (strategy.p, strategy.g, strategy.os)))
        lines.append(f"| {name} | {scopes} | {' | '.join(cells)} | {off:.1%} |")
    return "\n".join(lines)


@click.group(help=__doc__)
def main() -> None:
    """The command: the parent, and with RANK in the environment a rank."""


@main.command()
@click.option("--nodes", default=2, show_default=True, type=int)
@click.option("--ranks", default=2, show_default=True, type=int, help="Per node.")
@click.option("--strategies", default=",".join(EVERY), show_default=False, help="By name. Default: all.")
@click.option("--levels", default=None, help="Where nodes have levels inside: 2,2,2.")
@click.option("--steps", default=2, show_default=True, type=int, help="Counted steps of each.")
@click.option("--out", default=None, type=click.Path(dir_okay=False), help="Write all figures here, as JSON.")
def volumes(nodes: int, ranks: int, strategies: str, levels: str | None, steps: int, out: str | None) -> None:
    """Bytes across nodes, counted by the network, next to the planner's formula."""
    cases = [Case(384, 4, micro_batches) for micro_batches in (1, 4)]
    if "RANK" in os.environ:
        parsed = None if levels is None else Levels.parse(levels)
        Worker(strategies.split(","), ["unlimited"], steps, parsed).run(cases)
        return
    results = _collect(nodes, ranks)
    click.echo(volume_table(results))
    write_record(out, results, nodes=nodes, ranks_per_node=ranks)


SHAPES = (Case(512, 8), Case(384, 4, micro_batches=4, tokens=128), Case(512, 3, tokens=512))
CONSIDERED = (
    *("ddp", "zero1", "zero2", "zero3", "hybrid", "zero++-exact", "fcdp-iig"),
    *("paro-nig", "paro-igg", "paro-gig"),
)


@main.command()
@click.option("--nodes", default=2, show_default=True, type=int)
@click.option("--ranks", default=2, show_default=True, type=int, help="Per node.")
@click.option("--rates", default="1gbit,10gbit", show_default=True)
@click.option("--strategies", default=",".join(CONSIDERED), show_default=True, help="By name.")
@click.option("--shapes", default="0,1,2", show_default=True, help="By number.")
@click.option("--steps", default=3, show_default=True, type=int, help="Timed steps of each.")
@click.option("--out", default=None, type=click.Path(dir_okay=False), help="Write all figures here, as JSON.")
def times(
    nodes: int, ranks: int, rates: str, strategies: str, shapes: str, steps: int, out: str | None
) -> None:
    """Step times next to the planner's, and what its choice is worth."""
    if "RANK" in os.environ:
        cases = [SHAPES[int(number)] for number in shapes.split(",")]
        Worker(strategies.split(","), rates.split(","), steps).run(cases, predict=True)
        return
    results = _collect(nodes, ranks)
    click.echo(time_table(results))
    write_record(out, results, nodes=nodes, ranks_per_node=ranks)


def time_table(results: Sequence[Result]) -> str:
    """Measured and predicted seconds, and the choice against the best, as Markdown."""
    lines = ["| case | rate | strategy | step, s | predicted, s | off by |", "|---|---|---|---|---|---|"]
    verdicts, errors = [], []
    for case, rate in dict.fromkeys((result.case, result.rate) for result in results):
        same = (result for result in results if (result.case, result.rate) == (case, rate))
        ranking = sorted(same, key=lambda result: result.seconds)
        for entry in ranking:
            assert entry.predicted_seconds is not None
            errors.append(abs(entry.predicted_seconds / entry.seconds - 1))
            mark = " (chosen)" if entry.chosen else ""
            lines.append(
                f"| {case} | {rate} | {entry.strategy}{mark} | {entry.seconds:.3f} | {entry.predicted_seconds:.3f} "
                f"| {entry.predicted_seconds / entry.seconds - 1:+.0%} |"
            )
        for chosen in (result for result in ranking if result.chosen):
            behind = chosen.seconds / ranking[0].seconds - 1
            verdicts.append(
                f"{case} at {rate}: chosen {chosen.strategy}, {behind:.1%} behind the best, {ranking[0].strategy}"
            )
    median = f"median error of predicted times: {statistics.median(errors):.1%} over {len(errors)}"
    return "\n".join([*lines, "", *verdicts, "", median])


def _collect(nodes: int, ranks: int) -> list[Result]:
    results = []
    try:
        with Cluster(nodes) as cluster:
            for fields in lead(cluster, ranks, __file__, sys.argv[1:]):
                results.append(Result(**fields))
                last = results[-1]
                click.echo(
                    f"{last.case}, {last.strategy}, {last.rate}: {last.seconds:.2f} s, "
                    f"{last.sent_payload / 1e6:.2f} MB, formula {last.formula / 1e6:.2f} MB",
                    err=True,
                )
    except FinetuneError as error:
        click.echo(f"bench_strategies: {error}", err=True)
        sys.exit(error.exit_status)
    return results


if __name__ == "__main__":
    main()
