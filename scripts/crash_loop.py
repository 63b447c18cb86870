"""Kill a training run again and again, at random moments, and continue it with other options each time.

What every step must give is kept here, in a process that nobody kills: the losses, gradient norms and batches of a run
that was never interrupted, and the digests of its weights and moments. Victims are the engine, the optimizer process,
or both. Redrawn for every life: budgets, cache, deferral, kept activations, how often to commit and (where the run can
be restriped) the number of drives. The micro-batch is redrawn with every new run only: the order in which gradients
are added up is a part of the result, bit for bit.

    python scripts/crash_loop.py --minutes 4 --seed 1
"""

import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import click
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.crash.points import NOTHING_THERE
from tests.crash.runs import Outcome, Run, execute

STEPS = 10
VICTIMS = ("engine", "optimizer process", "both")


class Loop:
    """Runs, their lives, and the count of what was tried."""

    def __init__(self, folder: Path, seed: int):
        self._folder, self._random = folder, random.Random(seed)
        self._expected: dict[str, Outcome] = {}
        self.kills: Counter[str] = Counter()
        self.lives = self.runs = 0
        self.mismatches: list[str] = []

    def run(self, number: int) -> None:
        """One run, from its begin to its end, in as many lives as it takes."""
        numerics = {"max_grad_norm": self._random.choice((None, 0.5)), "micro_batch": self._random.choice((1, 2))}
        expected = self._expected_of(numerics)
        root = self._folder / f"run-{number}"
        reached, begun, ended = 0, False, False
        while not ended:
            self.lives += 1
            options = {**numerics, **self._draw(), "resume": begun}
            outcome = execute(Run(root, options, steps=STEPS), disturb=self._kill_someone)
            if outcome.status == 1 and any(text in outcome.error for text in NOTHING_THERE):
                self._require(not reached, f"steps up to {reached} are lost: {outcome.error}")
                options = {**options, "resume": False, "overwrite": True}
                outcome = execute(Run(root, options, steps=STEPS), disturb=self._kill_someone)
            begun = True
            known = outcome.status <= 0 or "optimizer process" in outcome.error
            self._require(known, f"life {self.lives} failed with {options}: {outcome.error}")
            for step, taken in outcome.losses.items():
                same = set(taken) == set(expected.losses[step])
                self._require(same, f"step {step}: {taken} instead of {expected.losses[step]} with {options}")
            if outcome.losses:
                first = min(outcome.losses)
                self._require(first > reached - self._allowed, f"from step {reached} back to {first} with {options}")
                reached = max(outcome.losses)
            deferred = numerics["max_grad_norm"] is not None or options["deferred_fraction"] > 0
            self._allowed = options["commit_every"] + deferred + 1
            ended = outcome.final is not None or bool(self.mismatches)
        if outcome.final is not None:
            self._require(outcome.final == expected.final, f"weights or moments differ with {options}")
        self.runs += 1

    _allowed = 1
    """Steps that the life before may have told of and not committed."""

    def _expected_of(self, numerics: dict[str, Any]) -> Outcome:
        key = str(numerics)
        if key not in self._expected:
            outcome = execute(Run(self._folder / f"expected-{len(self._expected)}", numerics, steps=STEPS))
            assert outcome.status == 0, outcome.error
            self._expected[key] = outcome
        return self._expected[key]

    def _draw(self) -> dict[str, Any]:
        choose = self._random.choice
        commit_every = choose((1, 1, 2, 3))
        return {
            "host_memory": choose(("300MiB", "600MiB", "1GiB")),
            "host_cache": choose((None, 0, "1MiB")),
            "commit_every": commit_every,
            "deferred_fraction": choose((0.0, 0.5, 1.0)),
            "kept_activations": choose((None, "16KiB")),
            "clip_by": choose(("deferral", "speculation")) if commit_every == 1 else "deferral",
        }

    def _kill_someone(self, engine: int) -> None:
        """After a random time; now and then nobody."""
        victim = self._random.choice((*VICTIMS, *VICTIMS, "nobody"))
        time.sleep(self._random.uniform(0.02, 0.9))
        if victim == "nobody":
            return
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            process = psutil.Process(engine)
            pids = [child.pid for child in process.children()] if victim != "engine" else []
            pids += [engine] if victim != "optimizer process" else []
            if process.status() == psutil.STATUS_ZOMBIE or not pids:
                return
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            self.kills[victim] += 1

    def _require(self, held: bool, what: str) -> None:
        if not held:
            self.mismatches.append(what)


@click.command()
@click.option("--minutes", type=float, default=1.0, show_default=True, help="How long to go on.")
@click.option("--seed", default=0, show_default=True, help="Of everything that is drawn.")
@click.option("--directory", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Default: temporary.")
def main(minutes: float, seed: int, directory: Path | None) -> None:
    """Print kills tried and mismatches found; exit with 1 if there is one."""
    end = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory(prefix="crash-loop-", dir=directory) as folder:
        loop = Loop(Path(folder), seed)
        while time.monotonic() < end and not loop.mismatches:
            loop.run(loop.runs)
    victims = ", ".join(f"{count} {victim}" for victim, count in sorted(loop.kills.items()))
    print(
        f"seed {seed}: {loop.kills.total()} kills ({victims}) in {loop.lives} lives of {loop.runs} runs of "
        f"{STEPS} steps, {len(loop.mismatches)} mismatches"
    )
    for mismatch in loop.mismatches:
        print(f"  {mismatch}")
    sys.exit(1 if loop.mismatches else 0)


if __name__ == "__main__":
    main()
