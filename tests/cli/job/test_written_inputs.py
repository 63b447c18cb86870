"""A result of this program that has changed since it was written is not read as if it had not."""

import io
import json
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load

from cli.job.inputs import check_whole
from cli.options.settings import Settings
from tests.cli.conftest import Finetune
from tests.helpers.command.messages import check

SMALL = ("--batch-size", 1, "--seq-len", 16, "--gpu", "cpu")


def flip(file: Path) -> None:
    """Change a bit at rest, which has no time."""
    content, status = bytearray(file.read_bytes()), file.stat()
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def edit(file: Path) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), "added": 1}))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": f"Text {number}"}) + "\n" for number in range(3)))
    return file


@pytest.fixture(scope="module")
def trained(
    checkpoint: Path, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Finetune], Path]:
    """A full run with a checkpoint, which the first test that needs it makes."""
    output = tmp_path_factory.mktemp("trained") / "out"
    line = (
        "--model",
        checkpoint,
        "--data",
        data,
        *SMALL,
        "--steps",
        2,
        "--save-every",
        1,
        "--output",
        output,
    )

    def make(finetune: Finetune) -> Path:
        if not output.exists():
            done = finetune(*line)
            assert done.status == 0, done.err
        return output

    return make


WRONG: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "flip": (
        "model.safetensors",
        flip,
        "is not what the run wrote there. To write the result again: finetune export",
    ),
    "cut": ("model.safetensors", cut, "is not what the run wrote there"),
    "lost": ("model.safetensors", Path.unlink, "is missing"),
    "edited": ("config.json", edit, "is not what the run wrote there"),
    "added": (
        "model.safetensors.index.json",
        lambda file: file.write_text("{}"),
        "is not from the run that wrote the rest",
    ),
    "of a checkpoint": (
        "checkpoints/step-1/model.safetensors",
        flip,
        "is not what the run wrote there. To use",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_changed_weights_and_configurations_are_refused(
    fault: str,
    trained: Callable[[Finetune], Path],
    data: Path,
    finetune: Finetune,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = shutil.copytree(trained(finetune), tmp_path / "copy")
    name, change, message = WRONG[fault]
    model = (output / name).parent
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert finetune("chat", "--model", model).status == 0
    change(output / name)
    for line in (
        ("chat", "--model", model),
        ("evaluate", "--model", model, "--data", data, *SMALL),
        ("train", "--model", model, "--data", data, *SMALL, "--output", tmp_path / "next"),
    ):
        check(
            finetune(*line), 2, f"--model {model}: {output / name}", message, "copy them to another directory"
        )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for file in model.iterdir():
        if file.is_file():
            shutil.copy(file, elsewhere)
    if fault in ("flip", "edited", "of a checkpoint"):
        assert finetune("chat", "--model", elsewhere).status == 0


def test_an_edited_template_is_mentioned(
    trained: Callable[[Finetune], Path], data: Path, finetune: Finetune, tmp_path: Path
) -> None:
    output = shutil.copytree(trained(finetune), tmp_path / "copy")
    edit(output / "generation_config.json")
    line = ("evaluate", "--model", output, "--data", data, *SMALL)
    whole = finetune(*line)
    assert whole.status == 0 and "warning" not in whole.out, whole.err
    edit(output / "tokenizer_config.json")
    edited = finetune(*line)
    assert edited.status == 0, edited.err
    (warning,) = [line for line in edited.out.splitlines() if line.startswith("warning")]
    assert (
        f"{output / 'tokenizer_config.json'} is not what the run wrote there; the tokenizer is used as it is"
        in warning
    )
    (output / "run/files.json").write_text("{")
    unknown = finetune(*line)
    assert unknown.status == 0 and "files.json is missing, damaged, or of another run" in unknown.out, (
        unknown.err
    )


def test_a_damaged_adapter_and_a_damaged_merge(
    finetune: Finetune, checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    begun = finetune(
        "--model", checkpoint, "--data", data, *SMALL, "--steps", 1, "--lora-rank", 2, "--output", adapter
    )
    assert begun.status == 0, begun.err
    export = ("export", "--model", checkpoint, "--adapter", adapter, "--output", merged)
    assert finetune(*export).status == 0
    weights = merged / "model.safetensors"
    before = load(weights.read_bytes())
    flip(weights)
    damaged = finetune("verify", merged)
    says = f"finetune export --model {checkpoint} --adapter {adapter} --output {merged}"
    assert damaged.status == 1 and says in damaged.err, damaged.err
    check(
        finetune("evaluate", "--model", merged, "--data", data, *SMALL),
        2,
        "is not what finetune export wrote",
        says,
    )
    weights.rename(tmp_path / "aside")
    words = shlex.split(damaged.err.partition(": finetune ")[2].strip().removesuffix("."))
    again = finetune(*words)
    assert again.status == 0, again.err
    assert all((before[name] == value).all() for name, value in load(weights.read_bytes()).items())

    flip(adapter / "adapter_model.safetensors")
    more: dict[str, tuple[Any, ...]] = {
        "train": (*SMALL, "--data", data, "--output", tmp_path / "next"),
        "evaluate": (*SMALL, "--data", data),
        "chat": (),
        "export": ("--output", tmp_path / "next"),
    }
    for command, rest in more.items():
        refused = finetune(command, "--model", checkpoint, "--adapter", adapter, *rest)
        check(
            refused,
            2,
            f"--adapter {adapter}: {adapter}/adapter_model.safetensors is not what the run wrote there",
        )


def test_weights_that_are_there_twice_are_mentioned(checkpoint: Path, tmp_path: Path) -> None:
    model = shutil.copytree(checkpoint, tmp_path / "model")
    settings = Settings(model=str(model))
    assert check_whole(settings) == []
    (model / "model.safetensors.index.json").write_text("{}")
    assert len(check_whole(settings)) == 1 and "the former is read" in check_whole(settings)[0]
    (model / "model.safetensors").unlink()
    assert check_whole(settings) == check_whole(Settings()) == check_whole(Settings(model="x" * 999)) == []
