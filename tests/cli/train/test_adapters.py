"""Adapters by the command: those that were trained before."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MixtralConfig

from cli.job import resumed
from cli.options.config_file import plain_options
from cli.train.loop import _where
from tests.cli.conftest import Finetune
from tests.helpers.command.messages import check
from tests.helpers.models.small_checkpoints import SIZES, small_checkpoint

COMMON = (
    "--batch-size", 4, "--seq-len", 32, "--gpu", "cpu", "--dtype", "fp32", "--lr", "1e-2", "--schedule", "constant",
)  # fmt: skip


def held_out(output: Path) -> list[float]:
    lines = map(json.loads, (output / "run" / "metrics.jsonl").read_text().splitlines())
    return [line["validation_metrics/loss"] for line in lines if "validation_metrics/loss" in line]


@pytest.mark.parametrize("stored", ["int8", "nf4", "plain", None])
def test_a_merge_into_other_weights_than_those_of_training(stored: str | None) -> None:
    weights = SimpleNamespace(weights=SimpleNamespace(frozen_dtype=stored))
    model = SimpleNamespace(adapters=SimpleNamespace(gguf=SimpleNamespace(obstacle="")))
    job: Any = SimpleNamespace(output=Path("out"), checkpoint=Path("base"), model=model, engine=weights)
    lines = _where(job, ("store", "x"), steps=1, is_saved=True).splitlines()
    assert "to merge finetune export --model base --adapter out --output DIR" in lines
    assert "gguf     out/adapter.gguf, for llama.cpp and for ADAPTER in an Ollama Modelfile" in lines
    assert any(f"weights in {stored}" in line for line in lines) is (stored in ("int8", "nf4"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_adapters_are_trained_further(
    finetune: Finetune, checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    """What the first run ended with, the second begins with; it continues with the same adapters only."""
    first, second = tmp_path / "first", tmp_path / "second"
    command = ("--model", checkpoint, "--data", data, "--eval-data", data, *COMMON)
    lora = finetune(*command, "--steps", 2, "--lora-rank", 4, "--output", first)
    assert lora.status == 0, lora.err
    assert "adapters LoRA of rank 4: " in lora.out

    further = (*command, "--adapter", first, "--output", second)
    check(finetune(*further, "--lora-rank", 8), 2, "--lora-rank and --adapter exclude each other")
    check(finetune(*further, "--lora-alpha", 3), 2, "--lora-alpha and --adapter exclude each other")
    check(finetune(*command, "--adapter", first, "--output", first, "--overwrite"), 2, "which is to be read")
    check(finetune(*command, "--adapter", tmp_path, "--output", second), 2, "holds no adapter_config.json")
    done = finetune(*further, "--steps", 2)
    assert done.status == 0, done.err
    assert f"adapters those of {first}, trained further: " in done.out
    assert held_out(second)[0] == held_out(first)[-1] < held_out(first)[0]
    tuned = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(checkpoint), second)
    assert tuned.peft_config["default"].r == 4

    shutil.copytree(first, moved := tmp_path / "moved", ignore=shutil.ignore_patterns("store"))
    again = finetune(*command, "--adapter", moved, "--output", second, "--steps", 3, "--resume")
    assert again.status == 0 and "step 3/3" in again.out, again.err
    config = moved / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 5}))
    changed = finetune(*command, "--adapter", moved, "--output", second, "--steps", 4, "--resume")
    check(changed, 2, f"--adapter {moved}: adapter_config.json was changed, or is that of another adapter")
    weights = moved / "adapter_model.safetensors"
    save_file(load_file(weights), weights, {"format": "pt"})  # as peft saves them, which does not tell
    changed = finetune(*command, "--adapter", moved, "--output", second, "--steps", 4, "--resume")
    check(changed, 2, "--adapter is not what this run began with: other or changed adapters")


def test_a_run_of_an_earlier_version_keeps_the_targets_that_were_its_default(
    finetune: Finetune, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It adapts routed experts, too: its options and its commit do not say that."""
    mixture = small_checkpoint(tmp_path / "mixture", MixtralConfig(**SIZES, num_local_experts=2))
    output = tmp_path / "output"
    command = ("--model", mixture, "--data", data, *COMMON, "--lora-rank", 2, "--output", output, "--no-save")
    with monkeypatch.context() as earlier:
        fixed = resumed.fixed_options
        earlier.setattr(
            "cli.job.resolve.fixed_options", lambda settings: {**fixed(settings), "--lora-targets": []}
        )
        earlier.setattr(
            resumed, "plain_options", lambda text: re.sub(r"lora-targets = .*\n", "", plain_options(text))
        )
        done = finetune(*command, "--steps", 1, "--lora-targets", "all-linear")
        assert done.status == 0, done.err
    for line in (command, ("--output", output)):
        done = finetune(*line, "--steps", 2, "--resume")
        assert done.status == 0, done.err
        assert "down_proj" in done.out.partition("of the model's, on ")[2].partition("\n")[0]
    check(finetune(*command, "--steps", 2, "--resume", "--lora-targets", "q_proj"), 2, "--lora-targets")
    done = finetune(*command, "--steps", 1, "--overwrite")
    assert done.status == 0, done.err
    assert (
        "on k_proj, o_proj, q_proj, v_proj (--lora-targets all-linear adapts routed experts, too)" in done.out
    )
