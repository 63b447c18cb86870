"""Signals that end a run, each in a separate process: the status, the deadline, and when they are not heard."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cli.train.process import is_rank

PROGRAM = """
import os, signal, sys, time
import cli.train.process
from cli.train.process import Interrupts
cli.train.process.STOP_SECONDS = 0.3
number, hangs = int(sys.argv[1]), sys.argv[2] == "hangs"
signal.signal(number, signal.SIG_IGN if sys.argv[2] == "nohup" else signal.SIG_DFL)  # not what we inherited
with Interrupts() as interrupts:
    interrupts.how_to_continue = "To continue: this"
    try:
        os.kill(os.getpid(), number)
        print("not heard")
        sys.exit(3)
    except KeyboardInterrupt:
        os.kill(os.getpid(), number)  # a second one does not cut short what follows
        if hangs:
            time.sleep(600)
        print("put in order")
sys.exit(interrupts.status())
"""


@pytest.mark.parametrize(("number", "how", "status", "said"), [
    (signal.SIGINT, "ends", 130, "put in order"),
    (signal.SIGTERM, "ends", 143, "put in order"),
    (signal.SIGHUP, "ends", 129, "put in order"),
    (signal.SIGTERM, "hangs", 143, "stopped at once, after 0 s. To continue: this"),
    (signal.SIGHUP, "hangs", 129, "stopped at once, after 0 s. To continue: this"),
    (signal.SIGHUP, "nohup", 3, "not heard"),
])  # fmt: skip
def test_a_signal_ends_a_run_in_order_or_in_time(number: signal.Signals, how: str, status: int, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(int(number)), how], capture_output=True, text=True,
        cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert done.returncode == status and said in done.stdout + done.stderr, done.stderr


AFTERWARDS = """
import os, signal, sys
from cli.train.process import Interrupts
number, ends_process = int(sys.argv[1]), sys.argv[2] == "ends"
signal.signal(number, signal.SIG_DFL)
with Interrupts(ends_process) as interrupts:
    interrupts.finish()
    os.kill(os.getpid(), number)
print("saved", flush=True)
os.kill(os.getpid(), number)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_after_all_is_saved_ends_nothing(number: signal.Signals) -> None:
    def run(how: str) -> int:
        words = [sys.executable, "-c", AFTERWARDS, str(int(number)), how]
        done = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parents[3])
        assert "saved" in done.stdout, done.stderr
        return done.returncode

    assert run("ends") == 0
    assert run("continues") == -number


def test_a_command_that_inherits_some_variables_of_a_rank_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE"):
        assert not is_rank()
        monkeypatch.setenv(name, "0")
    assert is_rank()
