"""Whole runs that are killed, and whose drives or files are gone when they are continued."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fuyou.engine.opening
from cli.train.engine_trainer import EngineTrainer
from tests.cli.conftest import Finetune
from tests.helpers.command.histories import history
from tests.helpers.command.kills import KILLED, killed_at
from tests.helpers.command.messages import check

pytestmark = pytest.mark.slow

SMALL = (
    "--batch-size",
    "2",
    "--seq-len",
    "32",
    "--gpu",
    "cpu",
    "--steps",
    "4",
    "--lr",
    "1e-2",
    "--max-grad-norm",
    "1",
)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_drive_that_is_not_mounted_does_not_begin_a_run_again(
    finetune: Finetune, checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    """As systemd starts the same line after a reboot."""
    drives = [tmp_path / "a", tmp_path / "b"]
    for drive in drives:
        drive.mkdir()
    command = ("--model", checkpoint, "--data", data, *SMALL)
    line = (*command, "--ssd", *drives, "--output", tmp_path / "out", "--resume", "auto")
    assert killed_at(EngineTrainer, "train_step", 3, list(map(str, line))) == KILLED
    metrics = (tmp_path / "out/run/metrics.jsonl").read_bytes()
    for lost in ((0,), (0, 1), (1,)):
        for number in lost:
            drives[number].rename(tmp_path / f"unmounted-{number}")
            drives[number].mkdir()
        outcome = finetune(*line)
        check(outcome, 2, str(drives[lost[0]]), "mount")
        check(finetune(*line[:-2]), 2, "--overwrite")
        assert (tmp_path / "out/run/metrics.jsonl").read_bytes() == metrics
        for number in lost:
            shutil.rmtree(drives[number])
            (tmp_path / f"unmounted-{number}").rename(drives[number])
    done = finetune(*line)
    assert done.status == 0 and "resume   after step" in done.out, done.err
    assert finetune(*command, "--output", tmp_path / "whole").status == 0
    assert history(tmp_path / "out") == history(tmp_path / "whole")


@pytest.mark.parametrize("words", [["--resume", "auto"], []], ids=["auto", "plain"])
def test_a_run_killed_while_its_weights_were_written_begins_again(
    words: list[str], finetune: Finetune, checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    line = ("--model", checkpoint, "--data", data, *SMALL, "--output", tmp_path / "out")
    assert killed_at(fuyou.engine.opening, "fill_store", 1, list(map(str, line))) == KILLED
    assert (tmp_path / "out/store/store.json").exists()
    check(finetune(*line, "--resume"), 2, "killed before its weights were written", "Leave --resume out")
    done = finetune(*line, *words)
    assert done.status == 0 and "step 1/4" in done.out, done.err


def test_a_commit_is_enough_to_continue(
    finetune: Finetune, checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    """As a power cut may leave it: files of ``run/`` are empty, and drives are named, or are the output itself."""
    command = ("--model", checkpoint, "--data", data, *SMALL)
    assert finetune(*command, "--output", tmp_path / "whole").status == 0
    (tmp_path / "drive").mkdir()
    for output, drive in ((tmp_path / "out", ()), (tmp_path / "far", ("--ssd", tmp_path / "drive"))):
        line = (*command, *drive, "--output", output)
        assert killed_at(EngineTrainer, "train_step", 3, list(map(str, line))) == KILLED
        for name in ("run.json", "config.toml", "metrics.jsonl"):
            (output / "run" / name).write_text("")
        done = finetune("--output", output, *drive, "--resume")
        assert done.status == 0 and "changed" not in done.out, done.err
        assert history(output) == history(tmp_path / "whole")
        before, after = (load_file(path / "model.safetensors") for path in (tmp_path / "whole", output))
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_finished_run_ends_with_0_and_is_left_alone(
    finetune: Finetune, checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    line = ("--model", checkpoint, "--data", data, *SMALL, "--output", tmp_path / "out")
    assert finetune(*line, "--resume", "auto").status == 0
    config = (tmp_path / "out/run/config.toml").read_bytes()
    assert finetune("--output", tmp_path / "out", "--resume", "--lr", "0.5").status == 0
    assert (tmp_path / "out/run/config.toml").read_bytes() == config, (
        "a rate with which no step was taken is not kept"
    )
    before = contents(tmp_path / "out")
    again = finetune(*line, "--resume", "auto")
    assert (again.status, again.out) == (0, f"finished after step 4: {tmp_path / 'out'}\n"), again.err
    assert contents(tmp_path / "out") == before
    shutil.rmtree(tmp_path / "out/store")  # "safe to delete unless you will resume"
    assert finetune(*line, "--resume", "auto").status == 0
    check(
        finetune(*line, "--steps", "8", "--resume", "auto"),
        2,
        "is finished (step 4)",
        str(tmp_path / "out/store"),
    )
    check(finetune("--output", tmp_path / "out", "--resume"), 2, "is finished (step 4)", "--overwrite")
