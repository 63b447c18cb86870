"""Plans of rates that others published (``holdouts.toml``), split by name into values to learn from and to judge by."""

import tomllib
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from common.hardware.compute_rates import MEMORY_PART
from common.hardware.presets import drive_preset, gpu_preset
from common.models.adapters.options import ALL_LINEAR, AdapterOptions
from common.models.presets import load_config
from common.units import parse_bytes
from fcdp.planner import Cluster, Workload, estimate, load_cluster
from fcdp.planner.cluster import AlphaBeta
from fcdp.strategy.mesh import Levels
from fcdp.strategy.strategy import parse_strategy
from fuyou.layout.share import Share
from fuyou.planner import describe_training, preset_machine, search
from fuyou.planner.evaluate import Evaluator
from fuyou.planner.machine import RankLinks, machine_of_one_rank
from fuyou.planner.plan import Candidate

DATA: dict[str, Any] = tomllib.loads(Path(__file__).with_name("holdouts.toml").read_text(encoding="utf-8"))
# Part of a network card's rate that rings have: not confirmed, what configs/clusters/h100-roce.toml has of 3.2 Tbit/s.
RING_SHARE = 0.88
HOST_BYTES, COMMIT_EVERY = 1 << 40, 100  # Of the machines, so that everything stays in memory


def judges(name: str) -> bool:
    """Return whether the value of this name judges; the others may be learned from."""
    return zlib.crc32(name.encode()) % 2 == 0


@dataclass(frozen=True)
class HoldOut:
    """A published rate and the planned one."""

    name: str
    source: str  # Repository
    hardware: str
    model: str
    published: float  # Tokens per second and GPU
    planned: float
    fits: bool

    @property
    def error(self) -> float:
        """Planned over published, less one."""
        return self.planned / self.published - 1

    @property
    def mixture(self) -> bool:
        return self.model in ("gpt-oss-20b", "gpt-oss-20b-flash", "qwen3-235b-a22b")


@cache
def model_config(name: str) -> PreTrainedConfig:
    """Return the configuration of a model of ``holdouts.toml`` or of a preset."""
    fields = DATA["model"].get(name)
    return load_config(name)[0] if fields is None else AutoConfig.for_model(**fields)


def cluster_of(source: dict[str, Any], levels: Levels) -> Cluster:
    """Return the cluster of a source, with as many GPUs."""
    cluster = load_cluster(source["hardware"]).resized(levels)
    if "gpu" in source:
        gpu = gpu_preset(source["gpu"])
        memory = source.get("memory_gb_per_s", gpu.compute.memory / MEMORY_PART / 1e9) * 1e9
        compute = replace(gpu.compute, memory=memory * MEMORY_PART)
        size = parse_bytes(source["device_memory"]) if "device_memory" in source else gpu.memory_bytes
        cluster = replace(cluster, device_memory_bytes=size, memory_bytes_per_second=memory, compute=compute)
    if "gbit_per_s" in source:
        assert isinstance(cluster.rates, AlphaBeta)
        *inner, outer = cluster.rates.links
        rate = RING_SHARE * source["gbit_per_s"] / 8 * 1e9 / levels.ranks_per_node
        links = (*inner, replace(outer, bytes_per_second=rate))
        cluster = replace(cluster, rates=replace(cluster.rates, links=links))
    return cluster


def plan_on_cluster(source: dict[str, Any], row: list[Any]) -> HoldOut:
    """Plan a value with the planner of ``fcdp``."""
    (
        name,
        model,
        ranks,
        nodes,
        micro_batch,
        micro_batches,
        seq_len,
        strategy,
        kernels,
        recomputed,
        published,
    ) = row
    cluster = cluster_of(source, Levels((ranks, nodes)))
    workload = Workload.of_model(
        model_config(model),
        seq_len=seq_len,
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        trainable_ratio=source.get("trainable", 1.0),
    )
    states = source.get("bf16_gradients", False)
    workload = replace(workload, deepspeed_states=states, compiled=kernels == "compiled")
    layout = parse_strategy(strategy).on(cluster.levels)
    whole, again = (estimate(layout, workload, cluster, checkpointing=each) for each in (False, True))
    seconds = (1 - recomputed) * whole.step_seconds + recomputed * again.step_seconds
    planned = workload.tokens * micro_batches / seconds
    fits = (again if recomputed else whole).fits
    return HoldOut(name, source["repository"], source["hardware"], model, published, planned, fits)


def plan_on_machine(source: dict[str, Any], row: list[Any]) -> HoldOut:
    """Plan a value with the planner of ``fuyou``: everything in memory, and nothing committed while it is measured.

    RoundPipe computes all blocks again in the backward pass, so its runs are planned with that.
    """
    name, model, ranks, rows, seq_len, lora_rank, _kernels, published = row
    gpu = gpu_preset(source["hardware"])
    if source.get("fp16_sums"):
        rates = gpu.compute
        gpu = replace(gpu, compute=replace(rates, dense=2 * rates.dense, experts=2 * rates.experts))
    adapters = AdapterOptions(rank=lora_rank, targets=(ALL_LINEAR,)).peft_config() if lora_rank else None
    job = describe_training(
        model_config(model), rows, seq_len, adapters=adapters, commit_every=COMMIT_EVERY, drive_life=0.0
    )
    machine = preset_machine(gpu, drive_preset("990 Pro 4TB"), 4, HOST_BYTES)
    if ranks > 1:
        job = job.among(Share(1, ranks))
        machine = machine_of_one_rank(machine, ranks, RankLinks.assumed(machine, ranks, float("inf")))
    recomputes = source.get("recomputes", False)
    plan = Evaluator(job, machine).evaluate(Candidate()) if recomputes else search(job, machine)
    planned = plan.tokens_per_second / ranks
    return HoldOut(name, source["repository"], source["hardware"], model, published, planned, plan.fits)


@cache
def holdouts() -> tuple[HoldOut, ...]:
    """Plan all values."""
    planners = {"cluster": plan_on_cluster, "machine": plan_on_machine}
    sources = [source for source in DATA["source"] if source.get("planned", True)]
    return tuple(planners[source["planner"]](source, row) for source in sources for row in source["rows"])


def score(values: Iterable[HoldOut]) -> dict[str, Any]:
    """Return how far plans that fit are from what was published."""
    compared = [value for value in values if value.fits]
    errors = [abs(value.error) for value in compared]
    return {
        "values": len(compared),
        "median_error": median(errors),
        "largest_error": max(errors),
        "above_50_percent": sum(error > 0.5 for error in errors),
        "median_ratio": median(1 + value.error for value in compared),
    }


def main() -> None:
    """Print all values and both scores."""
    for value in holdouts():
        mark = "judge" if judges(value.name) else "learn"
        fits = "" if value.fits else "does not fit"
        print(
            f"{mark} {value.name:34} {value.published:9.1f} {value.planned:9.1f} {value.error:+5.0%} {fits}"
        )
    for mark, chosen in (("judge", True), ("learn", False)):
        print(mark, score(value for value in holdouts() if judges(value.name) is chosen))


if __name__ == "__main__":
    main()
