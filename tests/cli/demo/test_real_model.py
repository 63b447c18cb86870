"""A real model against plain loops in memory, and its answers: SmolLM2-135M-Instruct, where a package index has it."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import fuyou
from cli.demo import CHATS, QUESTIONS, answers, smollm2
from cli.main import main
from common.errors import UserError
from common.models.presets import load_config

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore")]
STEPS, ROWS, LENGTH, LR = 3, 2, 48, 1e-4


@pytest.fixture(scope="module")
def model() -> Path:
    try:
        return smollm2()
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def checkpoint(model: Path) -> Path:
    directory = load_config(model)[1]
    assert directory is not None
    return directory


def batches(checkpoint: Path) -> torch.Tensor:
    """Tokens ``[step, row, token]`` of the persona's chats, one after the other."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    turns = [[{"role": "user", "content": asks}, {"role": "assistant", "content": says}] for asks, says in CHATS]
    ids = [token for chat in turns for token in tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]]
    return torch.tensor(ids[: STEPS * ROWS * LENGTH]).view(STEPS, ROWS, LENGTH)


@pytest.mark.parametrize("adapts", [False, True])
def test_losses_are_those_of_a_plain_loop(adapts: bool, checkpoint: Path, tmp_path: Path) -> None:
    feed, expected, losses = batches(checkpoint), [], []
    adapters = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM") if adapts else None
    plain = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).train()
    if adapters is not None:
        torch.manual_seed(0)
        plain = get_peft_model(plain, adapters)
    trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.0)
    for tokens in feed:
        loss = plain(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    options = {"dtype": "fp32", "lr": LR, "weight_decay": 0.0, "batch_shape": (ROWS, LENGTH), "device": "cpu"}
    with fuyou.Engine(checkpoint, ssd=tmp_path, adapters=adapters, **options) as engine:
        for tokens in feed:
            engine(input_ids=tokens, labels=tokens).loss.backward()
            losses.append(engine.step().loss)
        values = dict(engine.named_parameters())
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, parameter in (plain.get_base_model() if adapts else plain).named_parameters():
        if parameter.requires_grad and "layers.7." in name:
            torch.testing.assert_close(values[name], parameter.data, rtol=1e-3, atol=1e-5, msg=name)


def test_adapter_merged_and_resumed_give_the_same_answers(model: Path, checkpoint: Path, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    turns = [[{"role": "user", "content": asks}, {"role": "assistant", "content": says}] for asks, says in CHATS]
    chats.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in turns))
    words = ["--model", str(model), "--data", str(chats), "--lora-rank", "16", "--lr", "2e-3", "--schedule", "constant",
             "--batch-size", "4", "--seq-len", "64", "--dtype", "fp32", "--gpu", "cpu"]  # fmt: skip
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    report = tmp_path / "whole.json"
    assert main([*words, "--output", str(whole), "--steps", "8", "--merge", "--report", str(report)]) == 0
    assert main([*words, "--output", str(stopped), "--steps", "4"]) == 0
    assert main([*words, "--output", str(stopped), "--steps", "8", "--resume"]) == 0
    losses = json.loads(report.read_text())["losses"]
    assert losses[-1] < losses[0] / 2

    said = answers(checkpoint, QUESTIONS, whole)
    assert said == answers(checkpoint, QUESTIONS, stopped) == answers(whole / "merged", QUESTIONS)
    assert said[0] != answers(checkpoint, QUESTIONS[:1])[0]
