"""Measure everything that a prediction of a step needs.

These are the SSDs, through scratch files of a store, the link to the device, the optimizer process, and the model's
parts (:mod:`.blocks`). Each is measured alone: what shares processors or memory with it slows it down in a run.

This takes 5 to 10 s, three of them to start the optimizer process, and at most 20 s on slow drives or processors. It
needs about as much memory as the engine for one block or the head, and 24 MiB per drive.
"""

import itertools
import os
import queue
import shutil
import statistics
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import torch

from common.errors import FinetuneError, UserError
from common.memory.buffers import HostBuffer
from common.store import Extent, Layout, Store, Throttle, commit_manifest
from common.store.folders import SCRATCH
from fuyou.layout.model_layout import ModelLayout
from fuyou.layout.record import Kind, Precision, Record, allocate_extents
from fuyou.model.streamed_model import StreamedModel
from fuyou.optimizer.adam import AdamConfig, Update
from fuyou.optimizer.process.client import OptimizerLink
from fuyou.optimizer.process.protocol import BufferRegion, ReadStates, Setup, SharedRegions, UpdateRecord
from fuyou.planner.profiling.blocks import BlockBench, streamed_shape
from fuyou.planner.profiling.cache import SLOWER, ProfiledWorkload
from fuyou.planner.rates import Profile
from fuyou.runtime.device import Device, DeviceMemoryError, optimizer_threads
from fuyou.schedule.tasks import Op, Task


def measure(workload: ProfiledWorkload, device: Device, *, past_cache: bool = False) -> Profile:
    """Measure ``device`` and the drives of the workload's directories.

    Args:
        past_cache: write past the drives' fast caches, for up to 30 s and in at most half of their free space.

    Raises:
        UserError: if the directories have no space for scratch files, the model cannot be streamed, or a whole block
            does not fit the device.
        FinetuneError: if a drive or the optimizer process failed.
    """
    start = time.monotonic()
    throttle = device.throttle
    link = OptimizerLink()  # imports PyTorch while the model is built
    try:
        stack, shape = streamed_shape(workload.config, workload.precision, device.torch_device)
        block_bytes = shape.block_elements * workload.precision.parameter_bytes
        records = scratch_records(workload.chunk_elements, workload.precision)
        link.wait_until_up()
        with open_scratch(workload.directories, records, throttle) as scratch:
            drives = scratch.measure(past_cache=past_cache)
            copies = measure_link(device, block_bytes)
            parts = _parts(stack, shape, device, workload)
            threads = optimizer_threads(device)
            updates = measure_updates(link, scratch, workload.precision, threads, throttle)
    except (torch.OutOfMemoryError, DeviceMemoryError) as error:
        raise UserError(
            f"A whole block of this model and its gradient, which are to be measured, do not fit {device.name}: plan "
            "with presets (finetune plan --gpu NAME --drive NAME), or train without measuring."
        ) from error
    finally:
        link.close()
    return Profile(
        device=device.name,
        tokens=workload.tokens,
        **parts,
        block_parameters=shape.active_parameters(shape.largest_block),
        upload_bytes_per_second=copies.upload_both,
        download_bytes_per_second=copies.download_both,
        read_bytes_per_second=drives.read,
        write_bytes_per_second=drives.write,
        burst_write_bytes_per_second=drives.burst_write,
        mixed_bytes_per_second=drives.mixed,
        commit_seconds=drives.commit_seconds,
        adam_parameters_per_second=updates * workload.chunk_elements,
        adam_threads=threads,
        measured_at=time.time(),
        measured_in_seconds=time.monotonic() - start,
    )


def _parts(stack: StreamedModel, shape: ModelLayout, device: Device, workload: ProfiledWorkload) -> dict[str, Any]:
    return BlockBench(stack, shape, device, workload.rows, workload.seq_len, workload.head_columns).measure()


# -- drives -----------------------------------------------------------------------------------------------------------

