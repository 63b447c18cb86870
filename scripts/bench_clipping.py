"""What clipping by the global norm costs: step time without it, by deferral, and by speculation.

On an emulated accelerator (its computing is a timed wait, the norm of its gradients is what it is told) with paced
drives, and everything else real. By speculation once where clipping never strikes and once where it strikes in every
step. Each way is planned first, with the rates that the emulated hardware has; they take turns.

    python scripts/bench_clipping.py --ssd DIR
"""

import json
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).parent))

from bench_overlap import LINK, MEMORY
from bench_plan import NAME, Configuration, emulated, run

from common.units import parse_bytes
from fuyou.optimizer.clipping import ClipBy
from fuyou.planner import Machine, RunPlan, describe_training, plan
from fuyou.planner.evaluate import SAVE_NOTHING
from fuyou.planner.rates import TaskRates

TFLOPS, DRIVE, HOST = 10, 1e9, "900MiB"
ADAM = 2.2e8
"""Parameters per second, as bench_overlap.py has found it beside all else: no bound here."""
LIMIT = 1.0


@dataclass
class Row:
    """One way with one batch."""

    batch: int
    way: str
    deferred_fraction: float
    """Of the blocks, chosen by the planner; all by deferral."""
    predicted: float
    """Seconds of a step."""
    clip_by: str | None = None
    clipped: bool = False
    """Whether every step is."""
    steps: list[float] = field(default_factory=list)
    """Measured, of all rounds."""

    @property
    def seconds(self) -> float:
        return statistics.median(self.steps)


def configuration(batch: int) -> Configuration:
    """The balanced one of bench_plan.py, with another batch."""
    return Configuration(f"batch {batch}", "gpu and ssd", batch, emulated(TFLOPS, "1GB/s"), HOST, micro_batch=8)


def machine_of(drives: int) -> Machine:
    """The emulated one."""
    rates = TaskRates(TFLOPS * 1e12, LINK, LINK, DRIVE * drives, DRIVE * drives, ADAM)
    return Machine("an emulated device", "paced drives", rates, MEMORY, parse_bytes(HOST), drives, all_flops=False)


def plans(batch: int, machine: Machine) -> list[tuple[Row, RunPlan]]:
    """Every way, planned."""
    one = configuration(batch)
    job = replace(
        describe_training(one.config, batch, one.seq_len, micro_batch=one.micro_batch), activation_policy=SAVE_NOTHING
    )
    choice = plan(replace(job, clips=True), machine)
    assert choice.clip_by is not None
    click.echo(
        f"batch {batch}: where clipping is expected in {job.clipped_share:.1%} of the steps, the planner takes "
        f"{choice.clip_by.value}"
    )
    never = replace(job, clips=True, clip_by=ClipBy.SPECULATION, clipped_share=0.0)
    speculation = plan(never, machine)
    always = plan(replace(never, clipped_share=1.0, deferred_fraction=speculation.deferred_fraction), machine)
    ways = (
        ("no clipping", plan(job, machine), False),
        ("deferral", plan(replace(job, clips=True, clip_by=ClipBy.DEFERRAL), machine), False),
        ("speculation, never struck", speculation, False),
        ("speculation, always struck", always, True),
    )
    return [
        (Row(batch, name, found.deferred_fraction, found.step_seconds, found.clip_by and found.clip_by.value, clipped),
         found)
        for name, found, clipped in ways
    ]  # fmt: skip


def measure(row: Row, found: RunPlan, ssd: Sequence[Path], steps: int) -> None:
    """Add steps to ``row``."""
    one = configuration(row.batch)
    options: dict[str, Any] = {} if row.clip_by is None else {"max_grad_norm": LIMIT, "clip_by": row.clip_by}
    one = replace(one, device=f"{one.device},norm={2 * LIMIT if row.clipped else LIMIT / 2}")
    row.steps += run(one, ssd, found, steps, **options)


@click.command()
@click.option("--ssd", type=click.Path(path_type=Path, exists=True, file_okay=False), multiple=True, required=True)
@click.option("--batch", type=int, multiple=True, default=(32, 48, 64), show_default=True)
@click.option("--rounds", default=1, show_default=True, help="In each, every way has its turn.")
@click.option("--steps", default=3, show_default=True, help="Measured in a turn, after two that fill the pipeline.")
@click.option("--dry-run", is_flag=True, help="Plan only.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False))
def main(
    ssd: tuple[Path, ...], batch: tuple[int, ...], rounds: int, steps: int, dry_run: bool, json_file: Path | None
) -> None:
    """Predicted and measured step time of every way, and what it is of a step without clipping."""
    rows, machine = [], machine_of(len(ssd))
    try:
        for size in batch:
            planned = plans(size, machine)
            for _ in range(0 if dry_run else rounds):
                for row, found in planned:
                    measure(row, found, ssd, steps)
            first = planned[0][0]
            for row, _ in planned:
                show(row, first)
            rows += [row for row, _ in planned]
    finally:
        for path in ssd:
            shutil.rmtree(path / NAME, ignore_errors=True)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def show(row: Row, first: Row) -> None:
    """One line; ``first`` is the step without clipping."""
    text = f"{row.way:28}deferred {row.deferred_fraction:4.2f}  "
    text += f"predicted {row.predicted:5.2f} s ({row.predicted / first.predicted:.2f})"
    if row.steps:
        text += (
            f"  measured {row.seconds:5.2f} s ({row.seconds / first.seconds:.2f})  "
            f"ratio {row.predicted / row.seconds:.2f}  ({min(row.steps):.2f} - {max(row.steps):.2f})"
        )
    click.echo(text)


if __name__ == "__main__":
    main()
