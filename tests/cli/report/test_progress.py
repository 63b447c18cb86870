"""The line of a step, lines in a log, and signs of life while something takes long."""

import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

import cli.report.progress
from cli.report.progress import Heartbeat, Progress
from common.activity import activity, current_activity


def test_a_line_has_the_time_that_is_left_which_a_slow_step_does_not_change(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(total=100_000)
    for step, seconds in ((1, 2.0), (2, 2.0), (3, 900.0)):  # a checkpoint was saved
        progress.show(step, seconds, "loss 12.3457")
    assert capsys.readouterr().out.splitlines()[1:] == [
        "step 2/100000, 2 d 7 h left: loss 12.3457", "step 3/100000, 2 d 7 h left: loss 12.3457",
    ]  # fmt: skip


@pytest.mark.parametrize(("every", "shown"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5])])
def test_lines_now_and_then(every: int, shown: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(total=5, every=every)
    for step in range(1, 6):
        progress.show(step, 2.0, "")
    progress.say("eval at step 5")
    *steps, last = capsys.readouterr().out.splitlines()
    assert [int(line.split("/")[0].removeprefix("step ")) for line in steps] == shown and last == "eval at step 5"


def test_a_terminal_has_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "20")
    progress = Progress(total=2)
    progress.show(1, 2.0, "loss 12.3457")
    progress.say("saved")
    progress.show(2, 2.0, "x")
    progress.close()
    assert capsys.readouterr().err == "\r\x1b[Kstep 1/2, 2.0 s lef\r\x1b[Ksaved\n\r\x1b[Kstep 2/2: x\n"


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