FOLDER = "fuyou-profile-"  # Beginning of the scratch folder's name; the process id follows
DIRECTION_SECONDS = 0.5  # Each direction is measured for this long
_FILL_SECONDS = 1.5  # The files are written once before anything is measured, but for no longer than this
PAST_CACHE_SECONDS = 30.0  # Longest time that is written to fill the drives' fast caches
SETTLED_SECONDS = 3.0  # A rate counts once it has lasted this long
_TRANSFER_BYTES = 4 << 20
_TRANSFERS = 24
_IN_FLIGHT = 6
_FILE = "bandwidth"


@dataclass(frozen=True)
class DriveRates:
    """Rates of all drives together."""

    read: float  # Bytes per second, as in the next three
    write: float  # After ``filled_bytes``: past the fast cache, if these were enough to fill it
    burst_write: float  # At first
    filled_bytes: int  # Written to fill the fast caches
    mixed: float
    commit_seconds: float


class ScratchFiles:
    """A store for measuring.

    Args:
        records: records for the optimizer process, in two slots.
        transfers: extents that are moved to measure bandwidth.
        throttle: slows the drives down.
    """

    def __init__(self, store: Store, records: Sequence[Record], transfers: list[Extent], throttle: Throttle | None):
        self.store, self.records = store, records
        self._transfers, self._throttle = transfers, throttle

    def measure(self, *, past_cache: bool) -> DriveRates:
        """Measure writing (also past the fast cache if ``past_cache``), a commit, reading, and both alternating."""
        buffers = [HostBuffer(extent.nbytes).touch() for extent in self._transfers[:_IN_FLIGHT]]
        try:
            noise = np.random.default_rng(0).integers(0, 256, buffers[0].nbytes, dtype=np.uint8)
            for buffer in buffers:  # drives may be quick with zeros
                buffer.array[:] = noise
            filled, rate = self._move("write", buffers, _FILL_SECONDS, len(self._transfers))
            written = self._transfers[:filled]  # what was never written is read without looking at the drive
            burst = rate if filled < len(self._transfers) else self._move("write", buffers)[1]
            sustained, filled = self._past_cache(buffers, burst) if past_cache else (burst, 0)
            commit = self._commit()  # after as much has been written as in a step, not after a pause
            return DriveRates(
                read=self._move("read", buffers, extents=written)[1],
                write=sustained,
                burst_write=burst,
                filled_bytes=filled,
                mixed=self._move("mixed", buffers, extents=written)[1],
                commit_seconds=commit,
            )
        finally:
            for buffer in buffers:
                buffer.close()

    def _move(
        self,
        direction: Literal["read", "write", "mixed"],
        buffers: Sequence[HostBuffer],
        seconds: float = DIRECTION_SECONDS,
        most: int | None = None,
        extents: Sequence[Extent] | None = None,
    ) -> tuple[int, float]:
        """Move at most ``most`` extents for ``seconds``; return their number and bytes per second."""
        under_way: deque[Future[None]] = deque()
        moved = count = 0
        start = time.perf_counter()
        for number, extent in enumerate(islice(cycle(extents or self._transfers), most)):
            if number >= len(buffers):
                under_way.popleft().result()
                if time.perf_counter() - start > seconds:
                    break
            writes = direction == "write" or (direction == "mixed" and number % 2 == 1)
            move = self.store.write if writes else self.store.read
            under_way.append(move(extent, buffers[number % len(buffers)].array))
            moved, count = moved + extent.nbytes, number + 1
        for future in under_way:
            future.result()
        return count, moved / (time.perf_counter() - start)

    def _past_cache(self, buffers: Sequence[HostBuffer], burst: float) -> tuple[float, int]:
        """Write where nothing was, until the rate has dropped and settled; return the rate at the end, and bytes."""
        folders = [path / SCRATCH for path in self.store.directories]
        sharing = Counter(path.stat().st_dev for path in self.store.directories)
        free = min(shutil.disk_usage(path).free // sharing[path.stat().st_dev] for path in self.store.directories)
        nbytes = buffers[0].nbytes
        count = int(min(len(folders) * free / 2, burst * PAST_CACHE_SECONDS)) // nbytes
        if count <= len(buffers):
            return burst, 0
        layout = Layout(len(folders))
        extent = layout.allocate(_FILE, count * nbytes)
        for folder in folders:
            folder.mkdir()
        store = Store.create(folders, layout, io="posix", throttle=self._throttle)
        try:
            under_way: deque[Future[None]] = deque()
            start, slow_since = time.perf_counter(), 0.0
            written = deque([(start, 0)])  # Times of the last seconds, and bytes until then
            for number in range(count + len(buffers)):
                if number >= len(buffers):
                    under_way.popleft().result()
                    now = time.perf_counter()
                    written.append((now, (number - len(buffers) + 1) * nbytes))
                    while len(written) > 2 and written[1][0] < now - SETTLED_SECONDS:
                        written.popleft()
                    rate = (written[-1][1] - written[0][1]) / (now - written[0][0])
                    if rate < SLOWER * burst and now - start > SETTLED_SECONDS:
                        slow_since = slow_since or now
                    if now - start > PAST_CACHE_SECONDS or (slow_since and now - slow_since > SETTLED_SECONDS):
                        break
                if number < count:
                    buffer = buffers[number % len(buffers)].array
                    under_way.append(store.write(extent, buffer, number * nbytes, nbytes))
            for future in under_way:
                future.result()
            return rate, written[-1][1]
        finally:
            store.close()
            _remove(folders)

    def _commit(self) -> float:
        start = time.perf_counter()
        self.store.sync([_FILE])
        for path in self.store.directories:
            commit_manifest(path, {"scratch": True})
        return time.perf_counter() - start


@contextmanager
def open_scratch(
    directories: Sequence[Path], records: Sequence[Record], throttle: Throttle | None
) -> Iterator[ScratchFiles]:
    """Open a store of scratch files in a new folder in each of ``directories``, removed afterwards.

    Raises:
        UserError: if there is no space for them.
    """
    folders = [path / f"{FOLDER}{os.getpid()}" for path in directories]
    for folder in (folder for path in directories for folder in path.glob(f"{FOLDER}*")):
        number = folder.name.removeprefix(FOLDER)
        if number.isdigit() and not psutil.pid_exists(int(number)):  # its process was killed
            _remove([folder])
    layout = Layout(len(directories))
    allocate_extents(layout, records)
    transfers = [layout.allocate(_FILE, _TRANSFER_BYTES * len(directories)) for _ in range(_TRANSFERS)]
    store: Store | None = None
    try:
        for folder in folders:
            folder.mkdir()
        store = Store.create(folders, layout, io="posix", throttle=throttle)
        yield ScratchFiles(store, records, transfers, throttle)
    finally:
        if store is not None:
            store.close()
        _remove(folders)


def _remove(folders: Sequence[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


# -- the link to the device -------------------------------------------------------------------------------------------

LARGEST_COPY_BYTES = 64 << 20  # Largest copy that is measured: a block's parameters are rarely smaller where it matters
_COPIES = 5


@dataclass(frozen=True)
class LinkRates:
    """Bytes per second between host and device."""

    upload: float
    download: float
    upload_both: float  # Bytes per second while the other direction is busy, too
    download_both: float


def measure_link(device: Device, nbytes: int) -> LinkRates:
    """Measure copies of ``nbytes`` (at most :data:`LARGEST_COPY_BYTES`), as the engine's lanes make them.

    Takes twice as many bytes in host memory and on the device.
    """
    nbytes = min(nbytes, LARGEST_COPY_BYTES)
    up, down = _Copies(device, Op.PARAMETER_UPLOAD, nbytes), _Copies(device, Op.GRADIENT_DOWNLOAD, nbytes)
    try:
        alone = up.rate(), down.rate()
        with ThreadPoolExecutor(1) as other:
            busy_rate = other.submit(down.rate)
            rate = up.rate()
            return LinkRates(*alone, rate, busy_rate.result())
    finally:
        up.close()
        down.close()


class _Copies:
    def __init__(self, device: Device, op: Op, nbytes: int):
        self._device, self._op, self._nbytes = device, op, nbytes
        self._buffer = HostBuffer(nbytes).touch()
        if device.page_locks:
            self._buffer.page_lock()
        host = self._buffer.tensor(torch.uint8, 0, nbytes)
        there = device.allocate(nbytes)
        self._target, self._source = (there, host) if op is Op.PARAMETER_UPLOAD else (host, there)

    def rate(self) -> float:
        rates = []
        for _ in range(_COPIES + 1):
            task = Task(self._op, [])
            task.started_at = time.monotonic()
            self._device.copy(task, self._target, self._source)
            self._device.synchronize()
            task.finished_at = time.monotonic()
            began, ended = self._device.interval(task)
            rates.append(self._nbytes / max(ended - began, 1e-9))
        return statistics.median(rates[1:])  # the first one warms up

    def close(self) -> None:
        del self._target, self._source
        self._buffer.close()


# -- the optimizer process --------------------------------------------------------------------------------------------

UPDATED_ELEMENTS = 4 << 20  # Parameters in all records to update: more than caches hold with their states
WINDOW_SECONDS = 0.5  # Updates are counted for this long, or until there have been two
_ANSWER_SECONDS = 60.0  # Longest time for one update


def scratch_records(chunk_elements: int, precision: Precision) -> list[Record]:
    """Return records of one chunk each, to be updated."""
    return [
        Record.build(index, f"profile {index}", Kind.BLOCK, precision, [(("weight",), (1, chunk_elements), True)])
        for index in range(max(1, UPDATED_ELEMENTS // chunk_elements))
    ]


def measure_updates(
    link: OptimizerLink, scratch: ScratchFiles, precision: Precision, threads: int, throttle: Throttle | None
) -> float:
    """Return the records of :func:`scratch_records` per second that the optimizer process updates, alone, with their
    states in its memory.

    Args:
        link: the process, started but not set up.
        scratch: the store with the records.
        throttle: slows the drives down.

    Raises:
        FinetuneError: if the process fails, or does not answer.
    """
    records = scratch.records
    nbytes = max(record.parameter_nbytes for record in records)
    shared = SharedRegions(
        2 * nbytes, {Kind.BLOCK: BufferRegion(0, nbytes, 1)}, {Kind.BLOCK: BufferRegion(nbytes, nbytes, 1)}
    )
    setup = Setup(
        directories=[str(path) for path in scratch.store.directories],
        records=records,
        chunk_elements=records[0].numel,
        ring_chunks=1,
        shared=shared,
        threads=threads,
        resident=[record.index for record in records],
        throttle=throttle,
    )
    answers: queue.SimpleQueue[object] = queue.SimpleQueue()
    steps = itertools.count()

    def begin_update() -> None:
        step = next(steps)
        record = step % len(records)
        link.send(ReadStates(record, 0, in_memory=step >= len(records)))
        link.send(UpdateRecord(record, 0, 0, None, Update(step + 1, AdamConfig())))

    def wait() -> float:
        try:
            answer = answers.get(timeout=_ANSWER_SECONDS)
        except queue.Empty:
            raise FinetuneError(
                f"The optimizer process has not answered for {_ANSWER_SECONDS:.0f} s while it was being measured: a "
                "drive hangs, or the machine is overloaded."
            ) from None
        if isinstance(answer, BaseException):
            raise answer
        return time.monotonic()

    memory = _shared_values(link, shared.nbytes, precision)
    try:
        link.set_up(setup, answers.put, answers.put)
        for _ in records:  # the first time each reads its states
            begin_update()
            wait()
        begin_update()  # two at a time, so that the process never waits for a message
        begin_update()
        ends = [wait()]
        while len(ends) < 3 or ends[-1] - ends[0] < WINDOW_SECONDS:
            begin_update()
            ends.append(wait())
        return (len(ends) - 1) / (ends[-1] - ends[0])
    finally:
        link.close()
        memory.close()


def _shared_values(link: OptimizerLink, nbytes: int, precision: Precision) -> HostBuffer:
    """Share memory for parameters and gradients, filled with random numbers: other values may slow Adam down."""
    assert link.shared_fd is not None
    os.ftruncate(link.shared_fd, nbytes)
    memory = HostBuffer(nbytes, fd=os.dup(link.shared_fd)).touch()
    values = memory.tensor(precision.dtype, 0, nbytes // precision.dtype.itemsize)
    tile = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)).to(precision.dtype) * 0.02
    for start in range(0, values.numel(), tile.numel()):
        part = values[start : start + tile.numel()]
        part.copy_(tile[: part.numel()])
    return memory
