"""A pass goes through the model as a list of visits, each of all micro-batches to one record's modules."""

from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """What a compute task computes."""

    EMBED_FORWARD = "embedding forward"
    BLOCK_FORWARD = "forward"
    HEAD = "head forward and backward"
    HEAD_EVAL = "head forward"
    BLOCK_BACKWARD = "backward"
    EMBED_BACKWARD = "embedding backward"


#: What comes before the head.
BEFORE_HEAD_PHASES = frozenset({Phase.EMBED_FORWARD, Phase.BLOCK_FORWARD})
#: What comes before the loss is known; a head's forward and backward pass are one.
FORWARD_PHASES = BEFORE_HEAD_PHASES | {Phase.HEAD, Phase.HEAD_EVAL}


@dataclass(frozen=True)
class Visit:
    """One pass of all micro-batches through one record's modules."""

    phase: Phase
    record: int
    layer: int | None = None
    """Index of the block, 0 to L - 1, or L for the head; None for the embedding."""
    adapter: int | None = None
    """Record that is trained beside ``record``, which is frozen then."""
    tower: int | None = None
    """Record of frozen towers that the embedding uses."""
    trained: int | None = None
    """Record whose gradient a backward visit adds to: ``record`` or ``adapter``."""
    completes: bool = True
    """Whether that gradient is complete after it: not after the head, if the embedding trains the same record."""
    passes_on: bool = True
    """Whether a backward visit gives the gradient with respect to its input: not if nothing below it is trained."""

    @property
    def records(self) -> tuple[int, ...]:
        """All records that the visit uses."""
        return tuple(index for index in (self.record, self.adapter, self.tower) if index is not None)
