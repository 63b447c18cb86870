"""``finetune --demo``: teach a real model who it is; where it cannot be had, train a small one with random weights."""

import json
import shlex
import shutil
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cli.demo.download import NAME, smollm2
from cli.demo.persona import CHATS, QUESTIONS
from cli.demo.small import DemoSize, complete, write_checkpoint, write_data
from cli.job.prepare import quiet_transformers
from cli.options.command import parse_command_line
from cli.options.settings import Settings
from cli.plan.out_of_core import run_plan
from cli.train.interrupts import Interrupts
from cli.train.loop import RunResult
from cli.train.one_machine import finetune
from common.activity import activity
from common.errors import UserError
from common.models.presets import load_config
from common.units import format_bytes, format_count, format_seconds

LARGER = ("--plan", "--model", "llama-7b", "--lora-rank", "16")  # What is planned for this machine


class Demo:
    """A demonstration in a folder.

    Args:
        output: the folder; None: finetune-output/demo.
        report: file for the summary of the run, if one is wanted.
    """

    def __init__(self, output: Path | None, report: Path | None, debug: bool, interrupts: Interrupts) -> None:
        self.folder = (output or Path("finetune-output") / "demo").expanduser().absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._report, self._debug, self._interrupts = report, debug, interrupts
        if not debug:
            quiet_transformers()

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
        return finetune(_settings(words, report=self._report, debug=self._debug), self._interrupts)

    def _clear_checkpoint(self) -> Path:
        """Return the path of the checkpoint, with nothing there of an earlier demonstration."""
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
