"""Measure which way to device memory is faster: kvikio, or direct I/O into page-locked memory and a copy."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import torch

from common.store.backends.kvikio_backend import KvikioFile
from common.store.backends.posix import PosixFile
from common.store.errors import StoreError
from common.store.layout import LARGEST_UNIT

SAMPLE_BYTES = 32 * LARGEST_UNIT
"""Bytes moved per measurement: enough to keep the queue of a drive full, and a tenth of a second on a fast one."""


@dataclass(frozen=True)
class DeviceRates:
    """Bytes per second between one drive and device memory."""

    kvikio_read: float
    kvikio_write: float
    posix_read: float
    """Rate of direct I/O into page-locked memory, and the copy to the device."""
    posix_write: float


def measure_device_rates(
    directory: Path, threads: int, device: torch.device, nbytes: int = SAMPLE_BYTES
) -> DeviceRates | None:
    """Time both ways on a file of ``nbytes`` bytes in ``directory``, which is removed again; None where that failed.

    One drive stands for all: the ways differ in how they reach the GPU, not in what the drives do. It takes one stripe
    of memory per thread, on the host and on the device. Not run on a GPU yet.
    """
    path = directory / "measure.tmp"
    with ExitStack() as stack:
        try:
            stack.callback(path.unlink, missing_ok=True)
            with open(path, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)
            posix = stack.enter_context(closing(PosixFile(path)))
            kvikio = stack.enter_context(closing(KvikioFile(path, posix)))
            pool = stack.enter_context(ThreadPoolExecutor(threads))
            slots: SimpleQueue[tuple[torch.Tensor, torch.Tensor]] = SimpleQueue()
            for _ in range(threads):
                host = torch.zeros(LARGEST_UNIT, dtype=torch.uint8, pin_memory=device.type == "cuda")
                slots.put((host, host.to(device, copy=True)))

            def posix_write(at: int, host: torch.Tensor, there: torch.Tensor) -> None:
                host.copy_(there)
                posix.write(at, host.numpy())

            def posix_read(at: int, host: torch.Tensor, there: torch.Tensor) -> None:
                posix.read(at, host.numpy())
                there.copy_(host)

            def kvikio_write(at: int, host: torch.Tensor, there: torch.Tensor) -> None:
                kvikio.write(at, there)

            def kvikio_read(at: int, host: torch.Tensor, there: torch.Tensor) -> None:
                kvikio.read(at, there)

            def rate(work: Callable[[int, torch.Tensor, torch.Tensor], None]) -> float:
                def with_buffers(at: int) -> None:
                    host, there = slots.get()
                    try:
                        work(at, host, there)
                    finally:
                        slots.put((host, there))

                seconds = []
                for _ in range(3):  # the first time warms up extents, bounce buffers and streams
                    start_time = time.perf_counter()
                    list(pool.map(with_buffers, range(0, nbytes, LARGEST_UNIT)))
                    seconds.append(time.perf_counter() - start_time)
                return nbytes / min(seconds[1:])

            return DeviceRates(
                posix_write=rate(posix_write),
                kvikio_write=rate(kvikio_write),
                posix_read=rate(posix_read),
                kvikio_read=rate(kvikio_read),
            )
        except (OSError, StoreError, RuntimeError):  # no room, or one of the ways in which kvikio does not work here
            return None
