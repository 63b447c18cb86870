"""Claims: the planner keeps as many activations as is best; vertical micro-batches are worth what was promised.

On an emulated accelerator (its computing is a timed wait), with everything else real. First every amount is run, from
nothing to all operator outputs that save computing, in all blocks and in half of them (figure 9 of the Fuyou paper is
such a sweep), and what the planner chose; then the same tokens as single micro-batches without deferral, which is how
the paper's scheme runs a step, and as the planner runs them.

    python scripts/bench_swap.py --ssd DIR
    python scripts/bench_swap.py --ssd DIR --claim amounts --outputs 0 --outputs 11    some rows of the sweep only
"""

import json
import shutil
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).parent))

from bench_plan import NAME, Configuration, emulated, machine_of, run

from fuyou.model.recompute.policy import ActivationPolicy, savable_outputs
from fuyou.planner import RunPlan, describe_training, plan
from fuyou.planner.evaluate import Evaluator

SWAP = Configuration("compute-bound", "gpu", 32, emulated(6, "2GB/s", memory="1GiB"), "3GiB", micro_batch=8)
VERTICAL = Configuration("64 sequences", "gpu", 64, emulated(10, "1GB/s"), "900MiB", micro_batch=8)


@dataclass(frozen=True)
class Try:
    """One way to run a configuration."""

    name: str
    predicted: float
    """Seconds of a step, simulated."""
    steps: list[float]
    """Measured."""
    kept_bytes: int

    @property
    def seconds(self) -> float:
        return statistics.median(self.steps)


def amounts(evaluator: Evaluator, only: Sequence[int]) -> Iterator[tuple[str, ActivationPolicy]]:
    """Nothing, then more and more outputs, those that save most per byte first: in half of the blocks, in all.

    ``only``: so many outputs; empty: all numbers of them.
    """
    layers = len(evaluator.job.shape.blocks)
    if not only or 0 in only:
        yield "nothing", ActivationPolicy((), 0)
    assert evaluator.trace is not None
    operators: tuple[tuple[str, int], ...] = ()
    for output in savable_outputs(evaluator.trace, cost=evaluator.cost).outputs:
        operators = (*operators, (output.operator, output.ordinal))
        if output.saved_flops > 0 and (not only or len(operators) in only):
            for count in (layers // 2, layers):
                yield f"{len(operators)} outputs in {count} of {layers} blocks", ActivationPolicy(operators, count)


def attempt(name: str, one: Configuration, ssd: Sequence[Path], chosen: RunPlan, steps: int) -> Try:
    """Run what ``chosen`` says."""
    return Try(name, chosen.step_seconds, run(one, ssd, chosen, steps), chosen.kept_activation_bytes)


def show(row: Try, best: float) -> None:
    """One line of a table."""
    click.echo(
        f"    {row.name:36}{row.kept_bytes >> 20:>7} MiB{row.predicted:>9.2f} s{row.seconds:>8.2f} s"
        f"{row.seconds / best:>8.3f}  ({min(row.steps):.2f} - {max(row.steps):.2f})"
    )


def sweep(one: Configuration, ssd: Sequence[Path], steps: int, only: Sequence[int]) -> list[Try]:
    """Every amount (``only``: see :func:`amounts`) with the planner's other choices, and the planner's choice last."""
    job = describe_training(one.config, one.batch, one.seq_len, micro_batch=one.micro_batch)
    machine = machine_of(one, job, ssd)
    chosen = plan(job, machine)
    evaluator = Evaluator(job, machine)
    rows = []
    for name, activation_policy in amounts(evaluator, only):
        fixed = plan(
            replace(job, activation_policy=activation_policy, deferred_fraction=chosen.deferred_fraction), machine
        )
        if fixed.fits:
            rows.append(attempt(name, one, ssd, fixed, steps))
    rows.append(attempt("the planner's choice", one, ssd, chosen, steps))
    best = min(row.seconds for row in rows)
    click.echo(f"{one.name}: {one.batch} sequences in micro-batches of {one.micro_batch} on {one.device}")
    click.echo(f"    {'kept':36}{'per step':>11}{'predicted':>11}{'measured':>10}{'/best':>8}  (min - max)")
    for row in rows:
        show(row, best)
    return rows


def vertical(one: Configuration, ssd: Sequence[Path], steps: int) -> tuple[float, float]:
    """Promised and measured gain over single micro-batches without deferral and without what is kept."""
    assert one.micro_batch is not None
    single = replace(one, batch=one.micro_batch)
    times = []
    for shape, whole in ((single, False), (one, True)):
        job = describe_training(shape.config, shape.batch, shape.seq_len, micro_batch=shape.micro_batch)
        machine = machine_of(shape, job, ssd)
        if not whole:
            job = replace(job, activation_policy=ActivationPolicy((), 0), deferred_fraction=0.0)
        row = attempt(shape.name, shape, ssd, plan(job, machine), steps)
        scale = one.batch / shape.batch
        times.append((row.predicted * scale, row.seconds * scale))
    (old_predicted, old), (new_predicted, new) = times
    promised, measured = old_predicted / new_predicted, old / new
    click.echo(
        f"{one.batch} sequences: {old:.2f} s as single micro-batches of {one.micro_batch}, {new:.2f} s as the planner "
        f"runs them: {measured:.2f}x, where {promised:.2f}x was promised ({measured / promised - 1:+.1%})"
    )
    return promised, measured


@click.command()
@click.option("--ssd", type=click.Path(path_type=Path, exists=True, file_okay=False), multiple=True, required=True)
@click.option("--steps", default=4, show_default=True, help="Measured, after two that fill the pipeline.")
@click.option("--claim", type=click.Choice(["amounts", "vertical", "both"]), default="both", show_default=True)
@click.option("--outputs", type=int, multiple=True, help="Try so many kept outputs. Default: all numbers of them.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False))
def main(ssd: tuple[Path, ...], steps: int, claim: str, outputs: tuple[int, ...], json_file: Path | None) -> None:
    """Step time by amount of activations kept, and the gain of vertical micro-batches and deferral."""
    found: dict[str, Any] = {}
    try:
        if claim != "vertical":
            found["amounts"] = [asdict(row) for row in sweep(SWAP, ssd, steps, outputs)]
        if claim != "amounts":
            found["promised"], found["measured"] = vertical(VERTICAL, ssd, steps)
    finally:
        for path in ssd:
            shutil.rmtree(path / NAME, ignore_errors=True)
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
