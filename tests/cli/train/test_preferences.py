"""Learning from pairs of answers with the command."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.cli.conftest import Finetune
from tests.helpers.command.histories import history

PLACE = ("--gpu", "cpu", "--host-memory", "600MiB", "--dtype", "fp32", "--schedule", "constant", "--lr", "1e-2")
LORA, SLOW = ("--lora-rank", "4"), pytest.mark.slow


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sums that are right and sums that are wrong."""
    file = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    records = [
        {"prompt": f"{i} plus {i} is", "chosen": f" surely {2 * i}.", "rejected": f" maybe {i * i + 1}, who knows."}
        for i in range(12)
    ]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


@pytest.mark.parametrize(
    "trains",
    ["new adapters", *(pytest.param(name, marks=pytest.mark.slow) for name in ("all weights", "trained adapters"))],
)
def test_a_resumed_run_keeps_its_reference(
    trains: str, checkpoint: Path, data: Path, pairs: Path, finetune: Finetune, tmp_path: Path
) -> None:
    """It has the losses of a run that was not interrupted, and a lost reference is never computed from a trained
    model: new adapters are switched off for it, and other runs are refused."""
    words: tuple[Any, ...] = {"all weights": (), "new adapters": LORA}.get(trains, ("--adapter", tmp_path / "first"))
    if trains == "trained adapters":
        first = ("--data", data, *LORA, "--steps", "1", "--batch-size", "4", "--seq-len", "32")
        assert finetune("--model", checkpoint, *first, *PLACE, "--output", tmp_path / "first").status == 0
    common = ("--model", checkpoint, "--data", pairs, "--objective", "dpo", *words, *PLACE, "--batch-size", "12")
    common = (*common, "--report", tmp_path / "report.json")

    def losses() -> list[float]:
        found: list[float] = json.loads((tmp_path / "report.json").read_text())["losses"]
        return found

    evaluated = ("--eval-data", pairs)
    done = finetune(*common, *evaluated, "--steps", "4", "--output", tmp_path / "whole", "--no-save")
    assert done.status == 0, done.err
    assert "eval at step 0: loss 0.6931" in done.out and "12 pairs, 24 x 64 tokens" in done.out
    whole = losses()
    assert whole[0] == pytest.approx(math.log(2), rel=1e-6)  # the reference is the model as the run found it
    broken = (*common, "--output", tmp_path / "broken", "--no-save")
    assert finetune(*broken, "--steps", "2").status == 0
    other = finetune(*broken, "--steps", "4", "--resume", "--beta", "0.2")
    assert other.status == 2 and "began with --beta 0.1, and now it is --beta 0.2" in other.err
    file = tmp_path / "broken" / "run" / "reference.npz"
    before = np.load(file)["values"]
    done = finetune(*broken, "--steps", "3", "--resume")
    assert done.status == 0, done.err
    assert losses() == whole[2:3] and np.array_equal(np.load(file)["values"], before, equal_nan=True)
    file.unlink()
    done = finetune(*broken, "--steps", "4", "--resume")
    if trains == "new adapters":
        assert done.status == 0 and losses() == pytest.approx(whole[3:], rel=1e-5), done.err
    else:
        assert done.status == 2 and "is missing, damaged or of fewer steps" in done.err


@pytest.mark.slow
def test_a_plan_counts_the_reference(finetune: Finetune) -> None:
    """DPO reads what SFT reads of as many rows; before its first step, the reference passes over the data."""
    where = ("--gpu", "rtx4090", "--drive", "samsung-990-pro-4tb", "--ssds", "4", "--seq-len", "1024", *LORA)
    where = ("--plan", "--model", "gpt3-13b", "--host-memory", "64GiB", "--drive-life", "any", *where)
    plans = {}
    for name, options in {"sft": ("--batch-size", "32"), "dpo": ("--batch-size", "16", "--objective", "dpo")}.items():
        done = finetune(*where, *options, "--json")
        assert done.status == 0, done.err
        plans[name] = json.loads(done.out)
    sft, dpo = plans["sft"], plans["dpo"]
    assert dpo["ssd_read_bytes_per_step"] <= 1.02 * sft["ssd_read_bytes_per_step"]
    assert sft["bound_seconds"]["gpu"] < dpo["bound_seconds"]["gpu"] < 1.02 * sft["bound_seconds"]["gpu"]
    shown = finetune(*where, "--objective", "dpo")
    assert "each batch of the data passes forward once before the first step" in " ".join(shown.out.split())


@pytest.mark.parametrize(("words", "message"), [
    (("--objective", "dpo"), "give --data with prompt, chosen and rejected"),
    (("--beta", "0.2"), "--beta is not known to --objective sft: it is for dpo or kto"),
    (("--beta", "0", "--objective", "dpo"), "it must be more than 0, not 0"),
    (("--objective", "dpo", *LORA, "--nodes", "1", "--data", "."), "does not go with --nodes in memory"),
    (("--objective", "ipo"), "'ipo' is not one of 'sft', 'pretrain', 'dpo', 'kto', 'reward', 'classify'"),
])  # fmt: skip
def test_a_missing_thing_is_rejected(
    words: tuple[str, ...], message: str, checkpoint: Path, finetune: Finetune
) -> None:
    done = finetune("--model", checkpoint, *words)
    assert done.status == 2 and message in done.err


@pytest.mark.parametrize("words", [(), ("--lora-rank", "4", "--lora-dropout", "0.5")])
def test_dropout_is_off_unless_it_is_wanted(
    words: tuple[str, ...], checkpoint: Path, finetune: Finetune, tmp_path: Path
) -> None:
    """In the first step policy and reference are equal, so the loss is log 2; with dropout it is noise."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=384, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0.5, resid_pdrop=0.5)
    model = shutil.copytree(
        checkpoint, tmp_path / "gpt2", ignore=shutil.ignore_patterns("*.safetensors", "config.json")
    )
    GPT2LMHeadModel(config).save_pretrained(model)
    data = tmp_path / "pairs.jsonl"
    pairs = [{"prompt": f"{i} and", "chosen": f" surely {2 * i}.", "rejected": f" maybe {i}?"} for i in range(8)]
    data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    command = ("--model", model, "--data", data, "--objective", "dpo", "--seq-len", "32", "--batch-size", "8", *words)
    command += ("--steps", "1", "--lr", "1e-9", "--dtype", "fp32", "--gpu", "cpu", "--no-save")
    losses = {}
    for option in ("--no-dropout", "--dropout"):
        done = finetune(*command, option, "--output", tmp_path / option[2:])
        assert done.status == 0, done.err
        losses[option] = history(tmp_path / option[2:])[0]["loss"]
    assert losses["--no-dropout"] == pytest.approx(math.log(2), abs=1e-5)
    assert abs(losses["--dropout"] - math.log(2)) > 1e-5
    refused = finetune("--model", model, "--data", data, "--dropout")
    assert refused.status == 2 and "--dropout is for dpo, kto, or reward" in refused.err
