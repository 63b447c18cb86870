"""The command with families whose rows or labels are not what most families take."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.data import DataConfig, open_data
from tests.cli.conftest import Finetune
from tests.helpers.models.small_models import small_config

SMALL = ("--batch-size", 2, "--seq-len", 96, "--gpu", "cpu", "--lr", "1e-3", "--dtype", "fp32", "--steps", 2)


@pytest.fixture(params=[pytest.param("mpt", marks=pytest.mark.slow), "bart"])
def family(request: pytest.FixtureRequest, checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint with the tokenizer of the tiny Llama."""
    config = small_config(request.param)
    config.vocab_size = 384
    config.max_seq_len = config.max_position_embeddings = 96
    torch.manual_seed(0)
    directory = tmp_path / request.param
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    for file in checkpoint.glob("*token*"):
        shutil.copy(file, directory)
    return directory


def test_rows_are_not_packed_and_losses_are_the_familys_own(
    family: Path, data: Path, finetune: Finetune, tmp_path: Path
) -> None:
    words = ("--model", family, "--data", data, "--eval-data", data, "--output", tmp_path / "out", *SMALL)
    outcome = finetune(*words)
    assert outcome.status == 0, outcome.err
    assert (
        "one document in each row: nothing keeps those that share a row apart in this model\n" in outcome.out
    )

    config = DataConfig((str(data),), 96, 2, packed=False, labels_ahead=family.name == "bart", shuffle=False)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
        batches = open_data(config, AutoTokenizer.from_pretrained(family), tmp_path / "again")
        total, tokens = 0.0, 0
        for step in range(batches.steps_per_epoch):
            batch = batches.batch(step)
            del batch["position_ids"]
            labels = batch["labels"] if family.name == "bart" else batch["labels"][:, 1:]
            count = int((labels != -100).sum())
            total += float(model(**batch, use_cache=False).loss) * count
            tokens += count
    last = [json.loads(line) for line in (tmp_path / "out/run/metrics.jsonl").read_text().splitlines()][-1]
    assert last["validation_metrics/loss"] == pytest.approx(total / tokens, rel=1e-5)
