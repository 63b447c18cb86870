"""Visits: a step is a list of visits, each of which takes micro-batches through the modules of one record."""

from dataclasses import dataclass
from enum import Enum
from functools import cached_property


class Phase(Enum):
    """Computation of a visit."""

    EMBED_FORWARD = "embedding forward"
    BLOCK_FORWARD = "forward"
    HEAD = "head forward and backward"
    HEAD_EVAL = "head forward"
    BLOCK_BACKWARD = "backward"
    EMBED_BACKWARD = "embedding backward"


BEFORE_HEAD_PHASES = frozenset({Phase.EMBED_FORWARD, Phase.BLOCK_FORWARD})  # Phases before the head
# Phases up to the one in which the loss becomes known; a head's forward and backward pass are one phase.
FORWARD_PHASES = BEFORE_HEAD_PHASES | {Phase.HEAD, Phase.HEAD_EVAL}


REFERENCE_PHASES = BEFORE_HEAD_PHASES | {Phase.HEAD_EVAL}  # Phases of a reference, which is never trained


@dataclass(frozen=True)
class Part:
    """Part of a block's pass during which one piece of the block is on the device."""

    first: bool  # Whether it begins the pass: it takes the block's input
    last: bool  # Whether it ends the pass: it makes the block's output, or the gradient of its input
    recomputes: bool = True  # Whether forward operators run in it
    differentiates: bool = False  # Whether backward operators run in it


@dataclass(frozen=True)
class Visit:
    """One pass of all micro-batches, or of one, through one record's modules."""

    phase: Phase
    record: int
    layer: int | None = None  # Index of the block, 0 to L - 1, or L for the head; None for the embedding
    adapter: int | None = None  # Adapter record that is used with `record`, which is frozen then
    tower: int | None = None  # Record of frozen towers that the embedding uses
    trained: int | None = None  # Record whose gradient a backward visit adds to: `record` or `adapter`
    completes: bool = True  # Whether that gradient is complete afterwards
    passes_on: bool = True  # Whether a backward visit computes the gradient of its input

    part: Part | None = None  # Part of a block in pieces; None for a whole block or outside
    micros: range | None = None  # Numbers of the visit's micro-batches; None: all of them

    @property
    def begins(self) -> bool:
        """Whether it takes the input of its pass."""
        return self.part is None or self.part.first

    @property
    def ends(self) -> bool:
        """Whether it makes the output of its pass."""
        return self.part is None or self.part.last

    def micro_batches(self, count: int) -> range:
        """Return the numbers of its micro-batches, of a batch with ``count``."""
        return range(count) if self.micros is None else self.micros

    @cached_property
    def records(self) -> tuple[int, ...]:
        return tuple(index for index in (self.record, self.adapter, self.tower) if index is not None)
