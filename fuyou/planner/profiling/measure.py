"""Measure everything that a prediction of a step needs.

These are the SSDs, through scratch files of a store, the link to the device, the optimizer, and the model's parts
(:mod:`.blocks`). Each is measured alone: what shares processors or memory with it slows it down in a run.

This takes 3 to 8 s, and at most 20 s on slow drives or processors. It needs about as much memory as the engine for one
block or the head, and 24 MiB per drive.
"""

import shutil
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.errors import UserError
from common.memory.buffers import HostBuffer
from common.scratch import scratch_folder
from common.store import Extent, Layout, Store, Throttle, commit_manifest
from fuyou.layout.model_layout import ModelLayout
from fuyou.layout.record import Precision
from fuyou.model.streamed_model import StreamedModel
from fuyou.optimizer.adam import AdamConfig, Update
from fuyou.optimizer.chunk_update import ChunkOptimizer, tried_kernels
from fuyou.optimizer.moments import OptimizerStates
from fuyou.planner.profiling.blocks import BlockBench, random_values, streamed_layout
from fuyou.planner.profiling.cache import Profile, ProfiledWorkload
from fuyou.runtime.device import Device, DeviceMemoryError, optimizer_threads
from fuyou.schedule.tasks import Op, Task


def measure(workload: ProfiledWorkload, device: Device, *, past_cache: bool = False) -> Profile:
    """Measure ``device`` and the drives of the workload's directories.

    Args:
        past_cache: write past the drives' fast caches, for up to 30 s and in at most half of their free space.

    Raises:
        UserError: if the directories have no space for scratch files, the model cannot be streamed, or a whole block
            does not fit the device.
        FinetuneError: if a drive failed.
    """
    start = time.monotonic()
    threads = optimizer_threads(device)
    try:
        stack, layout = streamed_layout(workload.config, workload.precision, device.torch_device)
        drives = measure_drives(workload.directories, device.throttle, past_cache=past_cache)
        link = measure_link(device, layout.block_elements * workload.precision.parameter_bytes)
        parts = _parts(stack, layout, device, workload)
        adam = measure_updates(workload.chunk_elements, workload.precision, threads)
    except (torch.OutOfMemoryError, DeviceMemoryError) as error:
        raise UserError(
            f"A whole block of this model and its gradient, which are to be measured, do not fit {device.name}: plan "
            "with presets (finetune plan --gpu NAME --drive NAME), or train without measuring."
        ) from error
    return Profile(
        device=device.name,
        tokens=workload.rows * workload.seq_len,
        **parts,
        block_parameters=layout.active_parameters(layout.largest_block),
        upload_bytes_per_second=link.upload,
        download_bytes_per_second=link.download,
        read_bytes_per_second=drives.read,
        write_bytes_per_second=drives.write,
        burst_write_bytes_per_second=drives.burst_write,
        commit_seconds=drives.commit_seconds,
        adam_parameters_per_second=adam,
        adam_threads=threads,
        measured_at=time.time(),
        measured_in_seconds=time.monotonic() - start,
    )


def _parts(
    stack: StreamedModel, layout: ModelLayout, device: Device, workload: ProfiledWorkload
) -> dict[str, Any]:
    return BlockBench(stack, layout, device, workload.rows, workload.seq_len, workload.head_columns).measure()


# -- drives -----------------------------------------------------------------------------------------------------------

DIRECTION_SECONDS = 0.5  # Each direction is measured for this long
_FILL_SECONDS = 1.5  # The files are written once before anything is measured, but for no longer than this
PAST_CACHE_SECONDS = 30.0  # Longest time that is written to fill the drives' fast caches
SETTLED_SECONDS = 3.0  # A rate counts once it has lasted this long
_SLOWER = 0.7  # A rate below this fraction of the one before is another rate, and no noise
_TRANSFER_BYTES = 4 << 20
_TRANSFERS = 24
_IN_FLIGHT = 6
_FILE = "bandwidth"
Move = Callable[[Extent, np.ndarray], Future[None]]


@dataclass(frozen=True)
class DriveRates:
    """Rates of all drives together."""

    read: float  # Bytes per second, as in the next two
    write: float  # After ``filled_bytes``: past the fast cache, if these were enough to fill it
    burst_write: float  # At first
    filled_bytes: int  # Written to fill the fast caches
    commit_seconds: float
    direct: bool = True  # Whether they were measured past the page cache


