"""Measure what checking every read costs: steps with and without checksums, turn by turn, on slowed drives.

The device is emulated (emulated/device.py); drives, the optimizer, and checksums are real. The second process runs a
copy of the packages in which every checksum is 0.

    python scripts/bench_checks.py --ssd /mnt/nvme0 --steps 60
"""

import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("fuyou", "fcdp", "common", "cli", "scripts")
COMPUTED = {
    "return int(mixed_words(hashes + mixed_words(numbers * GOLDEN_STEP)).sum())": "return 0",
    "return int(mixed_words(mixed_words(numbers * GOLDEN_STEP)).sum())": "return 0",
    """    body = data.nbytes - data.nbytes % ALIGNMENT
    if isinstance(data, np.ndarray):""": """    return 0
    if isinstance(data, np.ndarray):""",
}


def copy_without_checksums(target: Path) -> None:
    """Copy the packages to ``target`` with checksums that are 0."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, target / package, ignore=shutil.ignore_patterns("__pycache__"))
    file = target / "common/store/checksums.py"
    text = file.read_text()
    for line, replacement in COMPUTED.items():
        if text.count(line) != 1:
            raise click.ClickException(f"checksums.py has changed; this line is not there once: {line}")
        text = text.replace(line, replacement)
    file.write_text(text)


def work(ssd: list[Path], device: str) -> None:
    """Run a step for each line on stdin and print its seconds."""
    import torch
    from emulated.device import emulated_device
    from transformers import LlamaConfig

    from fuyou.engine.engine import Engine

    config = LlamaConfig(
        vocab_size=1024, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16
    )
    tokens = torch.zeros(8, 128, dtype=torch.long)
    with Engine(
        config, ssd=ssd, device=emulated_device(device), dtype="bf16", host_memory="1GiB", host_cache=0,
        batch_shape=(8, 128), micro_batch=8, overwrite=True,
    ) as engine:  # fmt: skip
        for _ in sys.stdin:
            start = time.monotonic()
            engine(input_ids=tokens, labels=tokens).loss.backward()
            engine.step()
            print(time.monotonic() - start, time.process_time(), flush=True)


@click.command()
@click.option(
    "--ssd", type=click.Path(path_type=Path, exists=True, file_okay=False), multiple=True, required=True
)
@click.option("--steps", default=60, show_default=True, help="Steps of each.")
@click.option(
    "--device",
    default="emulated:tflops=10,memory=2GiB,link=10GB/s,ssd_read=700MB/s,ssd_write=600MB/s",
    show_default=True,
)
@click.option("--worker", is_flag=True, hidden=True)
def main(ssd: tuple[Path, ...], steps: int, device: str, worker: bool) -> None:
    """Print quartiles and means of a step's seconds with and without checksums, and the ratio."""
    if worker:
        work(list(ssd), device)
        return
    seconds: dict[str, list[float]] = {"checked": [], "unchecked": []}
    with tempfile.TemporaryDirectory() as temporary:
        copy_without_checksums(Path(temporary))
        workers = {}
        for name, root in (("checked", ROOT), ("unchecked", Path(temporary))):
            directories = [directory / name for directory in ssd]
            for directory in directories:
                directory.mkdir(exist_ok=True)
            arguments = [f"--ssd={directory}" for directory in directories]
            path = f"{root}{os.pathsep}{root / 'scripts'}"
            workers[name] = subprocess.Popen(
                [sys.executable, str(root / "scripts/bench_checks.py"), *arguments, f"--device={device}", "--worker"],
                cwd=root, env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                text=True,
            )  # fmt: skip
        for step in range(steps + 2):
            for name, process in workers.items():
                assert process.stdin is not None and process.stdout is not None
                print(file=process.stdin, flush=True)
                took = float(process.stdout.readline().split()[0])
                if step >= 2:
                    seconds[name].append(took)
        for process in workers.values():
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
    for name, values in seconds.items():
        lower, median, upper = statistics.quantiles(values, n=4)
        click.echo(
            f"{name:10} quartiles {lower:.3f} {median:.3f} {upper:.3f} s, mean {statistics.mean(values):.3f} s"
        )
    pairs = list(zip(seconds["checked"], seconds["unchecked"], strict=True))
    low, high = interval(pairs)
    click.echo(
        f"checked / unchecked, {len(pairs)} pairs: median {statistics.median(a / b for a, b in pairs):.4f}, sums "
        f"{ratio(pairs):.4f} (95% interval {low:.4f} to {high:.4f})"
    )


def ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the ratio of all seconds with checksums to all without."""
    checked, unchecked = zip(*pairs, strict=True)
    return sum(checked) / sum(unchecked)


def interval(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the bounds that hold 95% of the ratios of random draws of as many pairs (bootstrap)."""
    draw = random.Random(0)
    ratios = sorted(ratio(draw.choices(pairs, k=len(pairs))) for _ in range(2000))
    return ratios[50], ratios[-51]


if __name__ == "__main__":
    main()
