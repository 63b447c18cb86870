"""Training some experts of a mixture with the command."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.cli.conftest import VOCAB, Finetune
from tests.helpers.models.mixtures import mixture_config

PLACE = ("--gpu", "cpu", "--host-memory", "600MiB", "--batch-size", "4", "--seq-len", "32", "--dtype", "bf16")
RUN = (*PLACE, "--lr", "1e-3", "--schedule", "constant")


@pytest.fixture(scope="module")
def mixture(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight experts in each of three layers, and the tokenizer of the tests' checkpoint."""
    directory = shutil.copytree(checkpoint, tmp_path_factory.mktemp("models") / "mixture")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(mixture_config("qwen3_moe", vocab_size=VOCAB)).save_pretrained(directory)
    return directory


def test_chosen_by_the_data_and_kept(finetune: Finetune, mixture: Path, data: Path, tmp_path: Path) -> None:
    command = ("--model", mixture, "--data", data, *RUN, "--train-experts", "25%", "--eval-split", "10%")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    outcome = finetune(*command, "--steps", 4, "--output", whole, "--report", tmp_path / "a.json")
    assert outcome.status == 0, outcome.err
    assert "experts  2 of 8 in each of 3 layers are trained: 27.6 K parameters" in outcome.out
    assert "chosen by 1,024 tokens" in outcome.out
    chosen = json.loads((whole / "run" / "experts.json").read_text())["experts"]
    assert {len(own) for own in chosen.values()} == {2}

    report = json.loads((tmp_path / "a.json").read_text())
    assert report["trainable_parameters"] == 27_648 == 3 * 2 * 3 * 48 * 32
    assert report["ssd_written_bytes_per_step"] == report["planned_ssd_written_bytes_per_step"]
    assert report["ssd_read_bytes_per_step"] == pytest.approx(report["planned_ssd_read_bytes_per_step"], rel=0.01)
    assert 12 * 27_648 <= report["ssd_written_bytes_per_step"] < 1.3 * 12 * 27_648

    assert finetune(*command, "--steps", 2, "--output", parts, "--no-save").status == 0
    resumed = finetune(*command, "--steps", 4, "--output", parts, "--resume")
    assert resumed.status == 0 and "chosen by" not in resumed.out, resumed.err
    assert (whole / "model.safetensors").read_bytes() == (parts / "model.safetensors").read_bytes()
    other = finetune(*command, "--train-experts", "0.5", "--steps", 5, "--output", parts, "--resume")
    assert other.status == 2 and "began with --train-experts 0.25, and now it is --train-experts 0.5" in other.err

    before, after = (AutoModelForCausalLM.from_pretrained(one, dtype=torch.bfloat16) for one in (mixture, whole))
    for name, value in after.named_parameters():
        path, old = name.rpartition(".")[0], before.get_parameter(name)
        changed = (value != old).flatten(1).any(1).nonzero().flatten().tolist() if path in chosen else []
        assert changed == chosen.get(path, []) and (changed or torch.equal(value, old)), name


def test_planned_and_refused(finetune: Finetune, mixture: Path, checkpoint: Path, tmp_path: Path) -> None:
    plans = {}
    for part in ("25%", "1"):
        outcome = finetune(
            "--model", mixture, *PLACE, "--train-experts", part, "--plan", "--json", "--output", tmp_path
        )
        assert outcome.status == 0, outcome.err
        plans[part] = json.loads(outcome.out)
    written, all_written = (plan["ssd_written_bytes_per_step"] for plan in plans.values())
    assert 12 * 27_648 <= written < 1.3 * 12 * 27_648 and written < all_written / 3
    outcome = finetune("--model", mixture, *PLACE, "--train-experts", "25%", "--plan", "--output", tmp_path)
    assert "of them in experts that are trained" in outcome.out
    for words, message in {
        (mixture, "--train-experts", "0"): "it must be more than 0, not 0",
        (mixture, "--train-experts", "200%"): "it must be at most 1, not 2.0",
        (mixture, "--train-experts", "10%", "--lora-rank", "4"): "freezes all other weights, and so does --lora-rank 4",
        (checkpoint, "--train-experts", "10%"): "LlamaForCausalLM has none that are fused into parameters",
        (mixture, "--train-experts", "10%", "--nodes", "1"): "does not go with --nodes, which trains in memory",
    }.items():
        refused = finetune("--model", *words, *PLACE, "--steps", 1, "--output", tmp_path / "refused")
        assert refused.status == 2 and message in refused.err, refused.err
