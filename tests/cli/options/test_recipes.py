"""Each recipe can be planned and trained; its model is a small one of the family here."""

import datetime
import json
import tomllib
from pathlib import Path

import pytest

from common.files import preset_files
from common.models.miniature import miniature
from common.models.presets import load_config
from tests.cli.conftest import Finetune
from tests.helpers.models.families import saved

RECIPES = preset_files("recipes")
PRESETS = {name: name.rpartition("-")[0].replace("llama-3.1", "llama-3") for name in RECIPES}
TODAY = sorted(RECIPES)[datetime.date.today().toordinal() % len(RECIPES)]
SOME = [name if name == TODAY else pytest.param(name, marks=pytest.mark.slow) for name in sorted(RECIPES)]


@pytest.mark.parametrize("name", SOME)
def test_it_is_planned(finetune: Finetune, name: str) -> None:
    machine = ["--gpu", "rtx-4090", "--drive", "samsung-990-pro-4tb", "--host-memory", "56GiB"]
    outcome = finetune("plan", "--config", name, "--model", PRESETS[name], *machine, "--json")
    assert outcome.status == 0, outcome.err
    plan = json.loads(outcome.out)
    recipe = tomllib.loads(RECIPES[name].read_text())
    assert plan["tokens_per_second"] > 0
    rows = recipe["batch-size"] * (2 if recipe.get("objective") == "dpo" else 1)
    assert -(-rows // plan["micro_batch"]) == plan["micro_batches"]


@pytest.mark.parametrize("name", SOME)
def test_it_trains(finetune: Finetune, name: str, checkpoint: Path, tmp_path: Path) -> None:
    data = "random"
    if "dpo" in name:
        model, data = checkpoint, str(tmp_path / "pairs.jsonl")
        pairs = [{"prompt": f"{i} is", "chosen": f" {i}.", "rejected": " not."} for i in range(8)]
        Path(data).write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    else:
        config = miniature(load_config(PRESETS[name])[0])
        config.vocab_size = 256
        model = saved(tmp_path / "model", config)
    small = ("--batch-size", 2, "--seq-len", 32, "--steps", 2, "--gpu", "cpu", "--no-save")
    outcome = finetune(
        "--config", name, "--model", model, "--data", data, *small, "--output", tmp_path / "out"
    )
    assert outcome.status == 0, outcome.err
    assert "step 2/2" in outcome.out


def test_they_are_listed_and_printed(finetune: Finetune) -> None:
    listed = finetune("recipe").out
    assert all(f"{name} " in listed for name in RECIPES)
    assert finetune("recipe", TODAY).out == RECIPES[TODAY].read_text()
    for words in (["recipe", "qwen3-9b-lora"], ["--config", "qwen3-9b-lora", "--data", "random"]):
        outcome = finetune(*words)
        assert outcome.status == 2 and "Did you mean 'qwen3-8b-lora'?" in outcome.err


def test_a_file_of_the_same_name_wins(
    finetune: Finetune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("qwen3-8b-lora").write_text('model = "nothing-of-this-name"\n')
    assert "nothing-of-this-name" in finetune("--config", "qwen3-8b-lora", "--data", "random").err
