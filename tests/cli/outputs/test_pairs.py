"""After any run, an output directory holds what a run into an empty directory leaves, with any earlier content."""

import itertools
import json
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from cli.job.outputs import RESULT, RESULTS, Outputs
from cli.main import main
from tests.helpers.command.messages import check
from tests.helpers.models.images import image_checkpoint, image_data

KINDS = ("full", "LoRA", "DPO", "reward", "classify", "merged", "image")
TEXTS = [{"text": f"{i} and {i * i} are numbers", "label": ("odd", "even")[i % 2]} for i in range(6)]
PAIRS = [{"prompt": f"{i} is", "chosen": f" {i}, surely.", "rejected": " a word."} for i in range(6)]
LORA = ("--lora-rank", "2", "--lora-targets", "q_proj")


@pytest.fixture(scope="module")
def commands(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The command line of each kind, without the output."""
    folder = tmp_path_factory.mktemp("inputs")
    images = image_checkpoint(folder / "images"), image_data(folder)
    texts, pairs = folder / "texts.jsonl", folder / "pairs.jsonl"
    texts.write_text("".join(json.dumps(record) + "\n" for record in TEXTS))
    pairs.write_text("".join(json.dumps(record) + "\n" for record in PAIRS))
    every = ("--dtype", "fp32", "--gpu", "cpu", "--lr", "3e-3", "--steps", "2", "--batch-size", "2")

    def train(model: Path, data: Path, *options: str) -> list[str]:
        return ["--model", str(model), "--data", str(data), "--eval-data", str(data), *every, *options]

    adapter = folder / "adapter"
    assert main([*train(checkpoint, texts, "--seq-len", "48", *LORA), "--output", str(adapter)]) == 0
    checkpoints = ("--seq-len", "48", "--save-every", "1", "--eval-every", "1")
    return {
        "full": train(checkpoint, texts, *checkpoints, "--chat-template", "zephyr"),
        "LoRA": train(checkpoint, texts, *checkpoints, *LORA),
        "DPO": train(checkpoint, pairs, *checkpoints, *LORA, "--objective", "dpo"),
        "reward": train(checkpoint, pairs, *checkpoints, "--objective", "reward"),
        "classify": train(checkpoint, texts, *checkpoints, "--objective", "classify"),
        "merged": ["export", "--model", str(checkpoint), "--adapter", str(adapter), "--dtype", "fp32"],
        "image": train(*images, "--seq-len", "128", "--micro-batch", "1"),
    }


@pytest.fixture(scope="module")
def alone(commands: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The output of each kind in an empty directory."""
    outputs = {kind: tmp_path_factory.mktemp("alone") / "out" for kind in KINDS}
    for kind, output in outputs.items():
        assert main([*commands[kind], "--output", str(output)]) == 0
    return outputs


def content(output: Path) -> dict[str, Any]:
    """Return what a directory holds, without the store, prepared data, times, and machines."""
    found = {
        path.relative_to(output).as_posix(): path.read_bytes()
        for path in sorted(output.rglob("*"))
        if path.is_file() and path.relative_to(output).parts[0] not in ("store", "run")
    }
    lines = (
        (output / "run/metrics.jsonl").read_text().splitlines()
        if (output / "run/metrics.jsonl").exists()
        else []
    )
    return found | {
        "names": sorted(
            path.relative_to(output).as_posix()
            for path in output.rglob("*")
            if path.relative_to(output).parts[0] != "store" and not path.is_relative_to(output / "run/tokens")
        ),
        "evaluations": [entry for entry in map(json.loads, lines) if "validation_metrics/loss" in entry],
    }


def without_rates(found: dict[str, Any]) -> dict[str, Any]:
    for entry in found["evaluations"]:
        entry.pop("validation_metrics/throughput(tps)")
    return found


def loss(kind: str, output: Path, base: Path) -> float:
    """Return the mean loss of what transformers and peft load from a directory, on the data of its run."""
    tokens = AutoTokenizer.from_pretrained(output)
    classifies = kind in ("reward", "classify")
    loads = AutoModelForSequenceClassification if classifies else AutoModelForCausalLM
    model: Any = loads.from_pretrained(base if kind == "LoRA" else output)
    if kind == "LoRA":
        model = PeftModel.from_pretrained(model, output)
    model.eval()

    def logits(text: str, end: bool) -> tuple[list[int], torch.Tensor]:
        ids = tokens(text)["input_ids"] + ([tokens.eos_token_id] if end else [])
        return ids, model(input_ids=torch.tensor([ids])).logits[0]

    total, count = 0.0, 0
    for record in PAIRS if kind == "reward" else TEXTS:
        if kind == "reward":
            better, worse = (
                logits(record["prompt"] + record[side], True)[1] for side in ("chosen", "rejected")
            )
            total, count = total - float(torch.nn.functional.logsigmoid(better - worse)), count + 1
        elif kind == "classify":
            label = torch.tensor(model.config.label2id[record["label"]])
            total, count = (
                total + float(torch.nn.functional.cross_entropy(logits(record["text"], False)[1], label)),
                count + 1,
            )
        else:
            ids, out = logits(record["text"], True)
            total += float(
                torch.nn.functional.cross_entropy(out[:-1], torch.tensor(ids[1:]), reduction="sum")
            )
            count += len(ids) - 1
    return total / count


@pytest.mark.slow
@torch.no_grad()
def test_what_is_loaded_evaluates_to_the_last_evaluation(alone: dict[str, Path], checkpoint: Path) -> None:
    last = {kind: content(output)["evaluations"][-1:] for kind, output in alone.items()}
    for kind in ("full", "LoRA", "reward", "classify", "merged"):
        expected = (last["LoRA"] if kind == "merged" else last[kind])[0]["validation_metrics/loss"]
        assert loss(kind, alone[kind], checkpoint) == pytest.approx(expected, rel=2e-5), kind


@pytest.mark.slow
def test_files_in_the_way_of_any_result_are_refused_before_a_run(alone: dict[str, Path]) -> None:
    for kind, output in alone.items():
        files = Outputs.read(output).listed(RESULT)
        names = {file for file in files if not any(fnmatch(file, pattern) for pattern in RESULTS)}
        assert files and not names, (kind, names)


@pytest.mark.slow
@pytest.mark.parametrize("is_kept", [True, False], ids=["store kept", "store deleted"])
@pytest.mark.parametrize("first", KINDS)
def test_every_pair_of_runs_in_one_output(
    first: str, is_kept: bool, commands: dict[str, list[str]], alone: dict[str, Path], tmp_path: Path,
    finetune: Any,
) -> None:  # fmt: skip
    for second, overwrites in itertools.product(KINDS, (False, True)):
        output = tmp_path / "out"
        shutil.rmtree(output, ignore_errors=True)
        shutil.copytree(alone[first], output, symlinks=True)
        if not is_kept:
            shutil.rmtree(output / "store", ignore_errors=True)
        before = content(output)
        done = finetune(*commands[second], "--output", output, *(["--overwrite"] if overwrites else []))
        if not overwrites or (second == "merged" and first != "merged"):
            check(done, 2, f"{output} holds ")
            assert content(output) == before
        else:
            assert done.status == 0, (second, done.err)
            assert without_rates(content(output)) == without_rates(content(alone[second])), second
