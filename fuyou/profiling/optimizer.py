"""How fast the optimizer process updates: the process itself is started, on a scratch record."""

import os
import queue
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

from common.buffers import HostBuffer
from common.errors import FinetuneError
from common.store import Pace
from fuyou.adam import AdamConfig, Update
from fuyou.optimizer_link import OptimizerLink
from fuyou.optimizer_protocol import (
    BufferRegion,
    CreateRecord,
    ReadStates,
    Setup,
    SharedRegions,
    Updated,
    UpdateRecord,
    Written,
)
from fuyou.profiling.drives import DriveRates, Scratch
from fuyou.records import Kind, Precision, Record

#: A record of this many parameters is updated, or of two chunks if these are larger.
RECORD_ELEMENTS = 4 << 20
#: Updates are repeated for this long.
UPDATE_SECONDS = 1.0
_MOST_UPDATES = 12
_ANSWER_SECONDS = 60.0

Message = TypeVar("Message", Updated, Written)


@dataclass(frozen=True)
class OptimizerRates:
    """Parameters per second."""

    alone: float
    beside: float
    """While the device computes, where that takes the same processors; else the same as ``alone``."""
    slowdown: float
    """How many times as long the computation takes beside it."""


def scratch_record(chunk_elements: int, precision: Precision) -> Record:
    """A record of whole chunks for the optimizer to work on."""
    chunks = max(2, RECORD_ELEMENTS // chunk_elements)
    return Record.build(0, "profile", Kind.BLOCK, precision, [(("weight",), (chunks, chunk_elements), True)])


class OptimizerBench:
    """The optimizer process at work on one record.

    Args:
        link: the process, up but not set up.
        scratch: the store with the record.
        chunk_elements: of the run.
        threads: of the run.
        pace: of the drives.
    """

    def __init__(
        self,
        link: OptimizerLink,
        scratch: Scratch,
        precision: Precision,
        chunk_elements: int,
        threads: int,
        pace: Pace | None,
    ):
        self._link, self._record = link, scratch.record
        self._state_bytes = scratch.record.state_nbytes
        self._answers: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._step = 0
        nbytes = scratch.record.parameter_nbytes
        shared = SharedRegions(
            2 * nbytes, {Kind.BLOCK: BufferRegion(0, nbytes, 1)},
            {Kind.BLOCK: BufferRegion(nbytes, nbytes, 1)},
        )  # fmt: skip
        assert link.shared_fd is not None
        os.ftruncate(link.shared_fd, shared.nbytes)
        self._memory = HostBuffer(shared.nbytes, fd=os.dup(link.shared_fd)).touch()
        values = self._memory.tensor(precision.dtype, 0, 2 * scratch.record.numel)
        tile = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)).to(precision.dtype) * 0.02
        for start in range(0, values.numel(), tile.numel()):
            part = values[start : start + tile.numel()]
            part.copy_(tile[: part.numel()])
        chunks = len(self._record.chunks(chunk_elements))
        link.set_up(
            Setup(
                directories=[str(path) for path in scratch.store.directories],
                io="posix",
                io_threads=4,
                records=[self._record.to_dict()],
                slots=2,
                chunk_elements=chunk_elements,
                ring_chunks=chunks,
                shared=shared,
                threads=threads,
                pace=pace,
            ),
            self._answers.put,
            self._answers.put,
        )
        link.send(CreateRecord(0, 0, 0, 0))
        self._answer(Written)

    def measure(self, drives: DriveRates, work: Callable[[], None] | None, work_seconds: float) -> OptimizerRates:
        """Updates alone and, if there is ``work`` that takes the same processors, beside it.

        Args:
            drives: their rates: an update begins when its states have been read.
            work_seconds: how long ``work`` takes by itself.
        """
        reading = 1.3 * self._state_bytes / drives.read + 0.01
        alone = self._updates(reading)
        if work is None:
            return OptimizerRates(alone, alone, 1.0)
        taken = []
        with ThreadPoolExecutor(1) as thread:
            beside = thread.submit(self._updates, reading)
            while not beside.done():
                began = time.perf_counter()
                work()
                taken.append(time.perf_counter() - began)
        return OptimizerRates(alone, beside.result(), max(1.0, statistics.median(taken) / work_seconds))

    def close(self) -> None:
        """End the process."""
        self._link.close()
        self._memory.close()

    def _updates(self, reading: float) -> float:
        """Parameters per second: the median of some updates whose states wait in memory, after one to warm up."""
        rates: list[float] = []
        began = time.monotonic()
        while len(rates) < 3 or (time.monotonic() - began < UPDATE_SECONDS and len(rates) < _MOST_UPDATES):
            source, self._step = self._step % 2, self._step + 1
            self._link.send(ReadStates(0, source))
            time.sleep(reading)
            self._link.send(UpdateRecord(0, 0, 0, 1 - source, Update(self._step, AdamConfig())))
            updated = self._answer(Updated)
            rates.append(self._record.numel / (updated.ended - updated.began))
            self._answer(Written)
        return statistics.median(rates[1:])

    def _answer(self, kind: type[Message]) -> Message:
        try:
            message = self._answers.get(timeout=_ANSWER_SECONDS)
        except queue.Empty:
            raise FinetuneError(
                f"The optimizer process has not answered for {_ANSWER_SECONDS:.0f} s while it was being measured: a "
                "drive hangs, or the machine is overloaded."
            ) from None
        if isinstance(message, BaseException):
            raise message
        assert isinstance(message, kind)
        return message
