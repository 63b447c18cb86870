"""Clipping by the global gradient norm, which is known only after the backward pass. There are two ways, both exact.

*Deferral*: no update runs before the norm is known; all of them run during the next forward pass. *Speculation*:
updates run during the backward pass as if nothing were clipped, and gradients are kept; after a step that is clipped,
the updates are done again, as deferred ones, from what the step before has left in the other slot. Deferral costs every
step the overlap of updates with the backward pass. Speculation costs every step 2 written bytes per parameter, for
gradients that find no room in host memory, and a clipped step the traffic of a second update.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from common.errors import UserError
from common.store import first_manifest


class ClipBy(Enum):
    """The way in which gradients are clipped."""

    DEFERRAL = "deferral"
    SPECULATION = "speculation"


def clip_by_named(name: str) -> ClipBy | None:
    """Return the way of clipping that is called ``name``; None for ``auto``.

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
    """Return why updates cannot be speculative, in words, or None if they can: what they start from must stay until the
    norm is known."""
    if ranks > 1:
        return "several ranks have a part in every update"
    if single_slot:
        return "with --single-slot an update overwrites what it would be done again from"
    if commit_every > 1:
        return "with --commit-every above 1, steps between two commits overwrite what they would be done again from"
    return None


def clip_coefficient(norm: float, limit: float) -> float | None:
    """Return the factor for gradients of this global norm, as ``torch.nn.utils.clip_grad_norm_`` has it; None if
    the norm is within the limit."""
    return limit / (norm + 1e-6) if norm > limit else None


@dataclass(frozen=True)
class ClipStatistics:
    """The number of clipped steps of a run."""

    clipped: int = 0  # Steps that were clipped
    steps: int = 0  # Steps of the run so far

    @property
    def share(self) -> float:
        """Estimated fraction of clipped steps among those to come.

        It starts at an eighth, as clipping is meant for few steps; this prior weighs as much as eight steps.
        """
        return (self.clipped + 1) / (self.steps + 8)

    @staticmethod
    def of_run(folders: Iterable[Path]) -> "ClipStatistics":
        """Return the statistics in the manifest of the run in ``folders``; empty ones if it cannot be read."""
        content = first_manifest(folders)
        return ClipStatistics(content.get("clipped", 0), content.get("step", 0))
