"""What our planner predicts for the paper's own scheme, beside every number that the paper's text gives.

Fuyou: Liao et al. 2024, "Adding NVMe SSDs to Enable and Accelerate 100B Model Fine-tuning on a Single GPU",
arXiv:2403.06504. One set of rates for all rows, each with its source below; nothing is fitted to a row. Beside each
throughput stands what our own scheme would do on the same machine.

    python scripts/reproduce_fuyou.py
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import click

from common.hardware.presets import drive_preset, gpu_preset
from fuyou.planner import Machine, PaperScheme, TrainingJob, describe_training, plan, preset_machine
from fuyou.planner.advice import fits_our_scheme, largest_model

SEQ_LEN = 1024
"""Section 5.1."""
DRIVES = 12
"""Table 3: twelve Intel P5510 of 3.84 TB; their rates are their specification's (configs/drives)."""
DRIVES_LIMIT = 24.5e9
"""Most bytes per second to and from all drives: what one PCI Express 4.0 link of 16 lanes reached on an A100 server
(nvbandwidth issues 11 and 53; configs/gpus/a100-80g.toml). Assumed: the paper does not say how the drives are
attached, but counts SSD traffic as simplex (4.3), and more than six drives (27 GB/s of it) gained little (5.7)."""
ADAM = 3.9e9
"""Parameters per second of DeepSpeed's CPU-Adam, on which the paper's optimizer stands. Not confirmed: from memory of
ZeRO-Offload (Ren et al. 2021, arXiv:2101.06840), table 4, 2.57 s for 10 B parameters. What hangs on it: with 2.0e9, the
throughputs of 13B predicted below fall by less than 1 %, those of larger models by 5 to 13 %, the gains of overlapping
change by up to 5 %, and sizes and swaps not at all."""


@dataclass(frozen=True)
class Throughput:
    model: str
    gpu: str
    batch: int
    published: float
    """TFLOP/s with recomputation."""
    where: str
    """Section, and where the batch size is from."""


THROUGHPUTS = (
    Throughput("gpt3-13b", "a100-80g", 80, 202, "5.3; largest batch that 5.6 names"),
    Throughput("gpt3-13b", "rtx-4090", 64, 156, "5.3; largest batch that 5.4 names"),
    Throughput("gpt3-175b", "a100-80g", 64, 173, "5.3; batch assumed as for 276B"),
    Throughput("gpt3-175b", "rtx-4090", 16, 86, "5.3; largest batch that 5.4 names"),
    Throughput("gpt3-276b", "a100-80g", 64, 168, "5.3"),
    Throughput("gpt3-412b", "a100-80g", 64, 163, "5.3"),
)
"""The batches on an RTX 4090 agree with the evaluation data published with Ratel (ICDE 2025), as this paper was called
later: 155.8 TFLOP/s at 64 and 86.9 at 16 on such a server. It has no data on an A100."""
SIZES = (
    ("rtx-4090", 128, "gpt3-65b"),
    ("rtx-4090", 768, "gpt3-276b"),
    ("a100-80g", 768, "gpt3-805b"),
    ("a100-80g", 384, None),
)
"""(GPU, host memory in GB, model): section 5.2. None: more than an RTX 4090 can there ("no less than 384 GB")."""
OVERLAP = (
    ("gpt3-13b", 8, 1.09), ("gpt3-13b", 16, 1.25), ("gpt3-13b", 32, 1.38), ("gpt3-13b", 64, 1.22),
    ("gpt3-175b", 8, 1.16), ("gpt3-175b", 16, 1.18),
)  # fmt: skip
"""(model, batch, throughput over that without overlap): section 5.4, on an RTX 4090."""
SWAPS = ((32, False), (64, True), (80, True))
"""(batch, whether activations are swapped): section 5.6, 13B on an A100."""


def machine(gpu: str, host_gb: int = 768) -> Machine:
    """The server of table 3 with one of its GPUs. Memory modules come in powers of two: a GB is 2**30 bytes."""
    return preset_machine(
        gpu_preset(gpu), drive_preset("intel-p5510-3.84tb"), DRIVES, host_gb << 30, drives_limit=DRIVES_LIMIT,
        adam_parameters_per_second=ADAM,
    )  # fmt: skip


@cache
def _model(name: str) -> TrainingJob:
    return describe_training(name, 1, SEQ_LEN)


def paper(name: str, batch: int, on: Machine, overlaps: bool = True) -> PaperScheme:
    """The paper's scheme."""
    return PaperScheme(_model(name).with_batch(batch), on, overlaps)


def tflops(scheme: PaperScheme) -> float:
    """With recomputation, as the paper counts."""
    result = scheme.plan()
    return result.hardware_flops_per_second / 1e12 if result.fits else float("nan")