def measure_drives(directories: Sequence[Path], throttle: Throttle | None, *, past_cache: bool) -> DriveRates:
    """Measure writing, a commit, and reading, in scratch files.

    Args:
        throttle: slows the drives down.
        past_cache: write past the drives' fast caches, too.

    Raises:
        UserError: if there is no space for the files.
    """
    layout = Layout(len(directories))
    transfers = [layout.allocate(_FILE, _TRANSFER_BYTES * len(directories)) for _ in range(_TRANSFERS)]
    buffers = [HostBuffer(extent.nbytes).touch() for extent in transfers[:_IN_FLIGHT]]
    try:
        noise = np.random.default_rng(0).integers(0, 256, buffers[0].nbytes, dtype=np.uint8)
        for buffer in buffers:  # drives may be quick with zeros
            buffer.array[:] = noise
        with open_scratch(directories, layout, throttle) as store:
            filled, burst = _move(store.write, buffers, transfers, _FILL_SECONDS)
            written = transfers[:filled]  # what was never written is read without looking at the drive
            if filled == len(transfers):
                _, burst = _move(store.write, buffers, cycle(written), DIRECTION_SECONDS)
            sustained, filled_bytes = (
                _past_cache(store, buffers, burst, throttle) if past_cache else (burst, 0)
            )
            start = time.perf_counter()  # after as much has been written as in a step, not after a pause
            store.sync([_FILE])
            for path in store.directories:
                commit_manifest(path, {"scratch": True})
            commit = time.perf_counter() - start
            _, read = _move(store.read_unchecked, buffers, cycle(written), DIRECTION_SECONDS)
            return DriveRates(read, sustained, burst, filled_bytes, commit, store.direct)
    finally:
        for buffer in buffers:
            buffer.close()


def _move(
    move: Move, buffers: Sequence[HostBuffer], extents: Iterable[Extent], most_seconds: float
) -> tuple[int, float]:
    """Read or write the extents for at most ``most_seconds``; return their number and bytes per second."""
    moves = (move(extent, buffers[number % len(buffers)].array) for number, extent in enumerate(extents))
    start = time.perf_counter()
    count = _run(moves, len(buffers), lambda _: time.perf_counter() - start > most_seconds)
    return count, count * buffers[0].nbytes / (time.perf_counter() - start)


