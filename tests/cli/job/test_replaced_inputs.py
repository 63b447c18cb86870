"""A model or an adapter that is replaced while a command reads it is refused: two would be mixed."""

import io
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from cli.inspect import chat
from cli.job.model import ModelChoice
from common.models.adapters.options import SavedAdapter
from common.models.checkpoint import shards
from common.models.checkpoint.watched import WatchedFiles
from tests.cli.conftest import Finetune
from tests.helpers.command.messages import check

SMALL = ("--batch-size", 2, "--seq-len", 32, "--gpu", "cpu", "--steps", 1)


def saved_adapter(model: Path, folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), config).save_pretrained(folder)
    return folder


def once(function: Callable[..., Any], first: Callable[[], object]) -> Callable[..., Any]:
    """Return a function that calls ``first`` before its first call of ``function`` returns."""
    done: list[object] = []

    def called(*args: Any, **named: Any) -> Any:
        result = function(*args, **named)
        if not done:
            done.append(first())
        return result

    return called


def exchange(folder: Path) -> None:
    """Put the files of another model of these shapes into a folder, each by a rename."""
    for file in sorted(folder.glob("*.safetensors")):
        content = bytearray(file.read_bytes())
        content[-4:] = b"\1\2\3\4"
        other = file.with_suffix(".new")
        other.write_bytes(content)
        other.replace(file)


@pytest.fixture
def parts(own_checkpoint: Path, tmp_path: Path) -> dict[str, Path]:
    return {"model": own_checkpoint, "adapter": saved_adapter(own_checkpoint, tmp_path / "adapter", 0)}


@pytest.mark.parametrize(("command", "replaced"), [
    ("train", "model"), pytest.param("train", "adapter", marks=pytest.mark.slow),
    *((command, replaced) for command in ("evaluate", "export", "chat") for replaced in ("model", "adapter")),
])  # fmt: skip
def test_what_is_replaced_while_it_is_read_is_refused(
    command: str,
    replaced: str,
    parts: dict[str, Path],
    data: Path,
    finetune: Finetune,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words: list[Any] = [command, "--model", parts["model"], "--adapter", parts["adapter"]]
    words += ["--data", data, *SMALL] if command == "train" else []
    words += ["--data", data, *SMALL[:-2]] if command == "evaluate" else []
    words += ["--output", tmp_path / "out"] if command in ("train", "export") else []
    with monkeypatch.context() as patch:
        change = lambda: exchange(parts[replaced])  # noqa: E731
        if command == "chat":
            monkeypatch.setattr("sys.stdin", io.StringIO("Hello"))
            patch.setattr(chat, "_model", once(chat._model, change))
        elif replaced == "model":
            patch.setattr(shards, "_read_elements", once(shards._read_elements, change))
        else:
            patch.setattr(SavedAdapter, "read", once(SavedAdapter.read, change))
        check(
            finetune(*words), 2, f"{parts[replaced]} was changed or replaced while it was read", "start again"
        )
    if command in ("train", "export"):
        assert not list((tmp_path / "out").glob("*.safetensors"))
        done = finetune(*words)
        assert done.status == 0, done.err


def test_a_tokenizer_of_one_model_and_weights_of_another(
    parts: dict[str, Path], data: Path, finetune: Finetune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between what the command reads and what the engine does."""
    change = once(ModelChoice.load_tokenizer, lambda: exchange(parts["model"]))
    monkeypatch.setattr(ModelChoice, "load_tokenizer", change)
    line = ("--model", parts["model"], "--data", data, *SMALL, "--output", tmp_path / "out")
    check(finetune(*line), 2, "was changed or replaced while it was read")


def test_a_language_model_that_gets_a_head(
    own_checkpoint: Path, finetune: Finetune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"text": "Text {i}", "label": "{"ab"[i % 2]}"}}\n' for i in range(6)))
    monkeypatch.setattr(
        "common.models.checkpoint.random_source.copy_tokenizer_files", lambda *_: exchange(own_checkpoint)
    )
    line = (
        "--model",
        own_checkpoint,
        "--data",
        data,
        "--objective",
        "classify",
        *SMALL,
        "--output",
        tmp_path / "out",
    )
    check(finetune(*line), 2, "was changed or replaced while it was read")
    assert not (tmp_path / "out" / "base").exists()


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--ssd", "drive")], ids=["in memory", "out of core"])
def test_ranks_do_not_read_what_is_replaced(
    words: tuple[Any, ...], own_checkpoint: Path, data: Path, finetune: Finetune, tmp_path: Path
) -> None:
    (tmp_path / "drive").mkdir()
    over = threading.Event()

    def keep_changing() -> None:
        while not over.wait(0.02):
            os.utime(own_checkpoint / "model.safetensors")

    writer = threading.Thread(target=keep_changing)
    writer.start()
    try:
        line = (
            "--model",
            own_checkpoint,
            "--data",
            data,
            *SMALL,
            "--output",
            tmp_path / "out",
            "--nodes",
            1,
            *words,
        )
        refused = finetune(*line, "--gpus-per-node", 2)
    finally:
        over.set()
        writer.join()
    assert refused.status == 2 and "was changed or replaced while it was read" in refused.err, refused.err
    done = finetune(*line, "--gpus-per-node", 2)
    assert done.status == 0, done.err


def test_what_is_a_change(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("model.safetensors", "config.json", "tokenizer.json", "generation_config.json", "README.md"):
        (model / name).write_text("x")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "weights-1.safetensors").symlink_to(model / "model.safetensors")
    for name, expected in (
        ("generation_config.json", ""),
        ("README.md", ""),
        ("config.json", "(config.json)"),
        ("chat_template.jinja", "(chat_template.jinja)"),
        ("model.safetensors", "(model.safetensors)"),
    ):
        watched, linked = WatchedFiles(model, None, "llama-10m"), WatchedFiles(tmp_path / "linked")
        shutil.copy(model / "README.md", model / "new")
        (model / "new").replace(model / name)
        assert (expected in watched.changed()) if expected else not watched.changed()
        assert bool(linked.changed()) is (name == "model.safetensors")
