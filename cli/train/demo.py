"""``finetune --demo``: a whole run on any machine in under two minutes, without a network or a GPU."""

import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.job.prepare import quiet_transformers
from cli.options.schedule import Warmup
from cli.options.settings import Settings
from cli.train.interrupts import Interrupts
from cli.train.loop import RunResult
from cli.train.one_machine import finetune
from common.randomness import own_random_numbers
from common.units import format_bytes, format_count, format_seconds

PROMPT = "The module provides"


@dataclass(frozen=True)
class DemoSize:
    """Sizes of the demonstration."""

    hidden: int = 320
    layers: int = 24
    vocab: int = 4096
    host_memory: int = 208 << 20  # Host memory that the run may take; 120 MiB of it are a fixed allowance
    steps: int = 32
    batch_size: int = 4
    seq_len: int = 128
    lr: float = 1e-3
    new_tokens: int = 24


def run_demo(
    output: Path | None, report: Path | None, debug: bool, interrupts: Interrupts, size: DemoSize | None = None
) -> None:
    """Write a checkpoint and data, train out of core, load the result and let it continue a prompt."""
    size = size or DemoSize()
    start_time = time.monotonic()
    folder = (output or Path("finetune-output") / "demo").expanduser().absolute()
    checkpoint, data, tuned = folder / "checkpoint", folder / "data.jsonl", folder / "tuned"
    if not debug:
        quiet_transformers()
    print(f"demo     a small Llama with random weights and English text from Python itself, in {folder}", flush=True)
    write_checkpoint(checkpoint, size)
    write_data(data)
    settings = Settings(
        model=str(checkpoint),
        data=(str(data),),
        gpu="cpu",
        host_memory=size.host_memory,
        batch_size=size.batch_size,
        seq_len=size.seq_len,
        steps=size.steps,
        lr=size.lr,
        warmup=Warmup(0.1, is_fraction=True),
        output=tuned,
        overwrite=True,
        report=report,
        debug=debug,
    )
    settings = Settings(**{**vars(settings), "arguments": _equivalent(settings, size)})
    print("\n$ finetune " + " ".join(settings.arguments) + "\n", flush=True)
    result = finetune(settings, interrupts)
    print(f"\n{_summary(result, size)}\n")
    print(f'from_pretrained("{tuned}") says: {_generate(tuned, size.new_tokens)}')
    print(f"\nAll of it took {format_seconds(time.monotonic() - start_time)}.")


def _equivalent(settings: Settings, size: DemoSize) -> tuple[str, ...]:
    words = ["--model", settings.model, "--data", *settings.data, "--gpu", "cpu"]
    words += ["--host-memory", f"{size.host_memory >> 20}MiB", "--batch-size", str(size.batch_size)]
    words += ["--seq-len", str(size.seq_len), "--steps", str(size.steps), "--lr", f"{size.lr:g}", "--warmup", "10%"]
    return (*words, "--output", str(settings.output), "--overwrite")


def write_checkpoint(directory: Path, size: DemoSize) -> None:
    """Write a Llama in miniature with a byte-pair tokenizer, as any checkpoint from a hub looks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from common.data.demo_text import train_demo_tokenizer

    shutil.rmtree(directory, ignore_errors=True)
    config = LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.hidden * 8 // 3 // 32 * 32,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 64,
        num_key_value_heads=size.hidden // 64,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    with own_random_numbers(0):
        model = LlamaForCausalLM(config)
    model.save_pretrained(directory)
    train_demo_tokenizer(size.vocab, directory)


def write_data(file: Path) -> None:
    """Write English text from Python itself, a document a line, as ``--data`` takes it."""
    from common.data.demo_text import demo_documents

    with file.open("w") as out:
        for text in demo_documents():
            # Without the line breaks of a terminal 80 columns wide, which are all that a short run would learn.
            out.write(json.dumps({"text": " ".join(text.split())}) + "\n")


def _summary(result: RunResult, size: DemoSize) -> str:
    """Return what a run out of core is about: its states are larger than the memory it took."""
    report = result.report
    states = 12 * report.parameters
    used = report.host_peak_bytes - report.host_baseline_bytes
    return (
        f"{format_count(report.parameters)} parameters have {format_bytes(states)} of weights and optimizer states. "
        f"Training them took {format_bytes(used)} of memory; allowed were {format_bytes(size.host_memory)}.\n"
        f"The loss fell from {report.losses[0]:.2f} to {report.losses[-1]:.2f} in {report.steps} steps, and "
        f"{format_bytes(result.total_written)} were written to SSD."
    )


def _generate(directory: Path, new_tokens: int) -> str:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    with torch.no_grad(), own_random_numbers(0):
        tokens = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=new_tokens,
            do_sample=True,
            top_k=40,
        )
    return repr(str(tokenizer.decode(tokens[0], skip_special_tokens=True)))
