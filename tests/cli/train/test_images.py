"""The command trains a vision-language checkpoint on images with text, and the result is whole."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

pytest.importorskip("PIL", reason="pip install 'fuyou[images]'")

from cli.main import main
from tests.common.data.processors import chat, draw, make_processor, write
from tests.helpers.models.vision_families import FAMILIES


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    processor = make_processor()
    tokens = {name: processor.tokenizer.convert_tokens_to_ids(f"<{name}>") for name in ("img", "boi", "eoi")}
    family = FAMILIES["gemma3"]
    config = AutoConfig.for_model(
        "gemma3", **family
        | {"image_token_index": tokens["img"], "image_token_id": tokens["img"], "boi_token_index": tokens["boi"],
           "eoi_token_index": tokens["eoi"], "text_config": family["text_config"] | {"vocab_size": 340}},
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    records = []
    for number in range(4):
        draw(tmp_path / f"{number}.png", number)
        question = [{"type": "image", "path": f"{number}.png"}, {"type": "text", "text": "What is the capital?"}]
        records.append(chat(question, "Paris " * (number + 1)))
    return write(tmp_path / "data.jsonl", *records)


def run(checkpoint: Path, data: Path, output: Path, *options: str) -> list[float]:
    words = [
        "--model", str(checkpoint), "--data", str(data), "--eval-data", str(data), "--batch-size", "2", "--micro-batch",
        "1", "--seq-len", "128", "--dtype", "fp32", "--lr", "1e-3", "--schedule", "constant", "--output", str(output),
    ]  # fmt: skip
    assert main([*words, *options]) == 0
    return [json.loads(line)["loss"] for line in (output / "losses.jsonl").read_text().splitlines()]


def test_training_continues_where_it_was_and_exports_everything(
    checkpoint: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = run(checkpoint, data, tmp_path / "whole", "--steps", "4")
    assert "4 conversations with 4 images" in capsys.readouterr().out
    run(checkpoint, data, tmp_path / "parts", "--steps", "2")
    assert run(checkpoint, data, tmp_path / "parts", "--steps", "4", "--resume") == whole
    before, after = (load_file(path / "model.safetensors") for path in (checkpoint, tmp_path / "parts"))
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if "vision_tower" in name or "projector" in name}
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "parts")
    inputs = AutoProcessor.from_pretrained(tmp_path / "parts").apply_chat_template(
        [{"role": "user", "content": [{"type": "image", "path": str(tmp_path / "0.png")}]}],
        tokenize=True, return_dict=True, return_tensors="pt",
    )  # fmt: skip
    assert loaded(**inputs).logits.isfinite().all()


@pytest.mark.parametrize("where", ["memory", "ssd"])
@pytest.mark.slow
def test_two_ranks_train_what_one_does(where: str, checkpoint: Path, data: Path, tmp_path: Path) -> None:
    run(checkpoint, data, tmp_path / "alone", "--steps", "2")
    (tmp_path / "drive").mkdir()
    words = [
        "--model", str(checkpoint), "--data", str(data), "--batch-size", "2", "--seq-len", "128", "--dtype", "fp32",
        "--lr", "1e-3", "--schedule", "constant", "--steps", "2", "--nodes", "1", "--gpus-per-node", "2",
        "--output", str(tmp_path / "two"),
    ]  # fmt: skip
    assert main([*words, *(["--ssd", str(tmp_path / "drive")] if where == "ssd" else [])]) == 0
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("alone", "two"))
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=0, atol=1e-5, msg=name)
