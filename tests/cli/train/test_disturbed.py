"""Somebody moves or deletes files of the output during a run: a line names that, and nothing is written
elsewhere."""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cli.inspect.check import run_verify
from cli.job.outputs import Outputs
from cli.options.run_record import RunRecord
from cli.report.log import History, MetricsLogger
from cli.train import ranks
from cli.train.engine_trainer import EngineTrainer
from cli.train.process import Interrupts
from common.errors import UserError
from tests.cli.conftest import Finetune, Outcome

SMALL = ("--batch-size", 2, "--seq-len", 16, "--gpu", "cpu", "--steps", 3, "--data", "random")


@pytest.fixture
def disturbed(
    finetune: Finetune, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Outcome]:
    """Runs three steps into ``out``, and does something to that before the second one is logged."""

    def run(disturb: Callable[[Path], object], *words: object) -> Outcome:
        before, is_over = MetricsLogger.step, False

        def step(logger: MetricsLogger, number: int, *rest: object) -> None:
            nonlocal is_over
            if number == 2 and not is_over:
                is_over = True
                disturb(tmp_path / "out")
            before(logger, number, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(MetricsLogger, "step", step)
        return finetune("--model", checkpoint, *SMALL, "--output", tmp_path / "out", *words)

    return run


@pytest.mark.parametrize(
    "names", [["run/run.json"], ["run"], ["run/config.toml", "run/files.json", "losses.jsonl"]]
)
def test_what_describes_a_run_is_written_again(
    disturbed: Callable[..., Outcome], names: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def delete(output: Path) -> None:
        for path in (output / name for name in names):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    output = tmp_path / "out"
    done = disturbed(delete)
    assert done.status == 0 and "deleted during the run" in done.out, done.err
    record = RunRecord.read(output)
    assert (
        record is not None
        and record.ended_after == 3
        and [place.path for place in record.places] == [f"{output}/store"]
    )
    assert {path.name for path in (output / "run").iterdir()} >= {"run.json", "config.toml", "files.json"}
    assert run_verify([str(output)]) == 0, capfd.readouterr().err


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_an_output_that_is_moved_ends_the_run(
    disturbed: Callable[..., Outcome],
    finetune: Finetune,
    checkpoint: Path,
    tmp_path: Path,
    is_elsewhere: bool,
) -> None:
    output, moved, drive = tmp_path / "out", tmp_path / "moved", tmp_path / "drive"
    drive.mkdir()
    words = ("--ssd", drive) if is_elsewhere else ()
    ended = disturbed(lambda output: output.rename(moved), *words)
    assert ended.status == 2 and ended.err.count("finetune: error") == 1, ended.err
    assert (
        f"{output} was moved to {moved} during the run. Move it back: mv {moved} {output}. To con"
        in ended.err
    )
    assert not output.exists()
    moved.rename(output)
    continued = finetune("--output", output, "--resume", *words)
    assert continued.status == 0 and len((output / "losses.jsonl").read_text().splitlines()) == 3, (
        continued.err
    )


def test_an_output_that_is_replaced_ends_the_run(disturbed: Callable[..., Outcome], tmp_path: Path) -> None:
    def replace(output: Path) -> None:
        output.rename(tmp_path / "moved")
        output.mkdir()

    (tmp_path / "drive").mkdir()
    ended = disturbed(replace, "--ssd", tmp_path / "drive")
    assert ended.status == 2 and "was moved to" in ended.err, ended.err
    assert not any((tmp_path / "out").iterdir())


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_an_output_that_is_removed_ends_the_run(
    disturbed: Callable[..., Outcome], tmp_path: Path, is_elsewhere: bool
) -> None:
    (tmp_path / "drive").mkdir()
    ended = disturbed(shutil.rmtree, *(("--ssd", tmp_path / "drive") if is_elsewhere else ()))
    what = "To continue: finetune" if is_elsewhere else "enter the command again, without --resume."
    assert (
        ended.status == 2 and f"{tmp_path}/out was removed during the run" in ended.err and what in ended.err
    )
    assert ended.err.count("\n") == 1 and not (tmp_path / "out").exists(), ended.err


def test_other_ranks_see_that_the_output_is_moved(
    finetune: Finetune, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their node may see another directory than rank 0's does."""
    before, drive, output = EngineTrainer.train_step, tmp_path / "drive", tmp_path / "out"

    def step(trainer: EngineTrainer, *rest: Any) -> Any:
        if output.exists():
            output.rename(tmp_path / "moved")
        return before(trainer, *rest)

    drive.mkdir()
    monkeypatch.setattr(EngineTrainer, "train_step", step)
    monkeypatch.setattr(Interrupts, "is_rank0", False)
    ended = finetune("--model", checkpoint, *SMALL, "--output", output, "--ssd", drive)
    assert ended.status == 2 and f"{output} was moved to {tmp_path / 'moved'}" in ended.err, ended.err


def test_other_ranks_hold_the_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out"
    output.mkdir()
    job, store = SimpleNamespace(outputs=Outputs.read(output)), SimpleNamespace(check=lambda names: True)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(ranks, "resolve", lambda settings, is_restart: job)
    settings: Any = SimpleNamespace(
        command="train", ssd=(), output_directory=output, how_to_continue="To continue: x"
    )
    rank: Any = SimpleNamespace(is_rank0=False, restarted=False, node=0)
    with contextlib.ExitStack() as stack:
        ranks._prepare(settings, rank, store, stack)  # type: ignore[arg-type]
        job.outputs.check_in_place()
        output.rename(tmp_path / "moved")
        with pytest.raises(UserError, match=r"was moved to .*Move it back"):
            job.outputs.check_in_place()
        output.mkdir()
        with pytest.raises(UserError, match=r"was moved to .*Move it back"):
            job.outputs.check_in_place()


def test_a_file_system_that_is_mounted_over_the_output_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the path is another directory, and the run's has no other path."""
    output, other = tmp_path / "out", tmp_path / "other"
    output.mkdir()
    other.mkdir()
    settings: Any = SimpleNamespace(
        command="train", ssd=(), output_directory=output, how_to_continue="To continue: x"
    )
    outputs, before = Outputs.read(output), os.stat
    with outputs.held(settings):
        monkeypatch.setattr(os, "stat", lambda path, **how: before(other if path == output else path, **how))
        with pytest.raises(
            UserError, match=rf"^{output} is another directory now than .* is mounted.*To continue: x"
        ):
            outputs.check_in_place()


def _replace(file: Path) -> None:
    file.rename(file.with_suffix(".1"))
    file.write_text('{"step": 1, "loss": 1}')


@pytest.mark.parametrize(("disturb", "steps", "message"), [
    (Path.unlink, [3, 4], "was moved, replaced, or deleted"),
    (lambda file: shutil.rmtree(file.parent), [3, 4], "was moved, replaced, or deleted"),
    (lambda file: file.rename(file.with_suffix(".1")), [3, 4], "was moved, replaced, or deleted"),
    (_replace, [1, 3, 4], "was moved, replaced, or deleted"),
    (lambda file: file.write_text(""), [3, 4], "was cut"),
    (lambda file: None, [1, 2, 3, 4], ""),
])  # fmt: skip
def test_no_line_is_written_to_a_file_that_is_gone(
    disturb: Callable[[Path], object], steps: list[int], message: str, tmp_path: Path
) -> None:
    file, said = tmp_path / "run/metrics.jsonl", list[str]()
    file.parent.mkdir()
    history = History(file, 0)
    history.say = said.append
    for step in (1, 2):
        history.append(step, {"loss": step})
    disturb(file)
    for step in (3, 4):
        history.append(step, {"loss": step})
    history.close()
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == steps
    assert len(said) == bool(message) and message in "".join(said)


def test_a_clock_that_is_set_during_a_run_does_not_end_it(
    finetune: Finetune, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    days, real = iter(range(10**6)), time.time
    monkeypatch.setattr("time.time", lambda: real() + 86400.0 * next(days))
    done = finetune(
        "--model", checkpoint, *SMALL, "--output", tmp_path / "out", "--no-save", "--max-hours", 1
    )
    assert done.status == 0 and len((tmp_path / "out/losses.jsonl").read_text().splitlines()) == 3, done.err
