"""Run what newcomers did in their first hours, and print whether each action ends as the docs say.

    python scripts/first_day.py                # all: ten minutes on two idle cores
    python scripts/first_day.py resumed        # those whose names have the word

Numbers are those of a list that three newcomers wrote; what is missing needs a GPU, a network, or a terminal. None may
be silent for more than 3 s, and wrong paths must be reported within 1 s, both without waiting for a core.
"""

import contextlib
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import psutil
from newcomer.actions import ACTIONS, Step
from newcomer.materials import make_materials

LONGEST_SILENCE_S = 3.0
_BUSY = ("so far)\n", " ...\n")  # Ends of the lines that say what is happening


@dataclass
class Ended:
    """How a command line has ended."""

    status: int = 0
    output: str = ""
    seconds: float = 0.0
    silence: float = 0.0


def _waiting(process: psutil.Process) -> dict[int, float]:
    """Return how long a process and its descendants have waited for a core so far, in seconds."""
    waiting = {}
    with contextlib.suppress(psutil.Error, OSError, ValueError):
        for each in (process, *process.children(recursive=True)):
            waiting[each.pid] = float(Path(f"/proc/{each.pid}/schedstat").read_text().split()[1]) / 1e9
    return waiting


def newcomers_environment(folder: Path) -> dict[str, str]:
    """Return an environment with ``finetune`` on the path, empty caches, and no hub token; write the command."""
    command = folder / "finetune"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m cli.main "$@"\n')
    command.chmod(0o755)
    caches = {"HF_HOME": f"{folder}/hub", "FINETUNE_CACHE": f"{folder}/cache", "PYTHONUNBUFFERED": "1"}
    paths = {"PYTHONPATH": str(Path(__file__).parents[1]), "PATH": f"{folder}:{os.environ['PATH']}"}
    return (
        {name: value for name, value in os.environ.items() if name not in ("HF_TOKEN", "NO_COLOR")}
        | caches
        | paths
    )


def run_step(step: Step, directory: Path, output: Path, environment: dict[str, str]) -> Ended:
    """Run a command line in bash to its end, send its signal, and measure its silences."""
    # A simple command replaces bash, so that signals reach it.
    words = ["bash", "-c", step.command.replace("python ", f"{sys.executable} ")]
    with output.open("ab") as file:
        started = subprocess.Popen(words, cwd=directory, env=environment, stdout=file, stderr=file)
    process, ended, silent, sent = psutil.Process(started.pid), Ended(), 0.0, step.send is None
    clock, waited = time.monotonic(), _waiting(process)
    while started.poll() is None:
        time.sleep(0.05)
        text, now, waiting = output.read_text(errors="replace"), time.monotonic(), _waiting(process)
        lost = max((seconds - waited.get(pid, 0.0) for pid, seconds in waiting.items()), default=0.0)
        passed, clock, waited = max(0.0, now - clock - lost), now, waiting
        silent = 0.0 if text != ended.output or text.endswith(_BUSY) else silent + passed
        ended = Ended(0, text, ended.seconds + passed, max(ended.silence, silent))
        if not sent and step.send is not None and step.send[1] in text:
            started.send_signal(step.send[0])
            sent = True
    return Ended(started.returncode, output.read_text(errors="replace"), ended.seconds, ended.silence)


def faults(step: Step, ended: Ended, directory: Path) -> list[str]:
    """Return everything that is not as it should be."""
    problems = [] if ended.status == step.status else [f"status {ended.status} instead of {step.status}"]
    problems += [f"does not print {text!r}" for text in step.says if text not in ended.output]
    is_program = "python -c" in step.command
    never = step.never if is_program else ("Traceback", *step.never)
    problems += [f"prints {text!r}" for text in never if text in ended.output]
    if ended.silence > LONGEST_SILENCE_S and not is_program:
        problems.append(f"prints nothing for {ended.silence:.1f} s")
    if ended.seconds > step.within:
        problems.append(f"takes {ended.seconds:.1f} s instead of {step.within:g}")
    return problems + [f"leaves no {name}" for name in step.leaves if not (directory / name).exists()]


def run_action(name: str, work: Path, folder: Path) -> tuple[list[Ended], list[str]]:
    """Run an action's steps in a new folder, up to the first that goes wrong, with models and data of ``work``."""
    folder.mkdir()
    for kind in ("models", "data"):
        (folder / kind).symlink_to(work / kind)
    ended: list[Ended] = []
    for step in ACTIONS[name]:
        ended.append(run_step(step, folder, folder / f"step-{len(ended)}.log", newcomers_environment(work)))
        if problems := faults(step, ended[-1], folder):
            return ended, [f"$ {step.command}", *problems, *ended[-1].output.splitlines()[-12:]]
    return ended, []


@click.command()
@click.argument("words", nargs=-1)
def main(words: tuple[str, ...]) -> None:
    """Run the actions whose names have one of WORDS, and print a table; status 1: one does not end as it should."""
    failed = 0
    with TemporaryDirectory(prefix="first-day-") as temporary:
        make_materials(work := Path(temporary))
        print(f"{'action':70} commands  longest   silent  as the docs say")
        for number, name in enumerate(
            each for each in ACTIONS if not words or any(word in each for word in words)
        ):
            ended, problems = run_action(name, work, work / str(number))
            failed += bool(problems)
            longest, silence = (max(getattr(end, field) for end in ended) for field in ("seconds", "silence"))
            print(
                f"{name:70} {len(ended):8} {longest:6.1f} s {silence:6.1f} s  {'NO' if problems else 'yes'}"
            )
            print("".join(f"    {text}\n" for text in problems), end="", flush=True)
    print(f"{failed} of the actions did not end as they should." if failed else "All ended as they should.")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
