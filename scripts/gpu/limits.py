"""What the machine can do at most: matrix products, copies, drive, Adam. Everything else is measured against these."""

import statistics
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from common.hardware.machine import core_count
from common.memory.buffers import HostBuffer
from common.store import Layout, Store, remove
from common.units import format_bytes
from fuyou.optimizer.adam import AdamConfig, Update
from fuyou.optimizer.chunk_update import ChunkOptimizer, tried_kernels
from fuyou.optimizer.moments import OptimizerStates
from gpu.journal import Check

PRODUCTS = (
    (4096, 4096, 4096), (8192, 8192, 8192), (16384, 16384, 16384), (16384, 2048, 8192), (16384, 2560, 10240),
    (16384, 4096, 16384),
)  # fmt: skip
"""Sizes [m, k, n] of matrix products: squares, and a block's feed-forward products over 16 Ki tokens."""


def run(check: Check) -> None:
    check.attempt("matmul", lambda: _matmul(check))
    check.attempt("copies", lambda: _copies(check))
    check.attempt("store", lambda: _store(check))
    check.attempt("adam", lambda: _adam(check))


def rate(work: Callable[[], object], seconds: float, device: torch.device) -> float:
    """Calls of ``work`` per second: the median of three rounds that take about ``seconds`` together."""

    def timed(calls: int) -> float:
        synchronize(device)
        began = time.perf_counter()
        for _ in range(calls):
            work()
        synchronize(device)
        return time.perf_counter() - began

    timed(2)
    calls = max(1, round(seconds / 3 / max(1e-6, timed(2) / 2)))
    return calls / statistics.median(timed(calls) for _ in range(3))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _matmul(check: Check) -> dict[str, Any]:
    """bf16 with fp32 accumulation, on random data (zeros run faster than anything real)."""
    device = torch.device(check.settings.device)
    seconds = 0.05 if check.settings.quick else 0.8
    rows = []
    for m, k, n in ((256, 256, 256),) if check.settings.quick else PRODUCTS:
        left = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        right = torch.randn(k, n, device=device, dtype=torch.bfloat16)
        out = torch.empty(m, n, device=device, dtype=torch.bfloat16)
        per_second = rate(partial(torch.mm, left, right, out=out), seconds, device)
        rows.append({"m": m, "k": k, "n": n, "flops_per_second": 2.0 * m * k * n * per_second})
    best = max(rows, key=lambda row: row["flops_per_second"])
    m, k, n = (int(best[name]) for name in "mkn")
    left = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    right = torch.randn(k, n, device=device, dtype=torch.bfloat16)
    sustained = rate(partial(torch.mm, left, right), 3 * seconds, device) * 2.0 * m * k * n
    return {"sizes": rows, "best_flops_per_second": max(best["flops_per_second"], sustained), "sustained": sustained}


def _copies(check: Check) -> dict[str, Any]:
    """Between the device and memory that is page-locked as the engine does it: a shared memory file, registered."""
    check.need_cuda()
    device = torch.device(check.settings.device)
    nbytes, repeat = (64 << 20, 4) if check.settings.quick else (1 << 30, 8)
    result: dict[str, Any] = {}
    buffers: list[HostBuffer] = []
    try:
        began = time.perf_counter()
        buffers = [HostBuffer(nbytes, shared=True).touch() for _ in range(2)]
        result["touch_bytes_per_second"] = 2 * nbytes / (time.perf_counter() - began)
        began = time.perf_counter()
        for buffer in buffers:
            buffer.page_lock()
        result["lock_bytes_per_second"] = 2 * nbytes / (time.perf_counter() - began)
        up, down = (buffer.tensor(torch.uint8, 0, nbytes) for buffer in buffers)
        result["is_pinned"] = up.is_pinned()
        up.random_(0, 256)
        sent = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        back = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        lanes = [torch.cuda.Stream(device), torch.cuda.Stream(device)]

        def copy(which: tuple[int, ...]) -> dict[int, float]:
            """Bytes per second of each direction, all started together."""
            torch.cuda.synchronize(device)
            events = {}
            for lane in which:
                events[lane] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                events[lane][0].record(lanes[lane])
            launched = time.perf_counter()
            for _ in range(repeat):
                for lane in which:
                    with torch.cuda.stream(lanes[lane]):
                        target, source = (sent, up) if lane == 0 else (down, back)
                        target.copy_(source, non_blocking=True)
            result["launch_seconds"] = time.perf_counter() - launched  # near nothing, if copies are asynchronous
            for lane in which:
                events[lane][1].record(lanes[lane])
            torch.cuda.synchronize(device)
            return {lane: repeat * nbytes * 1e3 / events[lane][0].elapsed_time(events[lane][1]) for lane in which}

        copy((0, 1))
        result["to_device"], result["to_host"] = copy((0,))[0], copy((1,))[1]
        both = copy((0, 1))
        result["to_device_beside"], result["to_host_beside"] = both[0], both[1]
        with torch.cuda.stream(lanes[0]):
            back.copy_(sent, non_blocking=True)
            down.copy_(back, non_blocking=True)
        torch.cuda.synchronize(device)
        result["bytes_survive"] = torch.equal(up, down)
        return result
    finally:
        torch.cuda.synchronize(device)
        up = down = None  # type: ignore[assignment]
        for buffer in buffers:
            buffer.close()


