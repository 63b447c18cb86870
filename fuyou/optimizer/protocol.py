"""What the engine and the optimizer process say to each other: one small message per record, over a pipe."""

from dataclasses import dataclass, field
from typing import Any

from common.store import IoThrottle
from common.store.store import Io
from fuyou.layout.record import Kind
from fuyou.layout.share import ALONE, Share
from fuyou.optimizer.adam import Update

BEAT_SECONDS = 2.0
"""Between two signs of life of the optimizer process."""


@dataclass(frozen=True)
class BufferRegion:
    """Equal buffers in the shared memory file, one after the other."""

    offset: int
    slot_bytes: int
    count: int

    def start(self, index: int) -> int:
        """First byte of buffer ``index``."""
        return self.offset + index * self.slot_bytes

    @property
    def nbytes(self) -> int:
        return self.slot_bytes * self.count


@dataclass(frozen=True)
class SharedRegions:
    """Where parameters and gradients lie in the shared memory file; each kind of record has buffers of its own."""

    nbytes: int
    parameters: dict[Kind, BufferRegion]
    gradients: dict[Kind, BufferRegion]


@dataclass(frozen=True)
class Setup:
    """First message: everything that the optimizer process needs to know."""

    directories: list[str]
    io: Io
    io_threads: int
    records: list[dict[str, Any]]
    slots: int
    chunk_elements: int
    ring_chunks: int
    """State buffers: one is read into, one is updated, one is written from; more smooth the flow."""
    shared: SharedRegions
    threads: int
    share: Share = ALONE
    """What of every record is this process's. Parameters that other nodes have a part in, the engine writes."""
    resident: list[int] = field(default_factory=list)
    """Records whose states stay in memory once they have been read."""
    pace: IoThrottle | None = None
    """Makes the drives look slower."""


@dataclass(frozen=True)
class CreateRecord:
    """Write a record's first state: parameters from a host buffer, ``lo`` from a gradient buffer, zero moments."""

    record: int
    parameters: int
    low_halves: int
    target: int


@dataclass(frozen=True)
class ReadStates:
    """Read the record's states from slot ``source`` as soon as buffers are free; its update will come."""

    record: int
    source: int
    expected: tuple[int, ...] | None = None
    """What their checksums must be, where they are to be checked."""
    there: bool = False
    """Whether they are in memory (resident records only): then nothing is read."""


@dataclass(frozen=True)
class UpdateRecord:
    """The gradient is in host buffer ``gradient``: update the parameters in place, write everything to ``target``,
    or nothing if that is None (resident records only)."""

    record: int
    parameters: int
    gradient: int
    target: int | None
    update: Update
    missed: dict[int, int] = field(default_factory=dict)
    """In how many earlier steps a parameter of the record had no gradient, by its index; the others always had one."""


@dataclass(frozen=True)
class WriteRecord:
    """Write parameters and states of a resident record to ``target``."""

    record: int
    parameters: int
    target: int


@dataclass(frozen=True)
class Ready:
    """The process has started, or has finished its set-up."""


@dataclass(frozen=True)
class Alive:
    """Sent every few seconds: the process may be busy, but it runs."""


@dataclass(frozen=True)
class Updated:
    """The parameters in the host buffer are new; the gradient buffer is free."""

    record: int
    began: float
    ended: float
    adam_intervals: list[tuple[float, float]]
    """When it was computing, not waiting for states, on :func:`time.monotonic`'s clock."""
    absent: tuple[int, ...] = ()
    """Indices of parameters of the record that had no gradient, and were left as they were."""


@dataclass(frozen=True)
class Written:
    """Parameters and states are on SSD (not yet synced); the host buffer is free."""

    record: int
    slot: int
    parameters: tuple[int, ...]
    """Checksums of what was written, one for each SSD."""
    states: tuple[int, ...]
    read_bytes: int
    """Bytes read from the SSDs since the process started."""
    written_bytes: int
    ssd_intervals: list[tuple[float, float]]
    """When reads and writes of this record were under way, on :func:`time.monotonic`'s clock."""


@dataclass(frozen=True)
class Failed:
    """Something went wrong; the process ends."""

    message: str
    expected: bool
    """Whether ``message`` is one for the user (a failing drive), not a traceback."""
