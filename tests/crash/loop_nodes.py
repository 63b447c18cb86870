"""Kill two nodes that train out of core, again and again at random moments; continue with as many or as few nodes.

Every life of a run has one or two nodes, drawn again; what nodes have that are not there, the first one finds on its
drives. A life ends alone or is killed: one rank, one optimizer process, or all. Losses and gradient norms of every
step, and in the end all weights, must be those of a run that nobody disturbed, bit for bit.

    python -m tests.crash.loop_nodes --minutes 4 --seed 1
"""

import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import psutil

from tests.helpers.crash.points import NOTHING_THERE
from tests.helpers.crash.ranks import RanksRun
from tests.helpers.crash.runs import Outcome, execute

STEPS = 8
NOTHING = (*NOTHING_THERE, "is not here, and nobody else has it")
"""What is reported where not every node has got so far as to hold the first weights."""


class Loop:
    """Runs, their lives, and the count of what was tried."""

    def __init__(self, folder: Path, seed: int):
        self._folder, self._random = folder, random.Random(seed)
        # One rank's two micro-batches are two ranks' one each, bit for bit.
        self._expected = _weights(execute(RanksRun(folder / "expected", nodes=1, steps=STEPS)))
        self.kills: Counter[str] = Counter()
        self.lives = self.changes = self.runs = 0
        self.mismatches: list[str] = []

    def run(self) -> None:
        """One run, from its begin to its end, in as many lives as it takes."""
        root = self._folder / f"run-{self.runs}"
        reached, committed, nodes, begun = 0, 0, 0, False
        while not self.mismatches:
            before, nodes = nodes, self._random.choice((1, 2))
            self.lives, self.changes = self.lives + 1, self.changes + (begun and nodes != before)
            options: dict[str, Any] = {"host_cache": self._random.choice((None, 0))}
            options |= {"resume": begun, "overwrite": not begun}
            life = RanksRun(root, options, nodes=nodes, before=2, steps=STEPS)
            outcome = execute(life, disturb=self._kill_someone)
            begun = not (outcome.status == 1 and any(text in outcome.error for text in NOTHING))
            self._require(begun or not reached, f"steps up to {reached} are lost: {outcome.error}")
            first = min(outcome.losses, default=reached + 1)
            self._require(first > reached - 2, f"from step {reached} back to {first}")
            self._require(first > committed, f"step {committed} was committed, and continues with {first}")
            reached = max(outcome.losses, default=reached)
            committed = max(committed, outcome.committed)
            for step, taken in outcome.losses.items():
                self._require(set(taken) == set(self._expected.losses[step]), f"step {step}: {taken}")
            if outcome.final is not None:
                self._require(_weights(outcome).final == self._expected.final, "weights differ")
                break
        self.runs += 1

    def _kill_someone(self, first: int) -> None:
        """After a random time; now and then nobody."""
        victim = self._random.choice(("all", "a process", "a process", "nobody"))
        time.sleep(self._random.uniform(0.2, 3.0))
        if victim == "nobody":
            return
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, IndexError):
            process = psutil.Process(first)
            group = [process, *process.children(recursive=True)]
            if victim == "all":
                os.killpg(first, signal.SIGKILL)
            else:
                self._random.choice(group).send_signal(signal.SIGKILL)
            self.kills[victim] += 1

    def _require(self, held: bool, what: str) -> None:
        if not held:
            self.mismatches.append(what)


def _weights(outcome: Outcome) -> Outcome:
    """Only what does not depend on the number of nodes."""
    assert outcome.final is not None, outcome.error
    final = {name: value for name, value in outcome.final.items() if not name.startswith("node ")}
    return replace(outcome, final=final)


@click.command()
@click.option("--minutes", type=float, default=1.0, show_default=True, help="How long to continue.")
@click.option("--seed", default=0, show_default=True, help="Of everything that is drawn.")
@click.option(
    "--directory", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Default: temporary."
)
def main(minutes: float, seed: int, directory: Path | None) -> None:
    """Print kills tried and mismatches found; exit with 1 if there is one."""
    end = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory(prefix="crash-loop-nodes-", dir=directory) as folder:
        loop = Loop(Path(folder), seed)
        while time.monotonic() < end and not loop.mismatches:
            loop.run()
    victims = ", ".join(f"{count} {victim}" for victim, count in sorted(loop.kills.items()))
    print(
        f"seed {seed}: {loop.kills.total()} kills ({victims}) in {loop.lives} lives of {loop.runs} runs of {STEPS} "
        f"steps, {loop.changes} changes of the number of nodes, {len(loop.mismatches)} mismatches"
    )
    for mismatch in loop.mismatches:
        print(f"  {mismatch}")
    sys.exit(1 if loop.mismatches else 0)


if __name__ == "__main__":
    main()
