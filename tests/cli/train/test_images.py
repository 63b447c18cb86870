"""The command trains a vision-language checkpoint on images with text, and the result is whole."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

pytest.importorskip("PIL", reason="pip install 'fuyou[images]'")

from cli.main import main
from tests.helpers.models.images import image_checkpoint, image_data


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return image_checkpoint(tmp_path / "model")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return image_data(tmp_path)


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


@pytest.mark.slow
def test_adapters_and_the_projector_train_together(
    checkpoint: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are one adapter, which is evaluated and merged as any other."""
    run(checkpoint, data, tmp_path / "adapter", "--steps", "2", "--lora-rank", "2", "--train-vision", "all")
    last = re.findall(r"eval at step 2: (loss \d+\.\d+)", capsys.readouterr().out)
    saved, before = (
        load_file(tmp_path / "adapter" / "adapter_model.safetensors"),
        load_file(checkpoint / "model.safetensors"),
    )
    whole = {
        name.partition(".multi_modal_projector.")[2]: value
        for name, value in saved.items()
        if "projector" in name
    }
    began = {
        name.partition("multi_modal_projector.")[2]: value
        for name, value in before.items()
        if "projector" in name
    }
    assert whole.keys() == began.keys()
    assert not any(torch.equal(whole[name], value) for name, value in began.items())
    assert any("vision_tower" in name for name in saved)
    words = ["--model", str(checkpoint), "--adapter", str(tmp_path / "adapter"), "--dtype", "fp32"]
    assert main(["export", *words, "--output", str(tmp_path / "merged")]) == 0
    for shown in (words, ["--model", str(tmp_path / "merged"), "--dtype", "fp32"]):
        assert main(["evaluate", *shown, "--data", str(data), "--seq-len", "128"]) == 0
    assert re.findall(r"eval     (loss \d+\.\d+)", capsys.readouterr().out) == 2 * last


@pytest.mark.parametrize("keep", [0, 0.5])
def test_an_image_that_is_cut_is_named(
    keep: float, checkpoint: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = (tmp_path / "2.png").read_bytes()
    (tmp_path / "2.png").write_bytes(content[: int(keep * len(content))])
    words = ["--model", str(checkpoint), "--data", str(data), "--seq-len", "128", "--gpu", "cpu"]
    assert main([*words, "--output", str(tmp_path / "out")]) == 2
    assert f"--data: {data}, line 3: an image cannot be read: " in capsys.readouterr().err


@pytest.mark.parametrize(("objective", "message"), [
    ("dpo", "--objective dpo reads text, and the data hold images"),
    ("pretrain", "--objective pretrain reads text, and the data hold images"),
    ("reward", "is a vision-language model, and --objective reward puts its head on a model of text alone"),
])  # fmt: skip
def test_objectives_of_text(
    objective: str,
    message: str,
    checkpoint: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What would read images with a tokenizer alone is refused before anything is written."""
    words = ["--model", str(checkpoint), "--data", str(data), "--seq-len", "128", "--gpu", "cpu"]
    assert main([*words, "--objective", objective, "--output", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*.safetensors"))
