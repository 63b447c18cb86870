"""Predicted over measured step time, in every regime, on the machine at hand.

Each configuration is profiled, planned from the profile, and run with what the plan chose. The accelerator is emulated
(its computing is a timed wait) in all but two, where the CPU computes; drives are paced where a name gives a rate,
so that one machine can be bound by each of its parts. Storage, buffers, Adam and scheduling are real everywhere. The
last ones are a small DeepSeek-V3 with adapters, whose blocks are whole, in pieces because they must be, and in pieces
although they need not be.

    python scripts/bench_plan.py --ssd DIR
"""

import json
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import common  # noqa: F401  (before PyTorch, which reads how threads wait)

# isort: split

import click
import torch
from emulated.device import PREFIX, emulated_device
from transformers import DeepseekV3Config, LlamaConfig, PreTrainedConfig

from common.models.adapters.options import ALL_LINEAR, AdapterOptions
from common.units import parse_bytes
from fuyou import Engine
from fuyou.planner import (
    Machine,
    Plan,
    RunPlan,
    TrainingJob,
    describe_training,
    profile_or_measure,
    profiled_machine,
    search,
)
from fuyou.planner.evaluate import Evaluator
from fuyou.runtime.device import Device, memory_limits, open_device

NAME = "bench-plan"
SEQ_LEN = 512


@dataclass(frozen=True)
class Configuration:
    """One run."""

    name: str
    regime: str  # What is meant to bound it
    batch: int
    device: str
    host_memory: str
    layers: int = 12
    hidden: int = 1024
    seq_len: int = SEQ_LEN
    micro_batch: int | None = None
    chunk: int | None = None
    experts: int = 0
    """Experts of each block of a DeepSeek-V3, which is trained with adapters; 0: a Llama, all of whose weights are."""
    piece_size: str | None = None  # Largest piece of a block; None: blocks are cut if they do not fit

    @property
    def adapters(self) -> AdapterOptions | None:
        return AdapterOptions(8, targets=(ALL_LINEAR,)) if self.experts else None

    @property
    def config(self) -> PreTrainedConfig:
        if self.experts:
            return DeepseekV3Config(
                hidden_size=self.hidden, intermediate_size=2 * self.hidden, moe_intermediate_size=self.hidden,
                num_hidden_layers=self.layers, first_k_dense_replace=1, n_routed_experts=self.experts,
                n_shared_experts=1, num_experts_per_tok=4, n_group=4, topk_group=2, num_attention_heads=8,
                num_key_value_heads=8, q_lora_rank=self.hidden // 4, kv_lora_rank=self.hidden // 8,
                qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32, vocab_size=8000, max_position_embeddings=2048,
            )  # fmt: skip
        return LlamaConfig(
            hidden_size=self.hidden, intermediate_size=self.hidden * 11 // 4, num_hidden_layers=self.layers,
            num_attention_heads=16, num_key_value_heads=16, vocab_size=8000,
            max_position_embeddings=max(2048, self.seq_len),
        )  # fmt: skip


def emulated(tflops: float, drives: str = "", memory: str = "24GiB", link: str = "20GB/s") -> str:
    """An accelerator, and ``"1GB/s"`` of reading and as much of writing for each drive."""
    pace = f",ssd_read={drives},ssd_write={drives}" if drives else ""
    return f"emulated:tflops={tflops:g},memory={memory},link={link}{pace}"


CONFIGURATIONS: tuple[Configuration, ...] = (
    Configuration("paced drives, batch 4", "ssd", 4, emulated(10, "1GB/s"), "900MiB"),
    Configuration("paced drives, batch 16", "ssd", 16, emulated(10, "1GB/s"), "900MiB"),
    Configuration("balanced, batch 48", "gpu and ssd", 48, emulated(10, "1GB/s"), "900MiB", micro_batch=8),
    Configuration("compute, batch 96", "gpu", 96, emulated(10, "1GB/s"), "900MiB", micro_batch=8),
    Configuration("drives as they are", "ssd or adam", 8, emulated(100), "900MiB"),
    Configuration("all in host memory", "adam", 8, emulated(100), "4GiB"),
    Configuration("slow link", "link", 16, emulated(100, link="600MB/s"), "2GiB"),
    Configuration(
        "activations, little memory",
        "gpu",
        64,
        emulated(4, "2GB/s", memory="400MiB"),
        "700MiB",
        micro_batch=4,
    ),
    Configuration(
        "one row of 16 K tokens in chunks",
        "gpu and ssd",
        1,
        emulated(4, "1GB/s"),
        "900MiB",
        seq_len=16384,
        chunk=1024,
    ),
    Configuration("CPU, small", "gpu", 2, "cpu", "2GiB", layers=8, hidden=512, seq_len=256),
    Configuration("CPU, larger batch", "gpu", 8, "cpu", "2GiB", layers=8, hidden=512, seq_len=256),
)


def mixture(name: str, regime: str, tflops: float, memory: str, link: str, **options: Any) -> Configuration:
    """A small DeepSeek-V3 with adapters, on an accelerator of this much memory."""
    device = emulated(tflops, memory=memory, link=link)
    return Configuration(
        name, regime, 16, device, "1500MiB", layers=6, hidden=512, seq_len=SEQ_LEN, experts=32, **options
    )


CONFIGURATIONS += (
    mixture("in pieces, link", "link", 0.6, "330MiB", "150MB/s"),
    mixture("in pieces, computing", "gpu", 0.2, "330MiB", "400MB/s"),
    mixture("blocks that fit", "gpu", 0.2, "2GiB", "400MB/s", micro_batch=8),
    mixture("the same, cut in pieces", "gpu", 0.2, "2GiB", "400MB/s", micro_batch=8, piece_size="12MiB"),
)


