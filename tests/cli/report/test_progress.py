"""The line of a step, lines in a log, and signs of life while something takes long."""

import contextlib
import fcntl
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import cli.report.progress
from cli.report.progress import Heartbeat, Progress
from common.activity import activity, current_activity

BEGAN = Heartbeat.began
"""Which other tests here do without."""


def test_a_line_has_the_time_that_is_left_which_a_slow_step_does_not_change(
    capsys: pytest.CaptureFixture[str],
) -> None:
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
    assert [
        int(line.split("/")[0].removeprefix("step ")) for line in steps
    ] == shown and last == "eval at step 5"


def test_a_terminal_has_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)
    monkeypatch.setattr("tqdm.std._screen_shape_wrapper", lambda: lambda _: (40, 20))
    progress = Progress(total=2)
    progress.show(1, 2.0, "loss 12.3457")
    progress.say("saved")
    progress.show(2, 2.0, "x")
    progress.close()
    drawn = [line.split("\r") for line in capsys.readouterr().err.split("\n")[:-1]]
    assert max(len(part) for parts in drawn for part in parts) <= 40
    assert [parts[-1].strip() for parts in drawn] == ["saved", "██████████ step 2/2, x"]
    assert [part.strip() for part in drawn[0]][1] == "█████      step 1/2, 2.0 s left"  # figures are not cut


def test_output_erases_the_line_of_an_activity(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((20, 40)))
    monkeypatch.setattr(Heartbeat, "began", BEGAN)
    with Heartbeat(), activity("measuring this machine and its drives", announced=True):
        print("first")
        print("second", file=sys.stderr)
    out, err = capsys.readouterr()
    assert (out, err) == ("first\n", "\r\x1b[Kmeasuring this mach\r\x1b[Ksecond\n")


def drawn_lines(columns: int, *words: str) -> list[str]:
    """Run the command in a terminal, and return every line that was ever on it: those that were erased, too."""
    pid, terminal = pty.fork()
    if pid == 0:
        environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
        environment.pop("COLUMNS", None)
        os.execve(sys.executable, [sys.executable, "-m", "cli.main", *words], environment)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    told = b""
    with contextlib.suppress(OSError):  # that is how a terminal ends
        while part := os.read(terminal, 1 << 16):
            told += part
    os.close(terminal)
    assert os.waitpid(pid, 0)[1] == 0, told.decode()
    return re.split(r"\r\x1b\[K|\r\n|\r", told.decode())


@pytest.mark.slow
@pytest.mark.parametrize("columns", [40, 80, 200])
def test_in_a_terminal(columns: int, tmp_path: Path) -> None:
    plan = drawn_lines(
        columns, "plan", "--gpu", "4090", "--drive", "p5510", "--host-memory", "64GiB", "--model", "llama-7b"
    )
    status = [line for line in plan if line.startswith("planning")]
    assert status and all(len(line) < columns for line in status)
    assert all(line.endswith((" ...", "s)")) for line in status if len(line) < columns - 1), status
    assert max(map(len, plan)) <= 80
    words = ["--model", "llama-10m", "--data", "random", "--seq-len", "16", "--gpu", "cpu", "--no-save"]
    train = drawn_lines(columns, *words, "--steps", "3", "--output", str(tmp_path / "out"))
    steps = [line for line in train if " step " in line]
    assert "step 3/3" in steps[-1] and all(len(line) <= columns for line in steps)
    assert not any(
        " step " in line or "writing" in line for line in train if line.startswith(("loss", "time", "rate"))
    )


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
