"""Records in the training store: where they are, and their parameters read and written with checksums."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch

from common.store import Store
from common.store.checksums import ExtentChecksums
from fuyou.layout.checksums import RecordSums, sealed_name
from fuyou.layout.record import Record, RecordExtents
from fuyou.optimizer.absent_gradients import MissedUpdates


@dataclass(frozen=True)
class StoredRecords:
    """The records of a training store."""

    store: Store  # Store that they are in, open
    extents: Sequence[RecordExtents]  # Place of each record
    slots: int  # Number of slots of each record that is trained
    sums: RecordSums  # Checksums: told of everything that is written, asked about what is read
    # Steps without a gradient: told which parameters an update has left alone, asked which earlier ones have.
    missed: MissedUpdates

    def read_parameters(self, record: Record, slot: int, step: int, buffer: np.ndarray | torch.Tensor) -> Future:
        """Read a record's parameters, and compare them with their checksum where ``step`` is one to do so.

        Args:
            buffer: where to, of at least the record's bytes: in host memory, or on the device if the store reads there.
        """
        place, sums = self.extents[record.index].parameters[slot], None
        expected = self.sums.expected(record.index, "parameters", slot, step)
        if expected is not None:
            sums = ExtentChecksums(place, self.store.directories, sealed_name(record, "parameters"), expected)
        return self.store.read(place, buffer, sums=sums)

    def write_parameters(self, record: Record, slot: int, values: np.ndarray) -> Future:
        """Write what the optimizer process does not: all of a record's parameters, or all that this rank stores."""
        place = self.extents[record.index].parameters[slot]
        sums = ExtentChecksums(place, self.store.directories, sealed_name(record, "parameters"))
        noted: Future[None] = Future()

        def note(done: Future) -> None:
            try:
                done.result()
                self.sums.written(record.index, slot, sums.values)
            except BaseException as error:
                noted.set_exception(error)
            else:
                noted.set_result(None)

        self.store.write(place, values, sums=sums).add_done_callback(note)
        return noted  # and not the write's own, which is done before the checksum is known to a commit
