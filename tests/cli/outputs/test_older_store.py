"""A result, losses, and files that do not fit the run's store, or that this user cannot read or write."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from cli.inspect.evaluate import run_evaluate
from cli.job.outputs import Outputs
from cli.options.loss_sum import differing_steps
from cli.options.settings import Settings
from common.errors import UserError
from common.store.errors import StoreError, advice_on, described
from tests.cli.conftest import Finetune


def test_older_store_does_not_replace_a_later_result(
    finetune: Finetune, checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    output, words = tmp_path / "out", ("--gpu", "cpu", "--seq-len", "16", "--batch-size", "2")
    finetune("--model", checkpoint, "--data", data, *words, "--steps", "1", "--output", output)
    shutil.copytree(output / "store", tmp_path / "older")
    assert finetune("--output", output, "--resume", "--steps", "2").status == 0
    weights = (output / "model.safetensors").read_bytes()
    shutil.rmtree(output / "store")
    shutil.copytree(tmp_path / "older", output / "store")
    for options in (("--resume", "auto"), ("--resume", "--steps", "3")):
        done = finetune("--output", output, *options)
        assert done.status == 2 and "is that of step 2, and the run's store is at step 1" in done.err
    assert (output / "model.safetensors").read_bytes() == weights
    shutil.move(output / "model.safetensors", tmp_path)
    assert finetune("--output", output, "--resume", "--steps", "2").status == 0


def test_edited_losses_are_named_though_another_line_is_lost(tmp_path: Path) -> None:
    line = {"step": 1, "loss": 2.0, "grad_norm": 1.0, "lr": 0.1}
    lines = [line | {"step": step} for step in (1, 2, 3)]
    (tmp_path / "a").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "b").write_text("\n".join(map(json.dumps, [lines[1] | {"loss": 1.0}, lines[2]])))
    assert differing_steps(tmp_path / "b", tmp_path / "a") == [2]


def test_files_that_this_user_cannot_read_or_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = Outputs(tmp_path, "id")
    (tmp_path / "model.safetensors").write_text("weights")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "cannot be read by this user" in outputs.fault("model.safetensors")
    with pytest.raises(UserError, match=r"cannot be written to.*--ssd"):
        run_evaluate(Settings(model="llama-10m", data=("d.jsonl",)))


def test_a_killed_run_is_not_called_a_merge(tmp_path: Path) -> None:
    assert Outputs(tmp_path, "id").remedy(".") == ""


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EISDIR])
def test_errors_of_copies_name_the_file_that_is_written(
    number: int, finetune: Finetune, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number), "m/tokenizer.json", None, "out/tokenizer.json")

    monkeypatch.setattr("cli.main._run", fail)
    done = finetune("check")
    assert done.status == 1 and f"out/tokenizer.json: {os.strerror(number)}. " in done.err
    assert advice_on(OSError(number, "")) in done.err and "--debug" not in done.err


@pytest.mark.parametrize("damage", ["cut", "empty", "zeros"])
def test_damaged_files_of_transformers_and_peft_are_named(
    damage: str, finetune: Finetune, own_checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    """These libraries list no files: what cannot be read is named, with one sentence, before it is computed with."""
    adapter = tmp_path / "adapter"
    model = AutoModelForCausalLM.from_pretrained(own_checkpoint)
    get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(adapter)
    words = ("evaluate", "--model", own_checkpoint, "--adapter", adapter, "--data", data, "--seq-len", 16)
    files = (
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "adapter_config.json",
        "adapter_model.safetensors",
    )
    for name in files:
        file = (adapter if name.startswith("adapter_") else own_checkpoint) / name
        content = file.read_bytes()
        rest = {"cut": content[: len(content) // 2], "empty": b"", "zeros": bytes(len(content))}[damage]
        file.write_bytes(rest)
        refused = finetune(*words, "--gpu", "cpu")
        assert refused.status in (1, 2) and str(file.parent) in refused.err, refused.err
        what = "copy there the tokenizer files" if name == "tokenizer.json" else name
        assert what in refused.err and "--debug" not in refused.err and refused.err.count("\n") == 1, (
            refused.err
        )
        file.write_bytes(content)


def test_a_file_in_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "out/model.safetensors"
    file.mkdir(parents=True)
    named = pytest.raises(StoreError, match=rf"writing of out in {tmp_path} failed at {file}: Is a directory")
    with named, described("writing", tmp_path / "out"):
        file.write_text("")
