"""Run the optimizer process on scratch records, to measure how fast it updates and writes."""

import os
import threading
import time
from collections.abc import Callable, Sequence

import torch

from common.errors import FinetuneError
from common.memory.buffers import HostBuffer
from common.store import Throttle
from fuyou.layout.record import Kind, Precision, Record
from fuyou.optimizer.adam import AdamConfig, Update
from fuyou.optimizer.process.client import OptimizerLink
from fuyou.optimizer.process.protocol import (
    BufferRegion,
    ReadStates,
    Setup,
    SharedRegions,
    Updated,
    UpdateRecord,
    WriteRecord,
    Written,
)
from fuyou.planner.profiling.drives import ScratchFiles

UPDATED_ELEMENTS = 4 << 20  # Parameters updated in turn: more than caches hold with their states
WRITTEN_ELEMENTS = 2 << 20  # Parameters in each record that is written while others are updated
_WRITTEN_RECORDS = 3
_ANSWER_SECONDS = 60.0


def scratch_records(chunk_elements: int, precision: Precision) -> list[Record]:
    """Return records of one chunk each, to be updated, and then those to be written."""
    updated = max(1, UPDATED_ELEMENTS // chunk_elements)
    sizes = [chunk_elements] * updated + [WRITTEN_ELEMENTS] * _WRITTEN_RECORDS
    return [
        Record.build(index, f"profile {index}", Kind.BLOCK, precision, [(("weight",), (1, size), True)])
        for index, size in enumerate(sizes)
    ]


class OptimizerPump:
    """A load on the optimizer process that sends the next request after each answer.

    Args:
        send: requests a piece of work on a record.
        records: records that are in work at the same time.
    """

    def __init__(self, send: Callable[[int], None], records: Sequence[int]):
        self.ends: list[float] = []
        self._send, self._records = send, records
        self._running = False
        self._under_way = 0
        self.failure: BaseException | None = None
        self._changed = threading.Condition()

    def start(self) -> None:
        self.ends, self._running = [], True
        for record in self._records:
            with self._changed:
                self._under_way += 1
            self._send(record)

    def answered(self, record: int) -> None:
        """Count the work on ``record`` as done; called in the link's thread."""
        self.ends.append(time.monotonic())
        if self._running:
            self._send(record)
            return
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Stop waiting: there will be no more answers."""
        with self._changed:
            self.failure = error
            self._changed.notify_all()

    def stop(self) -> None:
        self._running = False
        with self._changed:
            over = self._changed.wait_for(lambda: not self._under_way or self.failure is not None, _ANSWER_SECONDS)
        if self.failure is not None:
            raise self.failure
        if not over:
            raise FinetuneError(
                f"The optimizer process has not answered for {_ANSWER_SECONDS:.0f} s while it was being measured: a "
                "drive hangs, or the machine is overloaded."
            )


class OptimizerBench:
    """The optimizer process with records in its memory, of which it updates some and writes others.

    Args:
        link: the process, started but not set up.
        scratch: the store with the records of :func:`scratch_records`.
        throttle: slows the drives down.

    Attributes:
        updating: a load that updates one chunk at a time, and writes nothing.
        writing: a load that writes :data:`WRITTEN_ELEMENTS` parameters and their states at a time, and computes
            nothing.
    """

    def __init__(
        self,
        link: OptimizerLink,
        scratch: ScratchFiles,
        precision: Precision,
        chunk_elements: int,
        threads: int,
        throttle: Throttle | None,
    ):
        self._link, records = link, scratch.records
        written = [record.index for record in records[-_WRITTEN_RECORDS:]]
        updated = [record.index for record in records[:-_WRITTEN_RECORDS]]
        self._step = 0
        self._there: set[int] = set()  # records whose states are in memory
        nbytes = max(record.parameter_nbytes for record in records)
        shared = SharedRegions(
            2 * nbytes, {Kind.BLOCK: BufferRegion(0, nbytes, 1)}, {Kind.BLOCK: BufferRegion(nbytes, nbytes, 1)}
        )
        self._share(shared, precision)
        self.updating = OptimizerPump(self._update, updated if len(updated) > 1 else 2 * updated)
        self.writing = OptimizerPump(self._write, written)
        link.set_up(
            Setup(
                directories=[str(path) for path in scratch.store.directories],
                io="posix",
                io_threads=4,
                records=records,
                slots=2,
                chunk_elements=chunk_elements,
                ring_chunks=1,
                shared=shared,
                threads=threads,
                resident=[record.index for record in records],
                throttle=throttle,
            ),
            self._heard,
            self._failed,
        )

    def close(self) -> None:
        self._link.close()
        self._memory.close()

    def _share(self, shared: SharedRegions, precision: Precision) -> None:
        """Share memory for parameters and gradients, filled with random numbers: other values may slow Adam down."""
        assert self._link.shared_fd is not None
        os.ftruncate(self._link.shared_fd, shared.nbytes)
        self._memory = HostBuffer(shared.nbytes, fd=os.dup(self._link.shared_fd)).touch()
        values = self._memory.tensor(precision.dtype, 0, shared.nbytes // precision.dtype.itemsize)
        tile = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)).to(precision.dtype) * 0.02
        for start in range(0, values.numel(), tile.numel()):
            part = values[start : start + tile.numel()]
            part.copy_(tile[: part.numel()])

    def _update(self, record: int) -> None:
        self._step += 1
        self._link.send(ReadStates(record, 0, in_memory=record in self._there))
        self._there.add(record)
        self._link.send(UpdateRecord(record, 0, 0, None, Update(self._step, AdamConfig())))

    def _write(self, record: int) -> None:
        self._link.send(WriteRecord(record, 0, 0))

    def _heard(self, message: object) -> None:
        if isinstance(message, Updated):
            self.updating.answered(message.record)
        elif isinstance(message, Written):
            self.writing.answered(message.record)

    def _failed(self, error: BaseException) -> None:
        self.updating.fail(error)
        self.writing.fail(error)
