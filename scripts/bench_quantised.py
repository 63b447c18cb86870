"""What quantised strategies cost in loss and gain in time, beside the same strategies without quantisation.

    python scripts/bench_quantised.py loss --strategies zero++-exact,zero++ --steps 300 --out loss.json
    python scripts/bench_quantised.py throughput --strategies zero3,zero++-exact,zero++ --rate 1gbit --out speed.json
    python scripts/bench_quantised.py table loss.json speed.json

`loss` trains a small Llama on two emulated nodes of two ranks (plain processes, gloo on loopback) on Python's own
documentation (`common.data.demo_text`), every strategy with the same first weights and the same batches, and tells the
loss on held-out text at the end. Results are added to `--out`, so a long comparison can be made in pieces.

`throughput` trains the 28 M parameter model of bench_network.py on the emulated cluster of netcluster.py (root needed),
and tells step times and the bytes that the busiest node's network device has sent, beside the planner's formula.
"""

import dataclasses
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from cluster_workers import lead, llama_config, make_model
from netcluster import Cluster, network_bytes
from torch.distributed.fsdp import MixedPrecisionPolicy

import fcdp
from common.errors import FinetuneError
from fcdp.strategy.mesh import Levels

NODES, RANKS = 2, 2
VOCABULARY, SEQUENCE, ROWS = 2048, 128, 2
"""Rows of each rank's batch."""
EVALUATED = 32
"""Held-out sequences."""
LEARNING_RATE, WARMUP = 3e-3, 30


@dataclass(frozen=True)
class Loss:
    """One training run."""

    strategy: str
    steps: int
    trained: float
    """Mean over the last twentieth of the steps."""
    held_out: float
    seconds: float
    parameters: int


@dataclass(frozen=True)
class Speed:
    """Steps of one strategy at one rate."""

    strategy: str
    rate: str
    seconds: list[float]
    """Of each step, on the slowest rank."""
    payload: float
    """Median of what the busiest node sent per step, less packet headers."""
    formula: float


