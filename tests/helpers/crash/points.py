"""Crash a run at one point, continue it, and compare all of it with the run that was never interrupted."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.helpers.crash.drives import Fault, count
from tests.helpers.crash.power import cut_power
from tests.helpers.crash.runs import STEPS, Outcome, Run, execute

#: What a run says that was cut short before its first weights were written.
NOTHING_THERE = (
    "holds no run to continue", "was never finished", "before its weights were written", "no directory",
    "nothing to continue", "no step was committed", "there is no commit in",
)  # fmt: skip


#: What happens at a call: action, and whether the power goes as well.
ENDINGS = (("kill all", False), ("kill self", False), ("tear", True), ("kill all", True))

#: The step after which runs are moved.
MOVED_AT = 2


@dataclass(frozen=True)
class Reference:
    """The run that nothing happens to."""

    outcome: Outcome
    files: list[str]
    """Everything that it leaves."""
    calls: int
    """How many calls it makes to its drives."""
    start: Path | None = None
    """What is on them before it; to be copied."""


def reference(run: Run) -> Reference:
    """What comes of ``run`` without faults."""
    outcome = execute(run)
    assert outcome.status == 0, outcome.error
    found = Reference(outcome, files_in(run.root), count(run.notes))
    clean(run.root)
    return found


def crash(run: Run, expected: Reference, power: int | None = None) -> bool:
    """One crash and all that must hold after it. Returns whether the fault came before the run's end.

    Args:
        run: with a fault; its root is made, and removed if all is well.
        power: seed of what a power cut takes with it; None: only processes die.

    Raises:
        AssertionError: something does not hold.
    """
    first = interrupt(run, expected, power)
    if first is None:
        return False
    assert first.status < 0 or first.expected_error, f"the run failed in an unforeseen way: {first.error}"
    check(first, carry_on(run, first), expected, run.options)
    assert files_in(run.root) == expected.files
    clean(run.root)
    return True


def interrupt(run: Run, expected: Reference | None, power: int | None) -> Outcome | None:
    """The life of ``run`` that its fault cuts short, and the power; None if it came to its end before, as ``expected``
    (if that is known)."""
    first = execute(replace(run, journal=power is not None))
    if first.status == 0:
        assert expected is None or first.final == expected.outcome.final
        clean(run.root)
        return None
    if power is not None:
        cut_power(run.root, run.notes, power)
    return first


def carry_on(run: Run, first: Outcome) -> Outcome:
    """The life after that: the run is continued; or begun again, where nothing is lost by it."""
    run = replace(run, fault=None, options={**run.options, "resume": True})
    second = execute(run)
    if second.status == 1 and any(text in second.error for text in NOTHING_THERE):
        assert not first.losses, f"steps {sorted(first.losses)} are lost: {second.error}"
        second = execute(replace(run, options={**run.options, "resume": False, "overwrite": True}))
    return second


def check(first: Outcome, second: Outcome, expected: Reference, options: dict[str, Any]) -> None:
    """The continued run is bit for bit the one that was never interrupted."""
    assert second.status == 0, f"the run could not be continued: {second.error}"
    assert second.final == expected.outcome.final
    for outcome in (first, second):
        for step, taken in outcome.losses.items():
            assert set(taken) == set(expected.outcome.losses[step]), f"step {step} differs"
    resumed = min(second.losses, default=STEPS + 1)
    assert set(range(resumed, STEPS + 1)) == set(second.losses)
    assert resumed > first.committed, f"step {first.committed} had been committed, and is lost"
    # A step is reported once its gradients exist. Its updates wait for the commit of the one before, which may never
    # come to its end; and with deferred updates a commit comes one step later.
    allowed = options.get("commit_every", 1) + 1 + (1 if options.get("max_grad_norm") else 0)
    assert resumed > max(first.losses, default=0) - allowed, f"more was lost than step {resumed}"


@dataclass(frozen=True)
class Move:
    """From some drives to others."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    def run(
        self, root: Path, fault: Fault | None = None, journal: bool = False, steps: int = MOVED_AT
    ) -> Run:
        """A life on the drives of after; that of the move alone, without a step, if ``steps`` is not more."""
        leaves = tuple(number for number in self.before if number not in self.after)
        return Run(root, {"resume": True}, leaves, fault, journal, self.after, steps)


def move_reference(root: Path, move: Move) -> Reference:
    """What comes of moving without faults, in ``root``, which is made; its outcome is that of the run that was never
    moved."""
    root.mkdir()
    whole = execute(Run(root / "final_folder"))
    started = execute(Run(root / "start", drives=move.before, steps=MOVED_AT))
    assert whole.status == started.status == 0, whole.error + started.error
    for number in move.after:
        (root / "start" / f"ssd{number}").mkdir(exist_ok=True)
    shutil.copytree(root / "start", root / "moved")
    run = move.run(root / "moved")
    moved = execute(run)
    assert moved.status == 0 and moved.final == started.final, moved.error
    found = Reference(whole, files_in(root / "moved"), count(run.notes), root / "start")
    clean(root / "moved")
    return found


def crash_move(
    root: Path, move: Move, fault: Fault, expected: Reference, power: int | None, back: bool
) -> bool:
    """One crash while records move, and all that must hold after it. Returns whether the fault came.

    Args:
        back: try the drives of before first, as one who has changed his mind.

    Raises:
        AssertionError: something does not hold.
    """
    assert expected.start is not None
    shutil.copytree(expected.start, root)
    first = execute(move.run(root, fault, journal=power is not None))
    if first.status == 0:
        clean(root)
        return False
    assert first.status < 0 or first.expected_error, f"the run failed in an unforeseen way: {first.error}"
    if power is not None:
        cut_power(root, root.with_name(root.name + ".notes"), power)
    came_back = False
    if back:
        second = execute(Run(root, {"resume": True}, drives=move.before, steps=MOVED_AT))
        came_back = second.status == 0
        told = ["not among those given", "no directory", "has moved"]
        if not any(path.is_file() for number in move.before for path in (root / f"ssd{number}").rglob("*")):
            told.append("holds no run to continue")  # all of it has gone
        assert came_back or any(text in second.error for text in told), second.error
    last = execute(move.run(root, steps=STEPS))
    assert last.status == 0, f"the run could not be continued: {last.error}"
    assert list(last.losses) == list(range(MOVED_AT + 1, STEPS + 1)), "a committed step was lost"
    assert all(taken == expected.outcome.losses[step] for step, taken in last.losses.items())
    assert last.final == expected.outcome.final
    assert files_in(root) == expected.files
    clean(root)
    return True


def files_in(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def clean(root: Path) -> None:
    for path in (root, root.with_name(root.name + ".notes")):
        shutil.rmtree(path, ignore_errors=True)
    root.with_name(root.name + ".results").unlink(missing_ok=True)
