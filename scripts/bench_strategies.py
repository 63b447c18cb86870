"""What strategies send and how long their steps take on an emulated cluster, against what the planner says.

    python scripts/bench_strategies.py volumes --out volumes.json
    python scripts/bench_strategies.py times --rates 1gbit,10gbit --out times.json --plot docs/strategies.png

`volumes`: bytes between nodes per step for every strategy with 1 and 4 micro-batches, from the counters of the nodes'
network devices less packet headers, beside the planner's formula. `times`: step times of strategies that a user would
consider, for three shapes of model and batch and at several rates, beside the planner's prediction from a profile of
the same cluster taken in the same run; and how much slower than the best the planner's choice is.

All strategies of a command run in the same processes, one after the other. Needs root (see netcluster.py).
"""

import dataclasses
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from cluster_workers import lead, report, set_rate
from netcluster import Cluster, network_bytes
from torch.distributed.fsdp import MixedPrecisionPolicy

import fcdp
from common.errors import FinetuneError
from fcdp.mesh import Levels
from fcdp.strategy_names import PARO, parse_strategy

NAMED = ("ddp", "zero1", "zero2", "zero3", "hybrid", "zero++-exact", "fcdp", "I/G/G+host", "G/G/G+host+second")
EVERY = (*NAMED, *(f"paro-{scopes.lower()}" for scopes in PARO))
VOCABULARY = 1024


@dataclass(frozen=True)
class Case:
    """What is trained."""

    hidden: int
    layers: int
    micro_batches: int = 1
    tokens: int = 64
    """In each micro-batch of each rank."""

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.layers} x {self.hidden}, {self.micro_batches} x {self.tokens} tokens"

    def config(self) -> Any:
        """Of a Llama."""
        import transformers

        return transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 11 // 4,
            num_hidden_layers=self.layers,
            num_attention_heads=8,
            num_key_value_heads=8,
            use_cache=False,
        )

    def model(self) -> Any:
        """The same on every rank."""
        import transformers

        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(self.config(), dtype=torch.float32).train()


@dataclass
class Measured:
    """One case with one strategy at one rate; bytes are those that a node sends per step, on average over nodes."""

    case: str
    micro_batches: int
    strategy: str
    rate: str
    seconds: float
    """Median of the steps, each on its slowest rank."""
    sent_payload: float
    """By the network devices' counters, less packet headers."""
    counted: float
    """By the collectives' own count."""
    formula: float
    """By the planner's formula, for the parameters as FSDP2 pads them."""
    model_bytes: float


class Worker:
    """One rank: trains what the parent asks for, and has it change the rate in between."""

    def __init__(
        self, cases: Sequence[Case], strategies: Sequence[str], rates: Sequence[str], steps: int, levels: Levels | None
    ):
        dist.init_process_group("gloo")
        self.topology = fcdp.Topology.from_environment(device="cpu", levels=levels)
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
        model: Any = fcdp.fully_shard(case.model(), self.topology, strategy, mp_policy=policy)
        sharding = fcdp.sharding(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        generator = torch.Generator().manual_seed(self.topology.rank)

        def step() -> tuple[float, float, float]:
            """Seconds on the slowest rank; payload that a node sent, by counter and by count."""
            batches = torch.randint(0, VOCABULARY, (case.micro_batches, 1, case.tokens), generator=generator)
            dist.barrier()
            counted, before, started = sharding.traffic.across, network_bytes(), time.perf_counter()
            for index, ids in enumerate(batches):
                sharding.set_is_last_micro_batch(index == case.micro_batches - 1)
                (model(input_ids=ids, labels=ids).loss / case.micro_batches).backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds = time.perf_counter() - started
            dist.barrier()
            payload = (network_bytes() - before).sent_payload / self.topology.ranks_per_node  # all its ranks say it
            slowest = torch.tensor(seconds, dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            told = torch.tensor([payload, sharding.traffic.across - counted], dtype=torch.float64)
            dist.all_reduce(told)
            payload, counted = (told / self.topology.nodes).tolist()
            return float(slowest), payload, counted

        set_rate("unlimited")
        step()
        for rate in self.rates:
            set_rate(rate)
            step()  # TCP finds its pace
            steps = [step() for _ in range(self.steps)]
            seconds, payload, counted = (statistics.median(values) for values in zip(*steps, strict=True))
            held = sum(group.cell_bytes for group in sharding.groups) * sharding.routes.shards
            formula = sharding.bytes_across_nodes(case.micro_batches)
            result = Measured(case.name, case.micro_batches, strategy, rate, seconds, payload, counted, formula, held)
            report(dataclasses.asdict(result))
        sharding.close()


def volume_table(results: Sequence[Measured]) -> str:
    """Bytes over those of the model, as Markdown."""
    lines = [
        "| strategy | P / G / OS | formula, 1 micro-batch | measured | formula, 4 | measured | off by at most |",
        "|---|---|---|---|---|---|---|",
    ]
    by_strategy: dict[str, dict[int, Measured]] = {}
    for result in results:
        by_strategy.setdefault(result.strategy, {})[result.micro_batches] = result
    for name, found in by_strategy.items():
        cells = [
            f"{nbytes / result.model_bytes:.3f}"
            for result in found.values()
            for nbytes in (result.formula, result.sent_payload)
        ]
        off = max((abs(one.sent_payload / one.formula - 1) for one in found.values()), default=0.0)
        scopes = " ".join(parse_strategy(name).scopes)
        lines.append(f"| {name} | {scopes} | {' | '.join(cells)} | {off:.1%} |")
    return "\n".join(lines)


def _record(results: Sequence[Any], out: str | None, **facts: Any) -> None:
    if out:
        body = {
            **facts,
            "date": time.strftime("%Y-%m-%d"),
            "torch": torch.__version__,
            "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
            "results": [dataclasses.asdict(result) for result in results],
        }
        Path(out).write_text(json.dumps(body, indent=1), encoding="utf-8")


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
    """Bytes across nodes, counted by the network, beside the planner's formula."""
    cases = [Case(384, 4, micro_batches) for micro_batches in (1, 4)]
    if "RANK" in os.environ:
        inside = None if levels is None else Levels.parse(levels)
        Worker(cases, strategies.split(","), ["unlimited"], steps, inside).run()
        return
    results = _collect(nodes, ranks)
    click.echo(volume_table(results))
    _record(results, out, nodes=nodes, ranks_per_node=ranks)


def _collect(nodes: int, ranks: int) -> list[Measured]:
    """Run this same command as ranks, and collect what they report."""
    results = []
    try:
        with Cluster(nodes) as cluster:
            for fields in lead(cluster, ranks, __file__, sys.argv[1:]):
                results.append(Measured(**fields))
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
