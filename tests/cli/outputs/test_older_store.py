"""A result, losses, and files that do not fit the run's store, or that this user cannot read or write."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from cli.inspect.evaluate import run_evaluate
from cli.job.outputs import Outputs
from cli.options.loss_sum import differing_steps
from cli.options.settings import Settings
from common.errors import UserError
from common.store.errors import advice_on
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
