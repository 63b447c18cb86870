"""Kill a training run again and again, at random moments, and continue it with other options each time.

What every step must give is kept here, in a process that nobody kills: the losses, gradient norms and batches of a run
that was never interrupted, and the digests of its weights and moments. Victims are the engine, the optimizer process,
or both. Redrawn for every life: budgets, cache, deferral, how to clip, kept activations, how often to commit, and the
drives, onto which the records then move (and may be killed at that). Redrawn for every run, for they change
its numbers: full or LoRA (with weights as they are, or in int8), the norm to clip to, and the micro-batch, which
decides in which order gradients are added up. In one run of five that is redrawn for every life as well, and losses
must agree within 2 %.

All that a killed run has left must be gone in the end: processes, shared memory, temporary files, files on any drive.

    nice -n 19 python -m tests.crash.loop --minutes 30 --seed 1 --workers 2
"""

import contextlib
import ctypes
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import click
import psutil

from common.models.adapters.options import AdapterOptions
from common.store.folders import successor_folder
from tests.helpers.crash.points import NOTHING_THERE
from tests.helpers.crash.runs import Outcome, Run, execute, start_server

STEPS = 10
VICTIMS = ("engine", "optimizer process", "both")
DRIVES = (0, 1, 2, 3)
TOLERANCE = 0.02
"""Of losses, relative, where the micro-batch changes between lives: gradients in bf16 are added up in another order."""
_SHARED_MEMORY, _NEW_NAMESPACE, _PRIVATE, _RECURSIVE = "/dev/shm", 0x20000, 1 << 18, 1 << 14


@dataclass
class Tally:
    """What was tried, and what did not hold."""

    kills: Counter[str] = field(default_factory=Counter)
    runs: Counter[str] = field(default_factory=Counter)
    """By what they train."""
    lives: int = 0
    moves: int = 0
    """Lives that were to continue with other drives than the one before."""
    kills_moving: int = 0
    """Kills that came while records were in progress."""
    mismatches: list[str] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """Add up all fields."""
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))

    def describe(self) -> str:
        victims = ", ".join(f"{count} {victim}" for victim, count in sorted(self.kills.items()))
        runs = ", ".join(f"{count} {what}" for what, count in sorted(self.runs.items()))
        return (
            f"{self.kills.total()} kills ({victims}; {self.kills_moving} of them while records moved) in {self.lives} "
            f"lives of {self.runs.total()} runs of {STEPS} steps ({runs}), {self.moves} moves to other drives, "
            f"{len(self.mismatches)} mismatches or things left behind"
        )


