"""Clipping by the global norm, which is known when the backward pass has ended: two ways, both exact.

*Deferral*: no update before the norm is known; all of them run during the next forward pass. *Speculation*: updates
run during the backward pass as if nothing were clipped, and gradients are kept; after a step that is clipped, the
updates are done again, as deferred ones, from what the step before has left in the other slot. The first costs every
step the overlap of updates with the backward pass; the second costs every step 2 written bytes per parameter, for
gradients that find no room in host memory, and a clipped one the traffic of a second update.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from common.errors import FinetuneError, UserError
from common.store import load_manifest


class ClipBy(Enum):
    """How gradients are clipped."""

    DEFERRAL = "deferral"
    SPECULATION = "speculation"


def clip_by_named(name: str) -> ClipBy | None:
    """The way that is called ``name``; None for ``auto``.

    Raises:
        UserError: there is no such way.
    """
    if name == "auto":
        return None
    try:
        return ClipBy(name)
    except ValueError:
        raise UserError(f"clip_by must be auto, deferral or speculation, not {name!r}.") from None


def speculation_obstacle(*, single_slot: bool, commit_every: int, ranks: int) -> str | None:
    """Why updates cannot be speculative, in words: what they started from must be there until the norm is known."""
    if ranks > 1:
        return "several ranks have a part in every update"
    if single_slot:
        return "with --single-slot an update overwrites what it would be done again from"
    if commit_every > 1:
        return "with --commit-every above 1, steps between two commits overwrite what they would be done again from"
    return None


@dataclass(frozen=True)
class ClipStatistics:
    """How often clipping has struck in a run."""

    clipped: int = 0
    """Steps that were clipped."""
    steps: int = 0
    """Of so many."""

    @property
    def share(self) -> float:
        """Of the steps to come that will be clipped, by what has been seen. Before that an eighth, as clipping is meant
        for the odd step; what was assumed weighs as much as eight steps."""
        return (self.clipped + 1) / (self.steps + 8)

    @staticmethod
    def of_run(folders: Iterable[Path]) -> "ClipStatistics":
        """What a run's manifest says, which lies in one of ``folders``; nothing if it cannot be read."""
        for folder in folders:
            try:
                content = load_manifest(folder)
            except (FinetuneError, OSError):
                continue
            if content is not None:
                return ClipStatistics(content.get("clipped", 0), content.get("step", 0))
        return ClipStatistics()
