"""Measures the bandwidth between host and device, each way alone and both ways at once."""

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from common.memory.buffers import HostBuffer
from fuyou.runtime.devices.device import Device
from fuyou.schedule.tasks import Op, Task

LARGEST_COPY_BYTES = 64 << 20  # Largest copy that is measured: a block's parameters are rarely smaller where it matters
_COPIES = 5


@dataclass(frozen=True)
class LinkRates:
    """Bytes per second between host and device."""

    upload: float
    download: float
    upload_beside: float  # Bytes per second while the other direction is busy, too
    download_beside: float


def measure_link(device: Device, nbytes: int) -> LinkRates:
    """Measure copies of ``nbytes`` (at most :data:`LARGEST_COPY_BYTES`), as the engine's lanes make them.

    Takes twice as many bytes in host memory and on the device.
    """
    nbytes = min(nbytes, LARGEST_COPY_BYTES)
    up, down = _Copies(device, Op.PARAMETER_UPLOAD, nbytes), _Copies(device, Op.GRADIENT_DOWNLOAD, nbytes)
    try:
        alone = up.rate(), down.rate()
        with ThreadPoolExecutor(1) as other:
            beside = other.submit(down.rate)
            rate = up.rate()
            return LinkRates(*alone, rate, beside.result())
    finally:
        up.close()
        down.close()


class _Copies:
    """Copies in one direction, with the buffers for them."""

    def __init__(self, device: Device, op: Op, nbytes: int):
        self._device, self._op, self._nbytes = device, op, nbytes
        self._buffer = HostBuffer(nbytes).touch()
        if device.page_locks:
            self._buffer.page_lock()
        host = self._buffer.tensor(torch.uint8, 0, nbytes)
        there = device.allocate(nbytes)
        self._target, self._source = (there, host) if op is Op.PARAMETER_UPLOAD else (host, there)

    def rate(self) -> float:
        """Return the median of the bytes per second of a few copies, after one to warm up."""
        return statistics.median([self.copy() for _ in range(_COPIES + 1)][1:])

    def copy(self) -> float:
        task = Task(self._op, [])
        task.started_at = time.monotonic()
        self._device.copy(task, self._target, self._source)
        self._device.synchronize()
        task.finished_at = time.monotonic()
        began, ended = self._device.interval(task)
        return self._nbytes / max(ended - began, 1e-9)

    def close(self) -> None:
        del self._target, self._source
        self._buffer.close()
