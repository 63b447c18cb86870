"""How well storage, links, Adam and computing overlap: step time over the largest bound, in every regime.

The accelerator is emulated (its computing is a timed wait) and the drives are paced, so that every bound is known;
files, buffers, Adam, processes and scheduling are real. Nothing here says how fast anything is: only what is lost
between the parts.

    python scripts/bench_overlap.py --ssd DIR
"""

import json
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import click
import torch
from transformers import LlamaConfig

from common.hardware.machine import cpu_count
from common.models.meta_model import build_meta_model
from common.units import parse_bytes
from fuyou import Engine
from fuyou.layout.deferred import interleaved
from fuyou.layout.record import Precision
from fuyou.model.model_records import model_records
from fuyou.model.recompute.policy import ActivationPlanner
from fuyou.model.streamed_model import StreamedModel
from fuyou.optimizer.adam import AdamConfig, Update
from fuyou.optimizer.chunk_update import ChunkOptimizer
from fuyou.optimizer.kernel_trial import tried_kernels
from fuyou.optimizer.moments import OptimizerStates
from fuyou.planner.rates import TaskRates
from fuyou.planner.simulator import simulate
from fuyou.schedule.memory_planner import MemoryPlanner

CONFIG = LlamaConfig(
    hidden_size=1024, intermediate_size=2816, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=16,
    vocab_size=8000, max_position_embeddings=2048,
)  # fmt: skip
SEQ_LEN = 512
LINK, MEMORY = 20e9, 24 << 30


@dataclass(frozen=True)
class Row:
    """One batch size."""

    batch: int
    deferred: float
    """Fraction of the blocks whose updates wait for the next forward pass, chosen by simulation."""
    gpu: float
    """Seconds of computing in a step: the first bound."""
    ssd: float
    """Seconds that the paced drives need for the bytes of a step: the second bound."""
    adam: float
    """Seconds that Adam was computing: the third, measured."""
    simulated: float
    """Seconds of a step on the simulator's clock."""
    steps: list[float]
    """Measured seconds of each step after the warm-up."""
    idle: dict[str, float]
    """What the accelerator waited for in the last step, in seconds."""

    @property
    def bound(self) -> float:
        return max(self.gpu, self.ssd, self.adam)

    @property
    def step(self) -> float:
        return statistics.median(self.steps)


def adam_rate(threads: int) -> float:
    """Parameters per second of the optimizer's arithmetic, states in memory."""
    torch.set_num_threads(threads)
    count = 8 << 20
    high, gradient = (torch.zeros(count, dtype=torch.bfloat16) for _ in range(2))
    states = OptimizerStates.before_training(high, torch.zeros(count, dtype=torch.int16))
    adam, seconds = ChunkOptimizer(kernels=tried_kernels()), []
    for step in range(1, 6):
        began = time.perf_counter()
        adam.update(states, gradient, Update(step, AdamConfig()), decay=True)
        seconds.append(time.perf_counter() - began)
    return count / min(seconds)


