"""The command's next-token objectives: an ordinary loop in memory has the same losses and weights."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.data import DataConfig, open_data
from tests.cli.conftest import Finetune
from tests.helpers.command.histories import history

PLACE = (
    "--gpu",
    "cpu",
    "--host-memory",
    "600MiB",
    "--dtype",
    "fp32",
    "--schedule",
    "constant",
    "--lr",
    "1e-3",
)
STEPS = 5


pytestmark = pytest.mark.filterwarnings("ignore")


def in_memory(checkpoint: Path, data: Path, cache: Path) -> tuple[list[float], torch.nn.Module]:
    """Losses and the model after the same steps, one document in each row."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    batches = open_data(DataConfig((str(data),), 32, 4), tokenizer, cache)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).train()
    groups = [{"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.01}]
    groups += [{"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}]
    optimizer, losses = torch.optim.AdamW(groups, lr=1e-3), []
    for step in range(STEPS):
        loss = model(**batches.batch(step), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    batches.close()
    return losses, model


def test_a_run_is_what_it_is_in_memory(
    checkpoint: Path, data: Path, finetune: Finetune, tmp_path: Path
) -> None:
    common = ("--model", checkpoint, "--data", data, *PLACE, "--batch-size", "4", "--seq-len", "32")
    common = (*common, "--micro-batch", "2", "--steps", str(STEPS))
    done = finetune(*common, "--output", tmp_path / "out", "--eval-data", data)
    assert done.status == 0, done.err
    losses, model = in_memory(checkpoint, data, tmp_path / "cache")
    assert [line["loss"] for line in history(tmp_path / "out")] == pytest.approx(losses, rel=1e-5)
    tuned = dict(
        AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).named_parameters()
    )
    for name, value in model.named_parameters():
        torch.testing.assert_close(tuned[name], value.data, rtol=1e-5, atol=1e-5, msg=name)
    assert "perplexity" in done.out.split("eval at step 5")[1]


def test_pretraining_learns_prompts_too(checkpoint: Path, finetune: Finetune, tmp_path: Path) -> None:
    """The rows are those of the same text without a prompt."""
    told = []
    for name, record, objective in (
        ("pretrain", {"prompt": "One and one ", "completion": "is two."}, "pretrain"),
        ("sft", {"text": "One and one is two."}, "sft"),
    ):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(record) + "\n")
        words = (
            "--data",
            tmp_path / f"{name}.jsonl",
            "--objective",
            objective,
            "--show-data",
            "1",
            "--seq-len",
            "32",
        )
        done = finetune("--model", checkpoint, *words, "--output", tmp_path / name)
        assert done.status == 0, done.err
        told.append(done.out.split("row 1")[1])
    assert told[0] == told[1] and "One" in told[0]
