"""The line of a step, lines in a log, and signs of life while something takes long."""

import sys
import time

import pytest

import cli.report.progress
from cli.report.progress import Heartbeat, Progress
from cli.report.results import IoCounts, MemoryUse, StepMetrics, StepResult
from common.activity import activity, current_activity


def metrics(step: int, seconds: float = 2.0) -> StepMetrics:
    result = StepResult(loss=12.34567, grad_norm=123.456, busy_seconds={"ssd": 1.0, "gpu": 0.5})
    return StepMetrics(
        step=step, result=result, lr=1.2345e-5, seconds=seconds, tokens=8192, model_flops_per_token=1e9,
        memory=MemoryUse(), io=IoCounts(), epoch=1.5,
    )  # fmt: skip


def test_a_line_has_what_people_look_at_and_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(total=100_000, done=0)
    for step in (1, 2):
        progress.show(metrics(step))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == (
        "step 2/100000, 2 d 7 h left: loss 12.3457, norm 123, lr 1.23e-05, epoch 1.50, 4.1 K tokens/s, bound by SSDs"
    )
    assert all(len(line) < 120 for line in lines)


def test_a_slow_step_does_not_change_the_time_that_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(total=10, done=0)
    for step, seconds in ((1, 2.0), (2, 2.0), (3, 900.0)):  # a checkpoint was saved
        progress.show(metrics(step, seconds))
    assert capsys.readouterr().out.splitlines()[-1].startswith("step 3/10, 14.0 s left: ")


@pytest.mark.parametrize(("every", "shown"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5])])
def test_lines_now_and_then(every: int, shown: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(total=5, done=0, every=every)
    for step in range(1, 6):
        progress.show(metrics(step))
    progress.say("eval at step 5")
    *steps, last = capsys.readouterr().out.splitlines()
    assert [int(line.split("/")[0].removeprefix("step ")) for line in steps] == shown and last == "eval at step 5"


BEGAN = Heartbeat.began
"""Which other tests here do without."""


def test_activities_are_inside_each_other() -> None:
    assert current_activity() is None
    with activity("outer") as outer:
        with activity("inner") as inner:
            inner.what = "inner: half of it"
            assert current_activity() is inner
        assert current_activity() is outer
    assert current_activity() is None


def test_what_takes_long_is_reported_and_what_does_not_is_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli.report.progress, "FIRST_AFTER_S", 0.4)
    monkeypatch.setattr(cli.report.progress, "AGAIN_AFTER_S", (0.4,))
    monkeypatch.setattr(cli.report.progress, "_LOOK_EVERY_S", 0.02)
    with Heartbeat():
        with activity("something quick"):
            time.sleep(0.05)
        with activity("reading the data"):
            time.sleep(2)
    said = capsys.readouterr().err.splitlines()
    assert len(said) >= 2 and all(line.startswith("reading the data (") for line in said)
    assert all(line.endswith("s so far)") for line in said)


def test_the_part_that_is_done_and_the_time_left_are_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli.report.progress, "FIRST_AFTER_S", 0.4)
    monkeypatch.setattr(cli.report.progress, "_LOOK_EVERY_S", 0.02)
    with Heartbeat(), activity("taking step 3") as doing:
        doing.since, doing.share = time.monotonic() - 3600, lambda: 0.25
        time.sleep(1)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("taking step 3: 25%, 3 h 00 min left (360") and line.endswith(" s so far)")


def test_what_may_hold_the_lock_is_reported_before_it_begins(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a log and on a terminal, where the line is gone before another is printed."""
    monkeypatch.setattr(Heartbeat, "began", BEGAN)
    with Heartbeat(), activity("loading", announced=True):
        assert capsys.readouterr().err == "loading ...\n"
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Heartbeat():
        with activity("loading", announced=True):
            assert capsys.readouterr().err == "\r\x1b[Kloading ..."
        assert capsys.readouterr().err == "\r\x1b[K"
