"""The line of a step, lines in a log, and signs of life while something takes long."""

import sys
from collections.abc import Callable
from types import SimpleNamespace

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


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], float]:
    """Has a heartbeat look at activities for some seconds, on a clock that only looks move, and returns the time."""
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(cli.report.progress, "time", clock)
    monkeypatch.setattr(cli.report.progress, "FIRST_AFTER_S", 2.0)

    def watch(seconds: float) -> float:
        heartbeat, end = Heartbeat(), clock.now + seconds

        def wait(interval: float) -> bool:
            clock.now += interval
            return bool(clock.now > end)

        monkeypatch.setattr(heartbeat._over, "wait", wait)
        heartbeat._run()
        return clock.now

    return watch


def test_what_takes_long_is_reported_and_what_does_not_is_not(
    capsys: pytest.CaptureFixture[str], watch: Callable[[float], float]
) -> None:
    with activity("something quick"):
        watch(1.9)
    with activity("reading the data") as doing:
        doing.since = watch(0)
        watch(31)
        doing.since, doing.share = doing.since - 3600, lambda: 0.25
        watch(3)
    said = capsys.readouterr().err.splitlines()
    assert said[:-1] == [f"reading the data ({seconds} s so far)" for seconds in (2, 10, 30)]
    assert said[-1] == "reading the data: 25%, 3 h 01 min left (3634 s so far)"


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
