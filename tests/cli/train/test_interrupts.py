"""Signals that end a run, each in a separate process: the status, the deadline, and when they are not heard."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cli.job.outputs import RESULT, Outputs
from cli.train.process import Interrupts, is_rank
from tests.cli.conftest import Finetune

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
def test_a_signal_ends_a_run_in_order_or_in_time(
    number: signal.Signals, how: str, status: int, said: str
) -> None:
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


def test_the_stage_that_a_signal_ended_is_named() -> None:
    interrupts = Interrupts()
    assert interrupts.where == "before the first step"
    interrupts.enter("while the result was written")
    assert interrupts.where == "while the result was written"


@pytest.mark.parametrize(("name", "said"), [
    (RESULT, "stopped while the result was written; step 2 is committed. To continue: finetune "),
    ("checkpoints/step-1", "stopped while the checkpoint step-1 was saved; step 1 is committed. To continue: "),
])  # fmt: skip
def test_a_signal_during_a_write(
    finetune: Finetune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    """After the last step, there is no step 3 to be in."""
    prepare = Outputs.prepare

    def stopping(outputs: Outputs, what: str) -> Path:
        if what == name:
            os.kill(os.getpid(), signal.SIGTERM)
        return prepare(outputs, what)

    monkeypatch.setattr(Outputs, "prepare", stopping)
    words = ("--model", "llama-10m", "--data", "random", "--batch-size", 1, "--seq-len", 8, "--gpu", "cpu")
    stopped = finetune(*words, "--steps", 2, "--save-every", 1, "--save", "--output", tmp_path / "out")
    assert stopped.status == 143 and said in stopped.err, stopped.err


def test_commands_that_do_not_train_are_only_stopped(
    finetune: Finetune, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cli.main._run", stop)
    assert finetune("check").err.strip() == "stopped."
    assert finetune("--model", "llama-10m").err.strip() == "stopped before training began."
