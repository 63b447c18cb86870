"""What is written stops where answers end: results, checkpoints, adapters, merged adapters; and ``finetune chat``."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, GenerationConfig

from cli.inspect import chat
from common.models.adapters.adapted_model import AdaptedModel
from common.models.adapters.options import SavedAdapter
from common.models.generation import FILE, stops_of
from tests.cli.conftest import Finetune

# A base model's tokenizer knows <|turn|> (3), and its generation stops at <|end|> (2) alone.
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|turn|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]


def stops(folder: Path) -> list[int]:
    return stops_of(GenerationConfig.from_pretrained(folder))


@pytest.mark.parametrize("adapts", [False, True], ids=["full", "lora"])
def test_results_stop_where_answers_end(
    adapts: bool, finetune: Finetune, checkpoint: Path, tmp_path: Path
) -> None:
    data, template, out = tmp_path / "chats.jsonl", tmp_path / "own.jinja", tmp_path / "out"
    data.write_text((json.dumps({"messages": TURNS}) + "\n") * 2)
    template.write_text(TEMPLATE)
    words = [
        "--model", checkpoint, "--steps", 2, "--batch-size", 1, "--seq-len", 32, "--gpu", "cpu",
        "--host-memory", "600MiB", *(["--lora-rank", 2] if adapts else []),
    ]  # fmt: skip
    done = finetune(*words, "--data", data, "--chat-template", template, "--save-every", 1, "--output", out)
    assert done.status == 0, done.err
    assert "stops    the answers end with '<|turn|>'" in done.out
    assert stops(out) == stops(out / "checkpoints" / "step-1") == [2, 3]
    if not adapts:
        return
    merged, further, texts = tmp_path / "merged", tmp_path / "further", tmp_path / "texts.jsonl"
    assert finetune("export", "--model", checkpoint, "--adapter", out, "--output", merged).status == 0
    assert stops(merged) == stops_of(chat._model(checkpoint, SavedAdapter(out)).generation_config) == [2, 3]
    texts.write_text(json.dumps({"text": "Hi there, this is text."}) + "\n")
    common = [word for word in words if word not in ("--lora-rank",)][:-1]
    assert finetune(*common, "--adapter", out, "--data", texts, "--output", further).status == 0
    assert stops(further) == [2, 3]


def test_a_token_that_the_model_does_not_know_and_adapters_do_not_train_is_named(
    finetune: Finetune, own_checkpoint: Path, tmp_path: Path
) -> None:
    file = own_checkpoint / "model.safetensors"
    weights = load_file(file)

    def unknown(**more: Any) -> list[int]:
        adapters = LoraConfig(r=2, target_modules=["q_proj"], **more)
        config = AutoConfig.from_pretrained(own_checkpoint)
        return AdaptedModel(config, torch.float32, adapters, checkpoint=own_checkpoint).unknown_tokens([2, 3])

    assert unknown() == []
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        changed = weights[name].clone()
        changed[3] = 0
        save_file({**weights, name: changed}, file, {"format": "pt"})
        assert unknown() == [3]
    assert unknown(trainable_token_indices={"embed_tokens": [3], "lm_head": [3]}) == []
    assert unknown(modules_to_save=["lm_head"]) == []
    data, template = tmp_path / "chats.jsonl", tmp_path / "own.jinja"
    data.write_text(json.dumps({"messages": TURNS}) + "\n")
    template.write_text(TEMPLATE)
    done = finetune(
        "--model", own_checkpoint, "--data", data, "--chat-template", template, "--steps", 1, "--batch-size", 1,
        "--seq-len", 32, "--gpu", "cpu", "--lora-rank", 2, "--output", tmp_path / "out",
    )  # fmt: skip
    assert "warning  answers end with '<|turn|>', whose embedding is 0 in this model" in done.out


def test_nothing_is_written_where_the_model_stops_already(
    finetune: Finetune, checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    done = finetune(
        "--model", checkpoint, "--data", data, "--steps", 1, "--batch-size", 1, "--seq-len", 32, "--gpu", "cpu",
        "--host-memory", "600MiB", "--lora-rank", 2, "--output", tmp_path / "out",
    )  # fmt: skip
    assert done.status == 0 and "\nstops" not in done.out
    assert not (tmp_path / "out" / FILE).exists()