def text(directory: Path) -> torch.Tensor:
    """Token ids of all documents in sequences ``[n, SEQUENCE]``, in an order of chance but the same every time."""
    from transformers import AutoTokenizer

    from common.data.demo_text import demo_documents, train_demo_tokenizer

    train_demo_tokenizer(VOCABULARY, directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = [
        token for document in demo_documents() for token in [*tokenizer(document)["input_ids"], tokenizer.eos_token_id]
    ]
    rows = torch.tensor(ids[: len(ids) // SEQUENCE * SEQUENCE]).view(-1, SEQUENCE)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))]


class Run:
    """One rank with one strategy."""

    def __init__(self, strategy: str, hidden: int, layers: int):
        # Pairs, for strategies that have them: here, the ranks of a node.
        self.topology = fcdp.Topology(NODES, RANKS, device="cpu", levels=Levels((RANKS, 1, NODES)))
        model = make_model(llama_config(hidden, layers, VOCABULARY))
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
        self.model: Any = fcdp.fully_shard(model, self.topology, strategy, mp_policy=policy)
        self.sharding = fcdp.sharding(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)

    def step(self, ids: torch.Tensor) -> float:
        """Train on this rank's ``ids``; the mean loss of all ranks."""
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.mean(loss)

    def mean(self, value: torch.Tensor) -> float:
        """Over all ranks."""
        told = value.detach().float() / self.topology.world_size
        dist.all_reduce(told)
        return float(told)

    def close(self) -> None:
        """Let go of process groups."""
        self.sharding.close()
        self.topology.close()


def train_on_text(strategy: str, steps: int, rows: torch.Tensor) -> Loss:
    """The final losses of one strategy."""
    run = Run(strategy, 128, 4)
    rank, world = run.topology.rank, run.topology.world_size
    held_out, trained = rows[:EVALUATED], rows[EVALUATED:]
    began, losses = time.monotonic(), []
    for step in range(steps):
        factor = min((step + 1) / WARMUP, (steps - step) / (steps - WARMUP))
        for group in run.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * factor
        first = (step * world + rank) * ROWS % (len(trained) - ROWS)
        losses.append(run.step(trained[first : first + ROWS]))
    run.model.eval()
    with torch.no_grad():
        mine = held_out.chunk(world)[rank]
        evaluated = run.mean(run.model(input_ids=mine, labels=mine).loss)
    seconds = time.monotonic() - began
    run.close()
    return Loss(strategy, steps, statistics.mean(losses[-steps // 20 :]), evaluated, seconds, run.parameters)


def time_steps(strategy: str, steps: int, rate: str) -> Speed:
    """Step times of one strategy, after two steps that make connections and fill caches."""
    run = Run(strategy, 512, 8)
    generator = torch.Generator().manual_seed(run.topology.rank)
    found: list[list[float]] = []
    for _ in range(steps + 2):
        ids = torch.randint(0, VOCABULARY, (1, SEQUENCE), generator=generator)
        dist.barrier()
        before, began = network_bytes(), time.perf_counter()
        run.step(ids)
        dist.barrier()
        told = torch.tensor([time.perf_counter() - began, (network_bytes() - before).sent_payload])
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        found.append(told.tolist())
    seconds, payload = zip(*found[2:], strict=True)
    formula = run.sharding.inter_node_bytes(1)
    run.close()
    return Speed(strategy, rate, list(seconds), statistics.median(payload), formula)


def work(measure: Callable[[str], Any], strategies: list[str], out: Path) -> None:
    """What every rank does: measure one strategy after the other. Rank 0 adds the results to ``out``."""
    dist.init_process_group("gloo")
    for strategy in strategies:
        result = dataclasses.asdict(measure(strategy))
        if dist.get_rank() == 0:
            results = json.loads(out.read_text()) if out.exists() else []
            out.write_text(json.dumps([*results, result], indent=1))
            click.echo(json.dumps(result), err=True)
    dist.destroy_process_group()


def start_here(arguments: list[str]) -> None:
    """Run this script as all ranks on this machine.

    Raises:
        FinetuneError: a rank failed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(NODES * RANKS)}
    shared |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    ranks = [
        subprocess.Popen([sys.executable, __file__, *arguments], env={**os.environ, **shared, "RANK": str(rank)})
        for rank in range(NODES * RANKS)
    ]
    statuses = [rank.wait() for rank in ranks]
    if any(statuses):
        raise FinetuneError("A rank failed; what it said is above.")


def loss_table(results: list[dict[str, Any]]) -> str:
    """Losses as Markdown, each beside those of the strategy without quantisation."""
    lines = [
        "| strategy | steps | training loss, end | held-out loss | of unquantised |",
        "|---|---|---|---|---|",
    ]
    exact = {result["strategy"].removesuffix("-exact"): result for result in results if "-exact" in result["strategy"]}
    for result in results:
        name = result["strategy"]
        base = exact.get(name)
        apart = "" if base is None else (
            f"{result['trained'] / base['trained'] - 1:+.2%}, {result['held_out'] / base['held_out'] - 1:+.2%}"
        )  # fmt: skip
        lines.append(f"| {name} | {result['steps']} | {result['trained']:.4f} | {result['held_out']:.4f} | {apart} |")
    return "\n".join(lines)


def speed_table(results: list[dict[str, Any]]) -> str:
    """Times and bytes as Markdown."""
    lines = [
        "| strategy | rate | MB sent per node and step | formula | off by | step, s | faster than unquantised |",
        "|---|---|---|---|---|---|---|",
    ]
    median = {(result["strategy"], result["rate"]): statistics.median(result["seconds"]) for result in results}
    for result in results:
        key = (result["strategy"], result["rate"])
        base = median.get((f"{key[0]}-exact", key[1]))
        gain = "" if base is None else f"{base / median[key]:.2f} x"
        sent, formula = result["payload"], result["formula"]
        lines.append(
            f"| {key[0]} | {key[1]} | {sent / 1e6:.2f} | {formula / 1e6:.2f} | {sent / formula - 1:+.1%} "
            f"| {median[key]:.3f} | {gain} |"
        )
    return "\n".join(lines)


@click.group(help=__doc__)
def main() -> None:
    """The command."""


@main.command()
@click.option("--strategies", required=True, help="Names, separated by commas.")
@click.option("--steps", default=300, show_default=True, type=int)
@click.option("--out", required=True, type=click.Path(path_type=Path))
def loss(strategies: str, steps: int, out: Path) -> None:
    """Final losses on real text."""
    if "RANK" not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            torch.save(text(Path(folder)), out.with_suffix(".pt"))
        start_here(sys.argv[1:])
        out.with_suffix(".pt").unlink()
        return
    rows = torch.load(out.with_suffix(".pt"))
    work(lambda strategy: train_on_text(strategy, steps, rows), strategies.split(","), out)


@main.command()
@click.option("--strategies", required=True, help="Names, separated by commas.")
@click.option("--steps", default=4, show_default=True, type=int)
@click.option("--rate", default="1gbit", show_default=True)
@click.option("--out", required=True, type=click.Path(path_type=Path))
def throughput(strategies: str, steps: int, rate: str, out: Path) -> None:
    """Step times on an emulated cluster."""
    if "RANK" in os.environ:
        work(lambda strategy: time_steps(strategy, steps, rate), strategies.split(","), out)
        return
    with Cluster(NODES, rate) as cluster:
        for _ in lead(cluster, RANKS, __file__, sys.argv[1:]):
            pass  # ranks write what they find to --out, as those of `loss` do


@main.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
def table(files: tuple[Path, ...]) -> None:
    """Results as Markdown."""
    for file in files:
        results = json.loads(file.read_text())
        click.echo(loss_table(results) if "held_out" in results[0] else speed_table(results))


if __name__ == "__main__":
    try:
        main()
    except FinetuneError as error:
        click.echo(f"bench_quantised: {error}", err=True)
        sys.exit(error.exit_status)
