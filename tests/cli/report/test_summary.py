"""The report's fields and its arithmetic."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from cli.report.log import History
from cli.report.results import IoCounts, Measurements, MemoryUse, RunTotals, StepResult
from common.store.errors import StoreError
from tests.helpers.command.reports import FIELDS


def test_report(tmp_path: Path) -> None:
    measured = Measurements(tokens_per_step=100, model_flops=6e9, hardware_flops=8e9)
    measured.add(2.0, StepResult(3.0, 1.0, busy_seconds={"gpu": 1.0, "ssd": 1.5}))
    busy = {"gpu": 1.0, "ssd": 2.5}
    measured.add(3.0, StepResult(2.0, 1.0, clipped=True, updated_again=True, busy_seconds=busy))
    io, evaluation = IoCounts(2700, 1100, 2500, 1000), IoCounts(400, 100, 300, 0)
    report = measured.report(RunTotals(10, 9, MemoryUse(1, 2), 3, io, evaluation, clip_by="speculation", way="kvikio"))
    report.write(tmp_path / "report.json")
    got = json.loads((tmp_path / "report.json").read_text())
    assert got.keys() == FIELDS
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert (got["steps"], got["losses"], got["step_seconds"]) == (2, [3.0, 2.0], [2.0, 3.0])
    assert got["tokens_per_second"] == 40
    assert (got["flops_per_second"], got["hardware_flops_per_second"]) == (40 * 6e9, 40 * 8e9)
    assert (got["ssd_read_bytes_per_step"], got["planned_ssd_read_bytes_per_step"]) == (1150, 1100)
    assert got["bound_seconds"] == {"gpu": 1.0, "ssd": 2.0}
    assert got["overlap_efficiency"] == pytest.approx(2.0 / 2.5)
    assert "bound by the SSDs (80% of the time)" in report.summary(10**12)
    assert "1 TB written in all; parameters to the device past host memory" in report.summary(10**12)
    assert "past host memory" not in replace(report, way="posix").summary(10**12)
    assert "by speculation: 1 of 2 steps clipped, 1 of them updated again" in report.summary(0)


def test_a_full_file_system_is_reported_with_the_file(tmp_path: Path) -> None:
    with History(tmp_path / "losses.jsonl", 0) as history:
        before, history._file = history._file, Path("/dev/full").open("a", buffering=1)  # noqa: SIM115
        with pytest.raises(StoreError, match=f"writing of losses.jsonl in {tmp_path} failed: No space left on device"):
            history.append(1, {"loss": 0.5})
        history._file = before


def test_lines_are_on_the_drive_before_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, durable, fsync = tmp_path / "losses.jsonl", [], os.fsync

    def noted(descriptor: int) -> None:
        durable.append(os.fstat(descriptor).st_size)
        fsync(descriptor)

    with History(file, 0) as history:
        monkeypatch.setattr(os, "fsync", noted)
        for step in (1, 2):
            history.append(step, {"loss": 0.5})
            assert durable[-1] == file.stat().st_size == step * len('{"step": 1, "loss": 0.5}\n')


def test_what_is_not_finite_has_no_number(tmp_path: Path) -> None:
    measured = Measurements(100, 1, 1)
    for loss in (2.5, float("nan"), 2.0):
        measured.add(1.0, StepResult(loss, 1.0))
    report = measured.report(RunTotals(10, 10))
    assert "2.5000 in the first step, 2.0000 in the last of 3" in report.summary(0)
    report.write(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)["losses"] == [2.5, None, 2.0]
    with History(tmp_path / "losses.jsonl", 0) as history:
        history.append(2, {"loss": float("nan"), "grad_norm": float("inf"), "lr": 1e-3})
    line = json.loads((tmp_path / "losses.jsonl").read_text(), parse_constant=pytest.fail)
    assert line == {"step": 2, "loss": None, "grad_norm": None, "lr": 1e-3}


def test_a_damaged_line_goes_and_the_others_stay(tmp_path: Path) -> None:
    file = tmp_path / "losses.jsonl"
    good = b'{"step": 1, "loss": 2.0}\n'
    file.write_bytes(good + b'{"step": \xff}\n' + b"[" * 100_000 + b'\n{"step": 9}\n{"st')
    History(file, 3).__exit__(None, None, None)
    assert file.read_bytes() == good