def _store(check: Check) -> dict[str, Any]:
    """Through the store, as the engine reads and writes: 40 MB at a time, several at once."""
    quick = check.settings.quick
    nbytes, total, depth = (4 << 20, 32 << 20, 4) if quick else (40 << 20, 4 << 30, 6)
    path = check.directory("io")
    layout = Layout(1)
    extents = [layout.allocate("data", nbytes) for _ in range(total // nbytes)]
    store = Store.create([path], layout, io="posix", threads=4)
    ring = [HostBuffer(nbytes).touch() for _ in range(depth)]
    for buffer in ring:
        buffer.array[:] = torch.randint(0, 256, (len(buffer.array),), dtype=torch.uint8).numpy()
    result: dict[str, Any] = {"direct": store.direct, "total_bytes": total, "block_bytes": nbytes, "depth": depth}

    def move(kinds: str, seconds: float) -> float:
        """Bytes per second of reads (``r``) and writes (``w``) in turn, at most twice around the file."""
        under_way: deque[Future] = deque()
        began, moved = time.perf_counter(), 0
        while moved < 2 * total and time.perf_counter() - began < seconds:
            for number, extent in enumerate(extents):
                if len(under_way) == depth:
                    under_way.popleft().result()  # in turn, so that the buffer is free again
                kind = kinds[number % len(kinds)]
                call = store.write if kind == "w" else store.read
                under_way.append(call(extent, ring[(moved // nbytes) % depth].bytes(0, nbytes)))
                moved += nbytes
                if time.perf_counter() - began > seconds:
                    break
        for future in under_way:
            future.result()
        if "w" in kinds:
            store.sync(["data"])
        return moved / (time.perf_counter() - began)

    try:
        seconds = 0.2 if quick else 6.0
        result["write_first"] = move("w", seconds)
        result["write"] = move("w", seconds)
        result["read"] = move("r", seconds)
        result["mixed"] = move("rw", seconds)
    finally:
        store.close()
        remove([path])
        path.rmdir()
    result["note"] = f"{format_bytes(total)} file, fdatasync counted"
    return result


def _adam(check: Check) -> dict[str, Any]:
    """Parameters per second on all cores but two, over chunks as the optimizer process has them, out of the cache."""
    threads = max(1, core_count() - 2)
    torch.set_num_threads(threads)
    count, chunks = (1 << 18, 2) if check.settings.quick else (4 << 20, 16)
    adam, update = ChunkOptimizer(kernels=tried_kernels()), Update(1, AdamConfig())
    result: dict[str, Any] = {"threads": threads, "chunk_elements": count, "chunks": chunks}
    for split in (True, False):
        dtype = torch.bfloat16 if split else torch.float32
        ring = [
            (
                OptimizerStates.before_training(
                    torch.randn(count).to(dtype), torch.zeros(count, dtype=torch.int16) if split else None
                ),
                torch.randn(count).to(dtype),
            )
            for _ in range(chunks)
        ]  # fmt: skip

        def turn(ring: list[Any] = ring) -> None:
            for states, gradient in ring:
                adam.update(states, gradient, update, decay=True)

        seconds = 0.05 if check.settings.quick else 2.0
        result["bf16" if split else "fp32"] = rate(turn, seconds, torch.device("cpu")) * count * chunks
    return result