class Loop:
    """Runs, one after the other, and their lives.

    Args:
        folder: for the runs' drives.
        seed: of everything that is drawn.
    """

    def __init__(self, folder: Path, seed: int):
        self._folder, self._random = folder, random.Random(seed)
        self._expected: dict[str, Outcome] = {}
        self._seconds = 1.0  # of an undisturbed run
        self.tally = Tally()

    def run(self) -> None:
        """One run, from its begin to its end, in as many lives as it takes."""
        root, tally = self._folder / "run", self.tally
        numerics, what = self._draw_numerics()
        any_order = self._random.random() < 0.2
        expected = self._expected_of(numerics)
        reached, committed, allowed, begun, ended = 0, 0, 1, False, False
        drives = self._draw_drives()
        while not ended:
            options = {**numerics, **self._draw(), "resume": begun}
            if any_order:
                options["micro_batch"] = self._random.choice((1, 2))
            if reached and self._random.random() < 0.5:
                drives, before = self._draw_drives(), drives
                tally.moves += set(drives) != set(before)
            leaves = tuple(number for number in DRIVES if number not in drives) if begun else ()
            outcome = self._live(Run(root, options, leaves, drives=drives, steps=STEPS))
            if outcome.status == 1 and any(text in outcome.error for text in NOTHING_THERE):
                self._require(
                    not reached and not committed, f"steps up to {reached} are lost: {outcome.error}"
                )
                options = {**options, "resume": False, "overwrite": True}
                outcome = self._live(Run(root, options, drives=drives, steps=STEPS))
            begun = True
            context = f"with {options} on drives {drives}"
            known = outcome.status <= 0 or "optimizer process" in outcome.error
            self._require(known, f"a life failed {context}: {outcome.error}")
            for step, taken in outcome.losses.items():
                same = all(self._agree(took, expected.losses[step][0], any_order) for took in taken)
                self._require(same, f"step {step}: {taken} instead of {expected.losses[step]} {context}")
            if outcome.losses:
                first = min(outcome.losses)
                self._require(first > reached - allowed, f"from step {reached} back to {first} {context}")
                self._require(
                    first > committed, f"step {committed} was committed, and then comes {first} {context}"
                )
                reached, committed = max(outcome.losses), max(committed, outcome.committed)
            deferred = numerics["max_grad_norm"] is not None or options["deferred_fraction"] > 0
            # That this life may have reported and not committed
            allowed = options["commit_every"] + deferred + 1
            # One that is killed after its last step, while it clears up, leaves that to the next one.
            ended = outcome.status == 0 or bool(tally.mismatches)
        if outcome.status == 0:
            same = any_order or outcome.final == expected.final
            self._require(same, f"weights or moments differ {context}")
            self._look_at_drives(root, drives)
        tally.runs[what + (", any micro-batch" if any_order else "")] += 1
        shutil.rmtree(root)

    def _live(self, run: Run) -> Outcome:
        """One life, of which no process is left."""
        self.tally.lives += 1
        return execute(run, disturb=lambda engine: self._kill_someone(engine, run))

    def _look_at_drives(self, root: Path, drives: tuple[int, ...]) -> None:
        """After the end of a run, what it keeps is on its drives, and nothing anywhere else."""
        ours = {"store.json", "manifest.json", "weights.0", "weights.1", "weights.frozen"}
        for number in DRIVES:
            drive = root / f"ssd{number}"
            found = {str(path.relative_to(drive)) for path in drive.rglob("*")} if drive.exists() else set()
            wanted = {"fuyou-run", *(f"fuyou-run/{name}" for name in ours)} if number in drives else set()
            self._require(found <= wanted, f"left on drive {number}: {sorted(found - wanted)}")

    def _expected_of(self, numerics: dict[str, Any]) -> Outcome:
        key = str(numerics)
        if key not in self._expected:
            root = self._folder / "expected"
            began = time.monotonic()
            outcome = execute(Run(root, numerics, steps=STEPS))
            assert outcome.status == 0, outcome.error
            self._seconds = time.monotonic() - began
            self._expected[key] = outcome
            shutil.rmtree(root)
        return self._expected[key]

    def _agree(self, took: str, expected: str, roughly: bool) -> bool:
        if not roughly:
            return took == expected
        (loss, _, batch), (other, _, its) = took.split(), expected.split()
        return batch == its and abs(float.fromhex(loss) / float.fromhex(other) - 1) < TOLERANCE

    def _draw_numerics(self) -> tuple[dict[str, Any], str]:
        """Options that change a run's numbers, and what it trains in a word."""
        choose = self._random.choice
        numerics: dict[str, Any] = {"max_grad_norm": choose((None, 0.5, 1.6)), "micro_batch": choose((1, 2))}
        what = choose(("full", "full", "LoRA", "LoRA on int8"))
        if what != "full":
            numerics["adapters"] = AdapterOptions(4, dropout=0.1)
        if what == "LoRA on int8":
            numerics["frozen_dtype"] = "int8"
        return numerics, what

    def _draw(self) -> dict[str, Any]:
        choose = self._random.choice
        commit_every = choose((1, 1, 2, 3))
        return {
            "host_memory": choose(("300MiB", "600MiB", "1GiB")),
            "host_cache": choose((None, 0, "1MiB")),
            "commit_every": commit_every,
            "deferred_fraction": choose((0.0, 0.5, 1.0)),
            "saved_activations": choose((None, "16KiB")),
            "clip_by": choose(("deferral", "speculation")) if commit_every == 1 else "deferral",
        }

    def _draw_drives(self) -> tuple[int, ...]:
        return tuple(self._random.sample(DRIVES, self._random.randint(1, len(DRIVES))))

    def _kill_someone(self, engine: int, run: Run) -> None:
        """After a random time, every other one counted from when records begin to move; now and then nobody."""
        victim = self._random.choice((*VICTIMS, *VICTIMS, "nobody"))
        seconds, new = (
            min(self._seconds, 5.0),
            [successor_folder(path / "fuyou-run") for path in (*run.ssd, *run.leaving)],
        )
        if run.leaves and self._random.random() < 0.5:
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline and not any(path.exists() for path in new):
                time.sleep(0.002)
            seconds /= 5
        time.sleep(self._random.uniform(0.0, seconds))
        if victim == "nobody":
            return
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            process = psutil.Process(engine)
            pids = [child.pid for child in process.children()] if victim != "engine" else []
            pids += [engine] if victim != "optimizer process" else []
            if process.status() == psutil.STATUS_ZOMBIE or not pids:
                return
            moving = any(path.exists() for path in new)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            self.tally.kills[victim] += 1
            self.tally.kills_moving += moving

    def _require(self, held: bool, what: str) -> None:
        if not held:
            self.tally.mismatches.append(what)


def own_shared_memory() -> bool:
    """Let this process and its children have a separate /dev/shm, so that all that is left there is theirs.
    Returns whether the system allows it."""
    libc = ctypes.CDLL(None)
    return (
        libc.unshare(_NEW_NAMESPACE) == 0
        and libc.mount(b"none", b"/", None, _PRIVATE | _RECURSIVE, None) == 0
        and libc.mount(b"tmpfs", _SHARED_MEMORY.encode(), b"tmpfs", 0, None) == 0
    )


@click.command()
@click.option("--minutes", type=float, default=1.0, show_default=True, help="How long to continue.")
@click.option(
    "--seed", default=0, show_default=True, help="Of everything that is drawn; each worker adds its number."
)
@click.option("--workers", default=1, show_default=True, help="Runs at once.")
@click.option(
    "--directory", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Default: temporary."
)
def main(minutes: float, seed: int, workers: int, directory: Path | None) -> None:
    """Print kills tried and mismatches found; exit with 1 if there is one."""
    watched = own_shared_memory()
    tally, end, failed = Tally(), time.monotonic() + 60 * minutes, threading.Event()
    with tempfile.TemporaryDirectory(prefix="crash-loop-", dir=directory) as place:
        temporary = os.environ["TMPDIR"] = str(Path(place) / "temporary")
        os.mkdir(temporary)
        start_server()

        def work(number: int) -> Tally:
            folder = Path(place) / f"worker-{number}"
            folder.mkdir()
            loop = Loop(folder, seed + number)
            while time.monotonic() < end and not failed.is_set():
                loop.run()
                if loop.tally.mismatches:
                    failed.set()
            return loop.tally

        with ThreadPoolExecutor(workers) as pool:
            for found in pool.map(work, range(workers)):
                tally.add(found)
        places = [temporary, _SHARED_MEMORY] if watched else [temporary]
        tally.mismatches += [f"left behind: {file}" for folder in places for file in Path(folder).iterdir()]
    print(f"seed {seed}: {tally.describe()}")
    for mismatch in tally.mismatches:
        print(f"  {mismatch}")
    sys.exit(1 if tally.mismatches else 0)


if __name__ == "__main__":
    main()
