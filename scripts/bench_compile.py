"""Claim: compiled blocks give the same losses but for rounding; this measures what time they take beside eager ones.

Two engines train the same model on the same batches and take turns, step by step, one of them with ``compile=True``.
States stay in host memory, so that computing bounds the step.

    python scripts/bench_compile.py --ssd DIR --dtype fp32 --rounds 6
"""

import shutil
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import click
import torch
from transformers import LlamaConfig

import fuyou
from common.hardware.machine import describe_machine

VOCABULARY = 32_000


def llama(width: int, layers: int) -> LlamaConfig:
    """Return a Llama of Llama's proportions: 24 blocks of 1,024 are 370 M parameters."""
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        vocab_size=VOCABULARY,
    )


@click.command()
@click.option("--ssd", type=click.Path(path_type=Path, exists=True), required=True, help="For stores, which go again.")
@click.option("--dtype", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True)
@click.option("--width", default=1024, show_default=True)
@click.option("--layers", default=24, show_default=True)
@click.option("--rows", default=4, show_default=True)
@click.option("--tokens", default=512, show_default=True)
@click.option("--rounds", default=6, show_default=True, help="Steps of each, after one to warm up.")
@click.option("--device", default="auto", show_default=True)
def main(ssd: Path, dtype: str, width: int, layers: int, rows: int, tokens: int, rounds: int, device: str) -> None:
    """Print seconds of a step, eager and compiled, in turns."""
    config, work = llama(width, layers), Path(tempfile.mkdtemp(dir=ssd))
    generator = torch.Generator().manual_seed(0)
    feed = [torch.randint(VOCABULARY, (rows, tokens), generator=generator) for _ in range(1 + rounds)]
    try:
        with ExitStack() as stack:
            engines = {
                name: stack.enter_context(
                    fuyou.Engine(
                        config,
                        ssd=[work],
                        run_name=name,
                        dtype=dtype,
                        device=device,
                        batch_shape=(rows, tokens),
                        host_memory="8GiB",
                        lr=1e-4,
                        commit_every=100,
                        prove=False,
                        compile=name == "compiled",
                    )
                )
                for name in ("eager", "compiled")
            }
            losses: dict[str, list[float]] = {name: [] for name in engines}
            norms: dict[str, list[float]] = {name: [] for name in engines}
            seconds: dict[str, list[float]] = {name: [] for name in engines}
            for ids in feed:
                for name, engine in engines.items():
                    start = time.perf_counter()
                    engine(input_ids=ids, labels=ids).loss.backward()
                    report = engine.step()
                    seconds[name].append(time.perf_counter() - start)
                    losses[name].append(report.loss)
                    norms[name].append(report.grad_norm)
                    click.echo(f"{name:9} step {report.step}: {seconds[name][-1]:7.2f} s  loss {report.loss:.6f}")
            parameters = engines["eager"].parameters
    finally:
        shutil.rmtree(work)
    off, off_norm = (
        max(abs(one / other - 1) for one, other in zip(each["compiled"], each["eager"], strict=True))
        for each in (losses, norms)
    )
    pairs = [one / other for one, other in zip(seconds["eager"][1:], seconds["compiled"][1:], strict=True)]
    click.echo(f"{describe_machine()}; {dtype}, {parameters / 1e6:.0f} M parameters, {rows} x {tokens} tokens")
    for name, took in seconds.items():
        click.echo(f"{name:9} {statistics.median(took[1:]):7.2f} s a step; the first {took[0]:.1f} s")
    click.echo(
        f"compiled blocks: {statistics.median(pairs):.2f} times as fast ({min(pairs):.2f} to {max(pairs):.2f} over "
        f"{len(pairs)} pairs); losses differ by at most {off:.1e} of themselves, norms by {off_norm:.1e}"
    )


if __name__ == "__main__":
    main()
