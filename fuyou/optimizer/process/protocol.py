"""The messages between the engine and the optimizer process: small ones, one per record, over a pipe."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.store import Throttle
from common.store.store import Io
from fuyou.layout.record import Kind, Record
from fuyou.layout.share import ALONE, Share
from fuyou.optimizer.adam import Update

BEAT_SECONDS = 2.0  # Seconds between two signs of life of the optimizer process


@dataclass(frozen=True)
class BufferRegion:
    """A range of the shared memory file: buffers of equal size, one after the other."""

    offset: int
    slot_bytes: int
    count: int

    def start(self, index: int) -> int:
        """Return the first byte of buffer ``index``."""
        return self.offset + index * self.slot_bytes

    @property
    def nbytes(self) -> int:
        return self.slot_bytes * self.count


@dataclass(frozen=True)
class SharedRegions:
    """The ranges of the shared memory file for parameters and gradients of each kind of record."""

    nbytes: int
    parameters: dict[Kind, BufferRegion]
    gradients: dict[Kind, BufferRegion]

    def starts(self) -> list[int]:
        """Return the first byte of every buffer."""
        regions = [*self.parameters.values(), *self.gradients.values()]
        return [region.start(index) for region in regions for index in range(region.count)]


@dataclass(frozen=True)
class Setup:
    """First message to the optimizer process: everything that it needs to know."""

    directories: list[str]
    io: Io
    io_threads: int
    records: Sequence[Record]  # All records of the model, as this rank shares them
    slots: int
    chunk_elements: int
    # Number of chunk buffers: one is read into, one is updated, one is written from; more smooth the flow.
    ring_chunks: int
    shared: SharedRegions
    threads: int
    # Share of this process in every record. Parameters that several nodes update are written by the engine.
    share: Share = ALONE
    resident: list[int] = field(default_factory=list)  # Records whose states stay in memory once they have been read
    throttle: Throttle | None = None  # Limit of the drives' speed, for experiments; None: as fast as they are


@dataclass(frozen=True)
class CreateRecord:
    """Write a record's first state to slot ``target``, with zero moments."""

    record: int
    parameters: int  # Index of the host buffer with the parameters
    low_bits: int  # Index of the gradient buffer with the low 16 bits of the master weights
    target: int


@dataclass(frozen=True)
class ReadStates:
    """Read a record's states from slot ``source`` as soon as buffers are free; its update will follow."""

    record: int
    source: int
    expected: tuple[int, ...] | None = None  # Checksums that they must have; None: they are not checked
    in_memory: bool = False  # Whether they are in memory already (resident records only): then nothing is read


@dataclass(frozen=True)
class UpdateRecord:
    """Update the parameters of a record in place, and write everything to slot ``target``."""

    record: int
    parameters: int  # Index of the host buffer with the parameters
    gradient: int  # Index of the host buffer with the gradient
    target: int | None  # Slot; None: nothing is written (resident records only)
    update: Update
    # Number of earlier steps in which a parameter (by index) had no gradient; 0 for those that are not listed.
    missed: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class WriteRecord:
    """Write parameters and states of a resident record to slot ``target``."""

    record: int
    parameters: int
    target: int


@dataclass(frozen=True)
class Ready:
    """Answer: the process has started, or has finished its set-up."""


@dataclass(frozen=True)
class Alive:
    """Sign of life, sent every few seconds: the process may be busy, but it runs."""


@dataclass(frozen=True)
class Updated:
    """Answer: the parameters in the host buffer are updated, and the gradient buffer is free."""

    record: int
    start_time: float
    end_time: float
    # Start and end of the times at which it computed rather than waited, on :func:`time.monotonic`'s clock.
    adam_intervals: list[tuple[float, float]]
    absent: tuple[int, ...] = ()  # Indices of parameters of the record that had no gradient, and were left as they were


@dataclass(frozen=True)
class Written:
    """Answer: parameters and states are on SSD (not yet synced), and the host buffer is free."""

    record: int
    slot: int
    parameters: tuple[int, ...]  # Checksums of the parameters that were written, one for each SSD
    states: tuple[int, ...]  # Checksums of the states, likewise
    read_bytes: int  # Bytes read from the SSDs since the process started
    written_bytes: int
    # Start and end of the times at which this record was read or written, on :func:`time.monotonic`'s clock.
    ssd_intervals: list[tuple[float, float]]


@dataclass(frozen=True)
class Failed:
    """Answer: something went wrong, and the process ends."""

    message: str
    expected: bool  # Whether `message` is meant for the user (a failing drive); otherwise it is a traceback
