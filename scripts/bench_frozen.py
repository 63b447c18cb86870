"""What frozen weights in int8 or nf4 cost in loss, and save in bytes, beside frozen weights in bf16.

    python scripts/bench_frozen.py --ssd DIR --work DIR
    python scripts/bench_frozen.py --ssd DIR --work DIR --kept nf4 --seeds 5

A small Llama is trained in memory on Python's own documentation first (once: it stays in --work), so that its weights
are not random. Then LoRA fine-tunes it out of core on another kind of text, this repository's documentation, from the
same first adapters with the same batches for every dtype; one document in five is held out. Nothing is cached on the
host, so what is read in a step is all of the frozen weights, twice.
"""

import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, logging

import fuyou
from common.data.demo_text import demo_documents, train_demo_tokenizer
from common.models.adapters.options import AdapterOptions

VOCABULARY, SEQUENCE, ROWS = 2048, 128, 8
HIDDEN, LAYERS = 384, 8
RANK = 16
HERE = Path(__file__).parent.parent


@dataclass(frozen=True)
class Result:
    """One fine-tuning run."""

    before: float
    """Held-out loss of the checkpoint as its weights are kept."""
    after: float
    read: float
    """Bytes per step."""
    stored: int
    """Bytes of all frozen weights on SSD."""


def rows_of(documents: list[str], directory: Path) -> torch.Tensor:
    """Tokens ``[n, SEQUENCE]``, packed."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = [token for text in documents for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    return torch.tensor(ids[: len(ids) // SEQUENCE * SEQUENCE]).view(-1, SEQUENCE)


def draws(rows: torch.Tensor, count: int, seed: int) -> Iterator[torch.Tensor]:
    """``count`` batches ``[ROWS, SEQUENCE]``, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield rows[torch.randint(len(rows), (ROWS,), generator=generator)]


def make_checkpoint(directory: Path, steps: int) -> None:
    """A model that has learnt something, in bf16."""
    train_demo_tokenizer(VOCABULARY, directory)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=HIDDEN * 8 // 3, num_hidden_layers=LAYERS,
            num_attention_heads=HIDDEN // 64, max_position_embeddings=SEQUENCE, bos_token_id=1, eos_token_id=2,
            pad_token_id=0,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
    losses = []
    for ids in draws(rows_of(list(demo_documents()), directory), steps, 1):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(float(loss.detach()))
    click.echo(f"trained first: loss {losses[0]:.3f} to {statistics.mean(losses[-20:]):.3f} in {steps} steps", err=True)
    model.bfloat16().save_pretrained(directory)


def fine_tune(
    checkpoint: Path, ssd: Path, kept: str, seed: int, steps: int, trained: torch.Tensor, held_out: torch.Tensor
) -> Result:
    """LoRA out of core."""
    with (
        tempfile.TemporaryDirectory(dir=ssd) as directory,
        fuyou.Engine(
            checkpoint, dtype="bf16", ssd=[directory], lr=1e-3, adapters=AdapterOptions(RANK), seed=seed, host_cache=0,
            frozen_dtype=None if kept == "bf16" else kept, batch_shape=(ROWS, SEQUENCE),
        ) as engine,
    ):  # fmt: skip

        def evaluate() -> float:
            parts = [engine.eval_loss(input_ids=ids, labels=ids) * len(ids) for ids in held_out.split(ROWS)]
            return sum(parts) / len(held_out)

        before = evaluate()
        engine.flush()
        read = engine.io_bytes()[0]
        for step, ids in enumerate(draws(trained, steps, seed)):
            engine.lr = 1e-3 * (1 - step / steps)
            engine(input_ids=ids, labels=ids).loss.backward()
            engine.step()
        engine.flush()
        read = engine.io_bytes()[0] - read
        stored = sum(file.stat().st_size for file in Path(directory).rglob("weights.frozen"))
        return Result(before, evaluate(), read / steps, stored)


@click.command(help=__doc__)
@click.option("--ssd", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--work", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--kept", multiple=True, default=("int8", "nf4"), type=click.Choice(["int8", "nf4"]))
@click.option("--seeds", default=3, show_default=True)
@click.option("--steps", default=60, show_default=True)
@click.option("--first-steps", default=600, show_default=True, help="Of training the checkpoint.")
def main(ssd: Path, work: Path, kept: tuple[str, ...], seeds: int, steps: int, first_steps: int) -> None:
    """Measure."""
    logging.set_verbosity_error()
    checkpoint = work / "checkpoint"
    if not (checkpoint / "config.json").exists():
        make_checkpoint(checkpoint, first_steps)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    frozen = sum(parameter.numel() for parameter in model.parameters())
    in_blocks = sum(parameter.numel() for parameter in model.model.layers.parameters())
    documents = [part for file in sorted([*HERE.glob("*.md"), *HERE.glob("docs/*.md")])
                 for part in file.read_text().split("\n## ")]  # fmt: skip
    trained = rows_of([text for index, text in enumerate(documents) if index % 5], checkpoint)
    held_out = rows_of(documents[::5], checkpoint)
    click.echo(f"{frozen:,} frozen weights, {in_blocks:,} of them in the blocks; {len(trained)} and {len(held_out)} "
               f"rows of {SEQUENCE} tokens; {steps} steps of {ROWS}", err=True)  # fmt: skip
    found: dict[str, list[Result]] = {name: [] for name in ("bf16", *kept)}
    for seed in range(seeds):
        for name, results in found.items():
            results.append(fine_tune(checkpoint, ssd, name, seed, steps, trained, held_out))
            click.echo(f"seed {seed}, {name}: {results[-1]}", err=True)
    click.echo(
        "| frozen weights in | held-out loss before | after | apart from bf16, each seed | stored | read per step |"
    )
    click.echo("|---|---|---|---|---|---|")
    for name, results in found.items():
        apart = ", ".join(f"{one.after - base.after:+.4f}" for one, base in zip(results, found["bf16"], strict=True))
        after = statistics.mean(one.after for one in results)
        one = results[0]
        click.echo(
            f"| {name} | {one.before:.4f} | {after:.4f} | {'' if name == 'bf16' else apart} "
            f"| {one.stored / 2**20:.2f} MiB | {one.read / 2**20:.2f} MiB |"
        )


if __name__ == "__main__":
    main()
