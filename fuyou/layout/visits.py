"""Visits, of which a step is a list: each takes all micro-batches through the modules of one record."""

from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """The computation of a visit."""

    EMBED_FORWARD = "embedding forward"
    BLOCK_FORWARD = "forward"
    HEAD = "head forward and backward"
    HEAD_EVAL = "head forward"
    BLOCK_BACKWARD = "backward"
    EMBED_BACKWARD = "embedding backward"


BEFORE_HEAD_PHASES = frozenset({Phase.EMBED_FORWARD, Phase.BLOCK_FORWARD})
"""Phases before the head."""
FORWARD_PHASES = BEFORE_HEAD_PHASES | {Phase.HEAD, Phase.HEAD_EVAL}
"""Phases up to the one in which the loss becomes known; a head's forward and backward pass are one phase."""


REFERENCE_PHASES = BEFORE_HEAD_PHASES | {Phase.HEAD_EVAL}
"""Phases that a reference takes part in, which is never trained."""


@dataclass(frozen=True)
class Visit:
    """One pass of all micro-batches through one record's modules."""

    phase: Phase
    record: int
    layer: int | None = None
    """Index of the block, 0 to L - 1, or L for the head; None for the embedding."""
    adapter: int | None = None
    """Adapter record that is used beside ``record``, which is frozen then."""
    tower: int | None = None
    """Record of frozen towers that the embedding uses."""
    trained: int | None = None
    """Record whose gradient a backward visit adds to: ``record`` or ``adapter``."""
    completes: bool = True
    """Whether that gradient is complete afterwards: not after the head, if the embedding trains the same record."""
    passes_on: bool = True
    """Whether a backward visit computes the gradient of its input: not if nothing before it is trained."""

    @property
    def records(self) -> tuple[int, ...]:
        """All records that the visit uses."""
        return tuple(index for index in (self.record, self.adapter, self.tower) if index is not None)
