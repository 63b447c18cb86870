"""Clipping by the global gradient norm, which is known only after the backward pass, in two exact ways.

*Deferral*: all updates run during the next forward pass, when the norm is known. *Speculation*: updates run during the
backward pass as if nothing were clipped, and gradients are saved; after a clipped step, the updates run again,
deferred, from the previous step's state in the other slot. Deferral costs every step the overlap of updates with the
backward pass. Speculation costs every step 2 written bytes per parameter, for gradients that do not fit in host
memory, and a clipped step the traffic of a second update.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from common.errors import UserError
from common.store import first_manifest
from fuyou.layout.model_layout import ModelLayout, interleaved


class ClipBy(Enum):
    """How gradients are clipped."""

    DEFERRAL = "deferral"
    SPECULATION = "speculation"


def clip_by_named(name: str) -> ClipBy | None:
    """Return the way of clipping with this name; None for ``auto``.

    Raises:
        UserError: if the name is unknown.
    """
    if name == "auto":
        return None
    try:
        return ClipBy(name)
    except ValueError:
        raise UserError(f"clip_by must be auto, deferral or speculation, not {name!r}.") from None


def speculation_obstacle(*, commit_every: int, ranks: int) -> str | None:
    """Return why updates cannot be speculative, if so: their input must stay until the norm is known."""
    if ranks > 1:
        return "several ranks have a part in every update"
    if commit_every > 1:
        return "with --commit-every above 1, steps between two commits overwrite what they would be done again from"
    return None


def clip_coefficient(norm: float, limit: float) -> float | None:
    """Return the factor for clipped gradients, as ``torch.nn.utils.clip_grad_norm_``; None within the limit."""
    return limit / (norm + 1e-6) if norm > limit else None


@dataclass(frozen=True)
class ClipStatistics:
    """Number of clipped steps of a run."""

    clipped: int = 0  # Steps that were clipped
    steps: int = 0  # Steps of the run so far

    @property
    def share(self) -> float:
        """Return the expected fraction of clipped steps, with a prior of 1/8 that weighs as much as eight steps."""
        return (self.clipped + 1) / (self.steps + 8)

    @staticmethod
    def of_run(folders: Iterable[Path]) -> "ClipStatistics":
        """Return the statistics in the manifest of the run in ``folders``; empty if it cannot be read."""
        content = first_manifest(folders)
        return ClipStatistics(content.get("clipped", 0), content.get("step", 0))


@dataclass(frozen=True)
class UpdatePolicy:
    """Which updates are deferred, and which run before the gradient's norm is known."""

    clip_by: ClipBy | None  # Way in which gradients are clipped by their global norm; None: they are not
    deferred_fraction: float  # Fraction of the blocks with deferred updates, unless clipping defers all

    @property
    def speculative(self) -> bool:
        """Whether updates run before the norm is known, and again if the gradient is clipped."""
        return self.clip_by is ClipBy.SPECULATION

    def deferred(self, layout: ModelLayout) -> frozenset[int]:
        return interleaved(layout, 1.0 if self.clip_by is ClipBy.DEFERRAL else self.deferred_fraction)

    def held(self, layout: ModelLayout) -> frozenset[int]:
        """Return the records whose gradients stay until the step has ended."""
        return frozenset(layout.trainable) if self.speculative else self.deferred(layout)