def ours(name: str, batch: int, on: Machine) -> float | None:
    """TFLOP/s of our scheme, counted as if it recomputed every block, to compare; None if it does not fit."""
    job = _model(name).with_batch(batch)
    result = plan(job, on)
    return job.tokens * job.hardware_flops_per_token / result.step_seconds / 1e12 if result.fits else None


def largest(gpu: str, host_gb: int, scheme: str) -> str:
    """Largest of the paper's models at batch 1."""
    on = machine(gpu, host_gb)

    def fits(job: TrainingJob) -> bool:
        if not job.name.startswith("gpt3"):
            return False
        return not PaperScheme(job, on).missing() if scheme == "fuyou" else fits_our_scheme(job, on)

    found = largest_model(_model, fits)
    return found.name if found else "none"


def misses(predicted: float, published: float) -> str:
    """``+12%``."""
    return f"{predicted / published - 1:+.0%}"


def report_sizes() -> list[str]:
    lines = ["Largest model, batch 1 (5.2)", f"{'':4}{'GPU':10}{'host':>7}  {'published':14}{'predicted':12}{'':6}ours"]
    for gpu, host, published in SIZES:
        predicted = largest(gpu, host, "fuyou")
        if published is None:
            smaller = largest("rtx-4090", host, "fuyou")
            good = _model(predicted).parameters > _model(smaller).parameters
            text = f"> {smaller}"
        else:
            good, text = predicted == published, published
        lines.append(
            f"{'':4}{gpu:10}{host:>4} GB  {text:14}{predicted:12}{'' if good else 'MISS':6}{largest(gpu, host, 'ours')}"
        )
    return lines


def report_throughputs(rows: Sequence[Throughput]) -> list[str]:
    lines = [
        "Throughput in TFLOP/s, recomputation counted (5.3); ours as if it recomputed everything, to compare",
        f"{'':4}{'model':11}{'GPU':10}{'batch':>5}{'published':>11}{'predicted':>11}{'':7}{'ours':>7}  source",
    ]
    for row in rows:
        on = machine(row.gpu)
        predicted, own = tflops(paper(row.model, row.batch, on)), ours(row.model, row.batch, on)
        lines.append(
            f"{'':4}{row.model:11}{row.gpu:10}{row.batch:>5}{row.published:>11.0f}{predicted:>11.0f}"
            f"{misses(predicted, row.published):>7}{'no fit' if own is None else format(own, '.0f'):>7}  {row.where}"
        )
    return lines


def report_overlap() -> list[str]:
    lines = [
        "Throughput with optimizer and backward pass overlapped, over that without (5.4, RTX 4090). Without it, Adam",
        "runs beside its I/O (4.4), and as many activations are swapped as is best for stages one after the other",
        f"{'':4}{'model':11}{'batch':>5}{'published':>11}{'predicted':>11}",
    ]
    for name, batch, published in OVERLAP:
        on = machine("rtx-4090")
        # In tokens: what is swapped differs, and with it the FLOPs that are done.
        gain = paper(name, batch, on).plan().tokens_per_second
        gain /= paper(name, batch, on, overlaps=False).plan().tokens_per_second
        lines.append(f"{'':4}{name:11}{batch:>5}{published:>10.2f}x{gain:>10.2f}x{misses(gain, published):>7}")
    return lines


def report_swaps() -> list[str]:
    lines = ["Swap coefficient, 13B on an A100 (5.6)", f"{'':4}{'batch':>5}{'published':>11}{'predicted':>11}"]
    for batch, swaps in SWAPS:
        coefficient = paper("gpt3-13b", batch, machine("a100-80g")).swap().coefficient
        good = (coefficient > 0) == swaps
        lines.append(f"{'':4}{batch:>5}{'above 0' if swaps else '0':>11}{coefficient:>11.2f}{'' if good else '  MISS'}")
    return lines


@click.command()
def main() -> None:
    """Print published figures, predictions, and by how much they differ."""
    on = machine("a100-80g")
    click.echo(
        f"Rates: blocks of a transformer at {on.rates.flops_per_second / 1e12:.0f} TFLOP/s on an A100 and "
        f"{machine('rtx-4090').rates.flops_per_second / 1e12:.0f} on an RTX 4090;\n"
        f"{DRIVES} drives, reading {on.rates.read_bytes_per_second / 1e9:.1f} or writing "
        f"{on.rates.write_bytes_per_second / 1e9:.1f} GB/s together; Adam {ADAM / 1e9:.1f} G parameters/s.\n"
        "Sources are in this script and in configs/."
    )
    for part in (report_sizes(), report_throughputs(THROUGHPUTS), report_overlap(), report_swaps()):
        click.echo("\n" + "\n".join(part))


if __name__ == "__main__":
    main()
