"""Messages between the engine and the optimizer process, small ones, over a pipe."""

import contextlib
import os
import socket
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from common.errors import FinetuneError
from common.store import Throttle
from common.store.checksums import PartSums
from fuyou.layout.record import Kind, Record
from fuyou.layout.record_sums import Part
from fuyou.optimizer.adam import Update

BEAT_SECONDS = 2.0  # Seconds between two signs of life of the optimizer process


@dataclass(frozen=True)
class BufferRegion:
    """Range of the shared memory file with buffers of equal size."""

    offset: int
    slot_bytes: int
    count: int

    def start(self, index: int) -> int:
        return self.offset + index * self.slot_bytes

    @property
    def nbytes(self) -> int:
        return self.slot_bytes * self.count


@dataclass(frozen=True)
class SharedRegions:
    """Ranges of the shared memory file for parameters and gradients of each kind of record."""

    nbytes: int
    parameters: dict[Kind, BufferRegion]
    gradients: dict[Kind, BufferRegion]

    def regions(self) -> list[BufferRegion]:
        return [*self.parameters.values(), *self.gradients.values()]

    def starts(self) -> list[int]:
        return [region.start(index) for region in self.regions() for index in range(region.count)]


@dataclass(frozen=True)
class Setup:
    """First message to the optimizer process: its configuration."""

    directories: list[str]
    records: Sequence[Record]  # All records of the model, as this rank shares them
    chunk_elements: int
    ring_chunks: int  # Number of chunk buffers: one is read into, one updated, one written from
    shared: SharedRegions
    threads: int
    # Records whose states stay in memory once they have been read
    resident: list[int] = field(default_factory=list)
    throttle: Throttle | None = None  # Limit of the drives' speed, for experiments; None: as fast as they are


@dataclass(frozen=True)
class CreateRecord:
    """Write a record's first state to slot ``target``, with zero moments."""

    record: int
    parameters: int  # Index of the host buffer with the parameters
    low_bits: int  # Index of the gradient buffer with the low bits of the master weights
    target: int


@dataclass(frozen=True)
class ReadStates:
    """Read a record's states from slot ``source`` as soon as buffers are free; its update will follow."""

    record: int
    source: int
    # Checksums that they must have; None: they are in memory already (resident records only)
    sums: PartSums | None


@dataclass(frozen=True)
class UpdateRecord:
    """Update a record's parameters in place, and write everything to slot ``target``."""

    record: int
    parameters: int  # Index of the host buffer with the parameters
    gradient: int  # Index of the host buffer with the gradient
    target: int | None  # Slot; None: nothing is written (resident records only)
    update: Update
    # Earlier steps without a gradient, by index; 0 if not listed
    missed: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class WriteRecord:
    """Write parameters and states of a resident record to slot ``target``."""

    record: int
    parameters: int
    target: int


@dataclass(frozen=True)
class Ready:
    """Answer: the process has started."""


@dataclass(frozen=True)
class Alive:
    """Heartbeat, sent every few seconds even while the process is busy."""


@dataclass(frozen=True)
class Updated:
    """Answer: the parameters in the host buffer are updated, and the gradient buffer is free."""

    record: int
    start_time: float
    end_time: float
    adam_intervals: list[tuple[float, float]]  # Times of computing, on :func:`time.monotonic`'s clock
    # Indices of parameters of the record that had no gradient, and were left as they were
    absent: tuple[int, ...] = ()


@dataclass(frozen=True)
class Written:
    """Answer: parameters and states are on SSD (not yet synced), and the host buffer is free."""

    record: int
    slot: int
    sums: dict[Part, PartSums]  # Checksums of what was written
    read_bytes: int  # Bytes read from the SSDs since the process started
    written_bytes: int
    ssd_intervals: list[tuple[float, float]]  # Times of reads and writes, on :func:`time.monotonic`'s clock


@dataclass(frozen=True)
class Failed:
    """Answer: the process ends because of an error."""

    message: str
    expected: bool  # Whether `message` is meant for the user (a failing drive); otherwise it is a traceback


class EnginePipe:
    """Pipe to the engine, for sending from several threads."""

    def __init__(self, descriptor: int):
        self._connection = Connection(descriptor)
        self._sending = threading.Lock()

    def send(self, message: object) -> None:
        with self._sending:
            self._connection.send(message)

    def receive(self) -> Any:
        """Wait for the next message.

        Raises:
            EOFError, OSError: if the engine has ended or closed the pipe.
        """
        return self._connection.recv()

    def receive_locks(self, count: int) -> None:
        """Receive ``count`` locks of the run. They are never closed: this process may outlive the engine and still
        write."""
        if count:
            with socket.socket(fileno=os.dup(self._connection.fileno())) as channel:
                socket.recv_fds(channel, 1, count)

    def send_heartbeats(self) -> None:
        """Send a heartbeat every few seconds, as long as the engine listens."""
        with contextlib.suppress(OSError):
            while True:
                time.sleep(BEAT_SECONDS)
                self.send(Alive())

    def report(self, error: BaseException) -> None:
        """Send the engine the reason why the process ends, if it still listens."""
        expected = isinstance(error, FinetuneError)
        message = (
            error.as_written
            if isinstance(error, FinetuneError)
            else "".join(traceback.format_exception(error))
        )
        with contextlib.suppress(OSError):
            self.send(Failed(message, expected))

    def fail(self, error: BaseException) -> None:
        """Report an error of any thread, and end the process."""
        self.report(error)
        os._exit(1)