def _past_cache(
    drives: Store, buffers: Sequence[HostBuffer], burst: float, throttle: Throttle | None
) -> tuple[float, int]:
    """Write where nothing was, until the rate has dropped and settled; return the rate at the end, and bytes."""
    sharing = Counter(path.stat().st_dev for path in drives.directories)
    free = min(shutil.disk_usage(path).free // sharing[path.stat().st_dev] for path in drives.directories)
    nbytes = buffers[0].nbytes
    count = int(min(len(drives.directories) * free / 2, burst * PAST_CACHE_SECONDS)) // nbytes
    if count <= len(buffers):
        return burst, 0
    layout = Layout(len(drives.directories))
    extent = layout.allocate(_FILE, count * nbytes)
    with open_scratch(drives.directories, layout, throttle) as store:
        writes = (
            store.write(extent, buffers[number % len(buffers)].array, number * nbytes, nbytes)
            for number in range(count)
        )
        start = time.perf_counter()
        written = deque([(start, 0)])  # Times of the last seconds, and bytes until then
        slow_since = 0.0

        def rate() -> float:
            return (written[-1][1] - written[0][1]) / (written[-1][0] - written[0][0])

        def has_settled(number: int) -> bool:
            nonlocal slow_since
            now = time.perf_counter()
            written.append((now, number * nbytes))
            while len(written) > 2 and written[1][0] < now - SETTLED_SECONDS:
                written.popleft()
            if rate() < _SLOWER * burst and now - start > SETTLED_SECONDS:
                slow_since = slow_since or now
            return now - start > PAST_CACHE_SECONDS or (slow_since > 0 and now - slow_since > SETTLED_SECONDS)

        _run(writes, len(buffers), has_settled)
        return rate(), written[-1][1]


def _run(moves: Iterator[Future[None]], in_flight: int, enough: Callable[[int], bool]) -> int:
    """Run ``moves``, each once the one ``in_flight`` before it has freed its buffer; return their number.

    Args:
        enough: called with the number of completed moves after each; ends the run when it returns true.
    """
    pending = deque(islice(moves, in_flight))
    completed = 0
    while pending:
        pending.popleft().result()
        completed += 1
        if enough(completed):
            break
        pending.extend(islice(moves, 1))
    for future in pending:
        future.result()
    return completed + len(pending)


@contextmanager
def open_scratch(directories: Sequence[Path], layout: Layout, throttle: Throttle | None) -> Iterator[Store]:
    """Open a store in a new folder in each of ``directories``, removed afterwards.

    Raises:
        UserError: if there is no space for it.
    """
    with ExitStack() as stack:
        folders = [stack.enter_context(scratch_folder(path)) for path in directories]
        yield stack.enter_context(Store.create(folders, layout, io="posix", throttle=throttle))


# -- the link to the device -------------------------------------------------------------------------------------------

# Largest copy that is measured: a block's parameters are rarely smaller where it matters
LARGEST_COPY_BYTES = 64 << 20
_COPIES = 5


@dataclass(frozen=True)
class LinkRates:
    """Bytes per second between host and device, each way while the other direction is busy, too."""

    upload: float
    download: float


def measure_link(device: Device, nbytes: int) -> LinkRates:
    """Measure copies of ``nbytes`` (at most :data:`LARGEST_COPY_BYTES`), as the engine's lanes make them.

    Takes twice as many bytes in host memory and on the device.
    """
    nbytes = min(nbytes, LARGEST_COPY_BYTES)
    buffers = [HostBuffer(nbytes).touch() for _ in range(2)]
    if device.page_locks:
        for buffer in buffers:
            buffer.page_lock()
    up, down = (buffer.tensor(torch.uint8, 0, nbytes) for buffer in buffers)
    try:
        with ThreadPoolExecutor(1) as other:
            download = other.submit(_copy_rate, device, Op.GRADIENT_DOWNLOAD, down, device.allocate(nbytes))
            upload = _copy_rate(device, Op.PARAMETER_UPLOAD, device.allocate(nbytes), up)
            return LinkRates(upload, download.result())
    finally:
        del up, down
        for buffer in buffers:
            buffer.close()


def _copy_rate(device: Device, op: Op, target: torch.Tensor, source: torch.Tensor) -> float:
    rates = []
    for _ in range(_COPIES + 1):
        task = Task(op, [])
        task.started_at = time.monotonic()
        device.copy(task, target, source)
        device.synchronize()
        task.finished_at = time.monotonic()
        began, ended = device.interval(task)
        rates.append(source.numel() / max(ended - began, 1e-9))
    return statistics.median(rates[1:])  # the first one warms up


# -- the optimizer ----------------------------------------------------------------------------------------------------

UPDATED_ELEMENTS = 4 << 20  # Parameters that are updated: more than caches hold with their states
WINDOW_SECONDS = 0.5  # Updates are counted for this long, or until there have been two


def measure_updates(chunk_elements: int, precision: Precision, threads: int) -> float:
    """Return the parameters per second that the optimizer updates, with their states in memory.

    Args:
        chunk_elements: parameters that are updated at once.
        threads: threads of the optimizer process.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        optimizer = ChunkOptimizer(precision.optimizer, tried_kernels(precision.optimizer))
        chunks = []
        for _ in range(max(1, UPDATED_ELEMENTS // chunk_elements)):
            # Zeros may be faster than random values.
            weights, gradient = (
                random_values(chunk_elements, precision.dtype, torch.device("cpu")) for _ in range(2)
            )
            low = torch.zeros(chunk_elements, dtype=precision.low_dtype) if precision.split else None
            chunks.append((OptimizerStates.before_training(weights, low, precision.optimizer), gradient))
        for states, gradient in chunks:
            optimizer.update(states, gradient, Update(1, AdamConfig()), decay=True)
        start = time.perf_counter()
        updated = 0
        elapsed = 0.0
        while updated < 2 or elapsed < WINDOW_SECONDS:
            states, gradient = chunks[updated % len(chunks)]
            optimizer.update(states, gradient, Update(2, AdamConfig()), decay=True)
            updated = updated + 1
            elapsed = time.perf_counter() - start
        return updated * chunk_elements / elapsed
    finally:
        torch.set_num_threads(before)
