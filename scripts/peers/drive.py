"""What the drive gives our store: the rates that bound every contender whose states are on it."""

import tempfile
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from common.memory.buffers import HostBuffer
from common.store import Layout, Store

PIECE_BYTES = 64 << 20
DEPTH = 4  # Pieces in flight at once; each is split over the store's I/O threads


@dataclass(frozen=True)
class DriveRates:
    """Bytes per second through the store, into and out of private memory with huge pages."""

    read: float
    write: float

    def seconds_apart(self, read_bytes: float, written_bytes: float) -> float:
        """Time for these bytes if the drive reads or writes: the bound of a drive that cannot do both at once."""
        return read_bytes / self.read + written_bytes / self.write

    def seconds_together(self, read_bytes: float, written_bytes: float) -> float:
        """Time for these bytes if reading and writing do not disturb each other: nothing can be faster."""
        return max(read_bytes / self.read, written_bytes / self.write)


def measure_drive(directory: Path, nbytes: int = 2 << 30) -> DriveRates:
    """Write and read ``nbytes`` twice each and take the better; the files are removed again."""
    layout = Layout(1)
    extents = [layout.allocate("sample", PIECE_BYTES) for _ in range(max(DEPTH, nbytes // PIECE_BYTES))]
    buffers = [HostBuffer(PIECE_BYTES).touch() for _ in range(DEPTH)]
    for buffer in buffers:
        buffer.array[:] = 7  # zeros may be cheap for a drive
    with tempfile.TemporaryDirectory(dir=directory, prefix="drive-") as folder:
        store = Store.create([Path(folder)], layout)
        try:
            rates: dict[str, float] = {}
            for name in ("write", "read") * 2:
                move = store.write if name == "write" else store.read_unchecked
                began = time.perf_counter()
                under_way: list[Future[None]] = []
                for index, extent in enumerate(extents):
                    if index >= DEPTH:
                        under_way[index - DEPTH].result()
                    under_way.append(move(extent, buffers[index % DEPTH].array))
                for future in under_way:
                    future.result()
                rate = len(extents) * PIECE_BYTES / (time.perf_counter() - began)
                rates[name] = max(rate, rates.get(name, 0.0))
        finally:
            store.close()
    return DriveRates(rates["read"], rates["write"])