@dataclass(frozen=True)
class Row:
    """One configuration, planned and run."""

    name: str
    regime: str
    predicted: float  # Seconds of a step
    steps: list[float]  # Measured, after the warm-up
    bound: str
    deferred_fraction: float
    saved_activation_bytes: int
    plan_seconds: float  # How long planning took

    @property
    def measured(self) -> float:
        return statistics.median(self.steps)

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured


def device_of(one: Configuration) -> Device:
    """The device of a configuration."""
    return emulated_device(one.device) if one.device.startswith(PREFIX) else open_device(one.device)


def machine_of(one: Configuration, job: TrainingJob, ssd: Sequence[Path]) -> Machine:
    """The machine at hand, profiled for ``job``."""
    device = device_of(one)
    limits = memory_limits(device, parse_bytes(one.host_memory), None)
    profile = profile_or_measure(RunPlan(job, device, limits, ssd))
    return profiled_machine(profile, device.shares_host_memory, limits[1], limits[0], ssd, None)


def predict(one: Configuration, ssd: Sequence[Path]) -> tuple[Plan, tuple[tuple[float, float], ...]]:
    """Profile and plan; return also the FLOPs in which each chunk attends to those before it."""
    job = describe_training(
        one.config, one.batch, one.seq_len, micro_batch=one.micro_batch, chunk=one.chunk,
        adapters=None if one.adapters is None else one.adapters.peft_config(),
        piece_bytes=None if one.piece_size is None else parse_bytes(one.piece_size),
    )  # fmt: skip
    machine = machine_of(one, job, ssd)
    return search(job, machine), Evaluator(job, machine)._chunk_flops


def run(
    one: Configuration,
    ssd: Sequence[Path],
    chosen: Plan,
    steps: int,
    chunk_flops: tuple[tuple[float, float], ...] = (),
    **options: Any,
) -> list[float]:
    """Seconds of each step after two that fill the pipeline; ``options``: more of the engine's."""
    assert chosen.memory is not None
    config = one.config
    ids = torch.randint(0, config.vocab_size, (one.batch, one.seq_len))
    with Engine(
        config, ssd=ssd, device=device_of(one), host_memory=one.host_memory, batch_shape=(one.batch, one.seq_len),
        micro_batch=chosen.memory.batch.micro_rows, deferred_fraction=chosen.deferred_fraction,
        saved_activations=chosen.candidate.activation_policy, run_name=NAME, overwrite=True, dtype="bf16",
        adapters=one.adapters, piece_size=one.piece_size, chunk=one.chunk, **options,
    ) as engine:  # fmt: skip
        runtime = engine._run.runtime
        # An engine's tasks count no attention, and the emulated device takes their time
        shape = runtime.batch_shape
        runtime.batch_shape = lambda *sizes: replace(shape(*sizes), chunk_flops=chunk_flops)  # type: ignore[method-assign]
        ends = [time.monotonic()]
        for _ in range(steps + 2):
            engine(input_ids=ids, labels=ids).loss.backward()
            engine.step()
            ends.append(time.monotonic())
    return [after - before for before, after in pairwise(ends[2:])]


def measure(one: Configuration, ssd: Sequence[Path], steps: int) -> Row:
    """Plan, then run."""
    began = time.monotonic()
    chosen, chunk_flops = predict(one, ssd)
    took = time.monotonic() - began
    if not chosen.fits:
        raise click.ClickException(f"{one.name}: {' '.join(chosen.missing)}")
    return Row(
        one.name, one.regime, chosen.step_seconds, run(one, ssd, chosen, steps, chunk_flops), chosen.bound.value,
        chosen.deferred_fraction, chosen.saved_activation_bytes, took,
    )  # fmt: skip


@click.command()
@click.option(
    "--ssd", type=click.Path(path_type=Path, exists=True, file_okay=False), multiple=True, required=True
)
@click.option("--only", type=int, multiple=True, help="Numbers of configurations, from 1. Default: all.")
@click.option("--steps", default=4, show_default=True, help="Measured, after two that fill the pipeline.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False))
def main(ssd: tuple[Path, ...], only: tuple[int, ...], steps: int, json_file: Path | None) -> None:
    """Predicted and measured step time of each configuration, and the median and worst error."""
    click.echo(
        f"{'':>2}  {'configuration':28}{'bound':>15}{'defer':>7}{'kept':>9}{'predicted':>11}{'measured':>10}"
        f"{'ratio':>7}  (min - max)"
    )
    rows = []
    try:
        for number, configuration in enumerate(CONFIGURATIONS, 1):
            if only and number not in only:
                continue
            row = measure(configuration, ssd, steps)
            rows.append(row)
            click.echo(
                f"{number:>2}  {row.name:28}{row.bound:>15}{row.deferred_fraction:>7.2f}"
                f"{row.saved_activation_bytes >> 20:>5} MiB{row.predicted:>9.2f} s{row.measured:>8.2f} s"
                f"{row.ratio:>7.2f}"
                f"  ({row.predicted / max(row.steps):.2f} - {row.predicted / min(row.steps):.2f})"
            )
    finally:
        for path in ssd:
            shutil.rmtree(path / NAME, ignore_errors=True)
    errors = [abs(row.ratio - 1) for row in rows]
    if errors:
        click.echo(
            f"error: {statistics.median(errors):.1%} median, {max(errors):.1%} worst, of {len(errors)}"
        )
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
