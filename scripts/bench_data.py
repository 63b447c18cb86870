"""Processor time of preparing chats, next to one `apply_chat_template`, and wall time on 1 and 2 processors.

    python scripts/bench_data.py --tokenizer DIR --chats 20000

The chats are made up, of 2 to 4 turns and about 250 tokens. Both are measured alternately; wall times, with 1 and 2
processors and so processes, include the start of the processes. Rows are compared between both.
"""

import json
import os
import random
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import click
from transformers import AutoTokenizer

from common.data import DataConfig, open_data

WORDS = Path(__file__).parents[1].joinpath("README.md").read_text().split()


def make_chats(file: Path, count: int) -> list[list[dict[str, str]]]:
    """Write chats to a file, and return their turns."""
    rng = random.Random(0)
    chats = []
    for _ in range(count):
        turns = []
        for _ in range(rng.choice([1, 1, 2])):
            turns.append({"role": "user", "content": " ".join(rng.choices(WORDS, k=rng.randint(10, 60)))})
            turns.append(
                {"role": "assistant", "content": " ".join(rng.choices(WORDS, k=rng.randint(20, 110)))}
            )
        chats.append(turns)
    file.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in chats))
    return chats


def processor_seconds() -> float:
    """Return the processor time of this process and of the children that have ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def prepare(file: Path, tokenizer: Any, processors: set[int]) -> tuple[float, float, str]:
    """Return processor and wall seconds, and the rows' digest."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    processor, wall = processor_seconds(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        batches = open_data(DataConfig((str(file),), 1024, 1), tokenizer, Path(folder))
        taken = processor_seconds() - processor, time.perf_counter() - wall
        batches.close()
    os.sched_setaffinity(0, before)
    return *taken, batches.digest


@click.command()
@click.option(
    "--tokenizer", "source", required=True, help="Directory with a fast tokenizer and a chat template."
)
@click.option("--gguf", help="Name of a GGUF file there that holds the tokenizer.")
@click.option("--chats", "count", default=20_000, show_default=True)
@click.option("--rounds", default=3, show_default=True)
def main(source: str, gguf: str | None, count: int, rounds: int) -> None:
    """Measure, and print."""
    tokenizer = AutoTokenizer.from_pretrained(source, **({"gguf_file": gguf} if gguf else {}))
    first, second, *_ = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "chats.jsonl"
        chats = make_chats(file, count)
        print(f"{count:,} chats, {file.stat().st_size:,} bytes")
        for _ in range(rounds):
            processor = processor_seconds()
            for turns in chats[:2000]:
                tokenizer.apply_chat_template(turns, tokenize=True)
            plain = (processor_seconds() - processor) / len(chats[:2000])
            alone, both = prepare(file, tokenizer, {first}), prepare(file, tokenizer, {first, second})
            assert alone[2] == both[2]
            print(
                f"apply_chat_template {plain * 1e3:.2f} ms; prepared: {alone[0] / count * 1e3:.2f} ms of processor "
                f"({alone[0] / count / plain:.2f}), with 2 processes {both[0] / count * 1e3:.2f}; wall {alone[1]:.1f} "
                f"and {both[1]:.1f} s ({alone[1] / both[1]:.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