def measure(
    ssd: Sequence[Path], batch: int, tflops: float, read: float, write: float, host: int, steps: int, kept: int
) -> Row:
    """Run one batch size, with up to ``kept`` bytes of operator outputs kept of each block and micro-batch."""
    stack = StreamedModel(build_meta_model(CONFIG, dtype=torch.bfloat16), torch.device("cpu"))
    shape = model_records(stack, Precision(torch.bfloat16, torch.float32))
    rates = TaskRates(
        tflops * 1e12, LINK, LINK, read * len(ssd), write * len(ssd), adam_rate(max(1, cpu_count() - 2))
    )  # fmt: skip
    micro = min(batch, 8)
    activations = ActivationPlanner(stack, "cuda", torch.bfloat16, kept)
    recomputation = activations.recomputation(micro, SEQ_LEN)
    kept_bytes = activations.saved(micro, SEQ_LEN).nbytes

    def simulated(fraction: float) -> float:
        deferred = interleaved(shape, fraction)
        planner = MemoryPlanner(
            shape, CONFIG, MEMORY, host, False, deferred=len(deferred), host_cache=0,
            kept_layers=len(activations.layers), kept_bytes=lambda batch: kept_bytes,
        )  # fmt: skip
        plan = planner.plan(batch, SEQ_LEN, micro)
        return simulate(shape, plan, rates, deferred, recomputation=recomputation)[0].step_seconds()

    layers = len(shape.blocks)
    fraction = min((count / layers for count in range(layers // 2 + 1)), key=simulated)
    device = f"emulated:tflops={tflops},memory={MEMORY},link={LINK:.0f}/s,ssd_read={read:.0f}/s,ssd_write={write:.0f}/s"
    ids = torch.randint(0, CONFIG.vocab_size, (batch, SEQ_LEN))
    with Engine(
        CONFIG, ssd=ssd, device=device, host_memory=host, host_cache=0, micro_batch=micro, batch_shape=(batch, SEQ_LEN),
        deferred_fraction=fraction, kept_activations=kept, run_name="bench-overlap", overwrite=True,
        dtype="bf16",
    ) as engine:  # fmt: skip
        ends, reports = [time.monotonic()], []
        for _ in range(steps + 2):  # two to fill the pipeline
            engine(input_ids=ids, labels=ids).loss.backward()
            reports.append(engine.step())
            ends.append(time.monotonic())
        last = reports[-1]
        return Row(
            batch, fraction, last.bound_seconds["gpu"],
            last.planned_read_bytes / rates.read_bytes_per_second
            + last.planned_written_bytes / rates.write_bytes_per_second,
            statistics.median(report.bound_seconds["adam"] for report in reports[2:]),
            simulated(fraction), [after - before for before, after in pairwise(ends[2:])],
            last.idle_seconds,
        )  # fmt: skip


@click.command()
@click.option("--ssd", type=click.Path(path_type=Path, exists=True, file_okay=False), multiple=True, required=True)
@click.option("--batch", type=int, multiple=True, default=(4, 16, 32, 48, 64, 80, 96, 160), show_default=True)
@click.option("--tflops", default=10.0, show_default=True, help="Of the emulated accelerator.")
@click.option("--read", default="1GB", show_default=True, help="Bytes per second of a paced drive.")
@click.option("--write", default="1GB", show_default=True)
@click.option("--host-memory", default="900MiB", show_default=True)
@click.option("--steps", default=4, show_default=True, help="Measured, after two that fill the pipeline.")
@click.option("--kept", default="0", show_default=True, help="Bytes of outputs kept of each block and micro-batch.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False))
def main(
    ssd: tuple[Path, ...], batch: tuple[int, ...], tflops: float, read: str, write: str, host_memory: str, steps: int,
    kept: str, json_file: Path | None,
) -> None:  # fmt: skip
    """Step time over the largest bound, by batch size, on an emulated accelerator with paced drives."""
    click.echo(
        f"emulated accelerator of {tflops:g} TFLOP/s, {len(ssd)} drive(s) paced to {read}/s read and {write}/s write; "
        f"{SEQ_LEN} tokens per sequence; seconds per step"
    )
    click.echo(f"{'batch':>6} {'gpu':>7} {'ssd':>7} {'adam':>7} {'defer':>6} {'simulated':>10} {'measured':>9}  "
               f"{'over bound':>10} {'(min - max)':>15}  idle for")  # fmt: skip
    rows = []
    try:
        for size in batch:
            row = measure(
                ssd,
                size,
                tflops,
                float(parse_bytes(read)),
                float(parse_bytes(write)),
                parse_bytes(host_memory),
                steps,
                parse_bytes(kept),
            )
            rows.append(row)
            idle = ", ".join(
                f"{name} {seconds:.2f}" for name, seconds in sorted(row.idle.items(), key=lambda item: -item[1])
                if seconds >= 0.01
            )  # fmt: skip
            click.echo(
                f"{size:>6} {row.gpu:>7.2f} {row.ssd:>7.2f} {row.adam:>7.2f} {row.deferred:>6.2f} "
                f"{row.simulated:>10.2f} {row.step:>9.2f}  {row.step / row.bound:>10.3f} "
                f"{f'({min(row.steps) / row.bound:.3f} - {max(row.steps) / row.bound:.3f})':>15}  {idle}"
            )
    finally:
        for path in ssd:
            shutil.rmtree(path / "bench-overlap", ignore_errors=True)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
