"""The device: where blocks compute, and how bytes get there and back.

A CPU plays the device as well as a GPU does: it has its own memory budget (a part of the host's) and copies are
real copies, made by the lanes' threads. So what runs on a machine without a GPU is the same engine.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils import deterministic

from common.errors import FinetuneError, UserError, on_one_line
from common.hardware.machine import (
    core_count,
    memory_available_bytes,
    memory_limit_bytes,
    obstacle,
    pick_gpu,
    torch_name,
)
from common.memory.buffers import HostBuffer
from common.store import Throttle
from common.units import format_bytes, parse_bytes
from fuyou.schedule.tasks import EXCHANGES, Op, Task

_COPIES = (Op.PARAMETER_UPLOAD, Op.GRADIENT_DOWNLOAD, Op.ACTIVATION_UPLOAD, Op.ACTIVATION_DOWNLOAD)


_LIBRARY_BYTES = 256 << 20  # Device memory that cuBLAS takes for its workspaces, one per thread that computes
_PROCESS_BYTES = 256 << 20  # Host memory that the engine's two processes take after the budget is set
_ORIGIN_SECONDS = 60.0  # Seconds for which times on the device count from one event


class DeviceMemoryError(FinetuneError):
    """Raised when the device has no memory left."""


@contextmanager
def explain_out_of_memory() -> Iterator[None]:
    """Raise an error that says what to lower where PyTorch finds no memory on the device. Not run on a GPU yet.

    Raises:
        DeviceMemoryError: the device has no memory left.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        told = str(error).split(". ", 1)[0]
        raise DeviceMemoryError(
            f"The device has no memory left, though what was planned fits its budget ({told}). Lower --device-memory "
            "by a GiB or two, or give a smaller --micro-batch; nvidia-smi shows what else takes memory. The last "
            "committed step is intact: --resume continues from it."
        ) from error


class Device:
    """Where blocks compute, as the engine needs it; this one is the processor, and :class:`CudaDevice` a GPU.

    Buffers come from one mapping per pool, on huge pages.
    """

    name = "cpu"
    torch_device = torch.device("cpu")
    shares_host_memory = True  # Whether its memory is a part of the host's
    is_integrated = False  # Whether it allocates from the host's memory, next to the host (GB10, Jetson)
    page_locks = False  # Whether host buffers must be page-locked
    throttle: Throttle | None = None  # What slows the drives down, in benchmarks
    # Tasks that all ranks must launch in one order, whichever can begin first
    in_one_order: frozenset[Op] = frozenset()

    def __init__(self) -> None:
        self._buffers: list[HostBuffer] = []

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return ``uint8 [nbytes]`` of device memory, allocated once."""
        buffer = HostBuffer(nbytes).touch()
        self._buffers.append(buffer)
        return buffer.tensor(torch.uint8, 0, nbytes)

    def copy(self, task: Task, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy contiguous bytes (``uint8 [n]`` each) between host and device, in the lane of ``task``."""
        # numpy copies without the interpreter lock and without waking PyTorch's thread pool in this thread
        np.copyto(target.numpy(), source.numpy())

    def read_buffer(self, task: Task, memory: torch.Tensor) -> Any:
        """Return the device's ``memory``, ``uint8 [n]``, as stores read into it for ``task``."""
        return memory.numpy()

    def exchange(self, task: Task, work: Callable[[], None]) -> None:
        """Move bytes between ranks by calling ``work``, in the lane of ``task``."""
        work()

    def wait_event(self, task: Task, event: object) -> None:
        """Make ``task`` (not necessarily this thread) wait for ``event``."""

    def begin_compute(self, task: Task) -> None:
        """Note that a compute task's kernels are about to be launched."""

    def end_compute(self, task: Task) -> None:
        """Note that a compute task's kernels have been launched."""

    def has_finished(self, task: Task) -> bool:
        """Return whether a task that is done (perhaps only queued) has really ended."""
        return True

    def interval(self, task: Task) -> tuple[float, float]:
        """Return when an ended task really ran, in seconds on :func:`time.monotonic`'s clock."""
        return task.started_at, task.finished_at

    def synchronize(self) -> None:
        """Wait for all work on the device."""

    def release(self) -> None:
        """Free the memory of all buffers, which have been dropped."""
        self._buffers.clear()

    def memory_limit(self) -> int | None:
        """Return the bytes of device memory that may be used, or None where the host's budget limits it."""
        return None

    def cap_memory(self, nbytes: int | None) -> None:
        """Let an allocation beyond ``nbytes`` in all fail, if the device can; None: beyond what it has."""

    def peak_bytes(self) -> int | None:
        """Return the most device memory in use since the start, or None where the device cannot tell."""
        return None


class CudaDevice(Device):
    """A CUDA GPU: one stream per copy lane and one to compute in, tied together by events only.

    A thread that computes stays in that stream, in the engine and elsewhere: the default stream waits for all work of
    libraries that copy in it (kvikio, pageable memory), and they for it.

    All buffers are rings that are allocated once, so PyTorch's caching allocator and its rules about streams stay out
    of play. Host sides of copies must be page-locked. Not run on a GPU yet.
    """

    shares_host_memory = False
    page_locks = True
    in_one_order = frozenset(EXCHANGES)  # NCCL

    def __init__(self, index: int):
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        self.name = torch.cuda.get_device_name(index)
        self.is_integrated = bool(getattr(torch.cuda.get_device_properties(index), "is_integrated", False))
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        self._computing = torch.cuda.Stream(self.torch_device)
        self._enter()
        self._streams = {op: torch.cuda.Stream(self.torch_device) for op in _COPIES + EXCHANGES}
        self._origin = torch.cuda.Event(enable_timing=True)
        self._origin.record()
        self._origin.synchronize()
        self._origin_seconds = time.monotonic()
        self._start_events: dict[Task, torch.cuda.Event] = {}

    def allocate(self, nbytes: int) -> torch.Tensor:
        with explain_out_of_memory():
            return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def copy(self, task: Task, target: torch.Tensor, source: torch.Tensor) -> None:
        stream = self._streams[task.op]
        with torch.cuda.device(self.torch_device), torch.cuda.stream(stream):
            self._mark(task, stream)
            target.copy_(source, non_blocking=True)
            self._finish(task, stream)

    def read_buffer(self, task: Task, memory: torch.Tensor) -> Any:
        return memory

    def exchange(self, task: Task, work: Callable[[], None]) -> None:
        stream = self._streams.get(task.op)
        if stream is None:  # parameters in host memory, on their way to other nodes
            work()
            return
        with torch.cuda.device(self.torch_device), torch.cuda.stream(stream):
            self._mark(task, stream)
            work()
            self._finish(task, stream)

    def wait_event(self, task: Task, event: object) -> None:
        assert isinstance(event, torch.cuda.Event)
        if task.op in self._streams:
            self._streams[task.op].wait_event(event)
        elif task.op is Op.COMPUTE:
            self._computing.wait_event(event)
        else:  # the CPU, or an SSD, is about to touch the bytes
            # A thread's current device is GPU 0, where waiting would make a context that takes half a GiB.
            with torch.cuda.device(self.torch_device):
                event.synchronize()

    def begin_compute(self, task: Task) -> None:
        self._enter()
        self._mark(task, self._computing)

    def end_compute(self, task: Task) -> None:
        self._finish(task, self._computing)

    def has_finished(self, task: Task) -> bool:
        return task.event is None or task.event.query()

    def interval(self, task: Task) -> tuple[float, float]:
        start = self._start_events.pop(task, None)
        if start is None or task.event is None:
            return task.started_at, task.finished_at
        at = self._origin_seconds + self._origin.elapsed_time(start) / 1000
        self._advance_origin(start, at)
        return at, at + start.elapsed_time(task.event) / 1000

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def release(self) -> None:
        torch.cuda.empty_cache()  # or the next, larger buffers would have to fit next to these

    def memory_limit(self) -> int | None:
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        # The driver counts as used what PyTorch has got from it and given to nobody.
        cached = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(
            self.torch_device
        )
        return (free + cached) * 19 // 20 - _LIBRARY_BYTES

    def cap_memory(self, nbytes: int | None) -> None:
        _, total = torch.cuda.mem_get_info(self.torch_device)
        fraction = 1.0 if nbytes is None else min(1.0, nbytes / total)
        torch.cuda.set_per_process_memory_fraction(fraction, self.torch_device)

    def peak_bytes(self) -> int | None:
        return torch.cuda.max_memory_reserved(self.torch_device)

    def _enter(self) -> None:
        """Let this thread compute in the stream for it, after what it has launched elsewhere."""
        current = torch.cuda.current_stream(self.torch_device)
        if current != self._computing:
            self._computing.wait_stream(current)
            torch.cuda.set_stream(self._computing)

    def _advance_origin(self, event: torch.cuda.Event, seconds: float) -> None:
        """Count from a newer event: elapsed times are fp32 milliseconds, too coarse after hours."""
        if seconds > self._origin_seconds + _ORIGIN_SECONDS:
            self._origin = event
            self._origin_seconds = seconds

    def _mark(self, task: Task, stream: torch.cuda.Stream) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        self._start_events[task] = event

    @staticmethod
    def _finish(task: Task, stream: torch.cuda.Stream) -> None:
        # Blocking: a lane that waits for it sleeps, instead of spinning on a core that Adam needs.
        task.event = torch.cuda.Event(enable_timing=True, blocking=True)
        task.event.record(stream)


def optimizer_threads(device: Device) -> int:
    """Return the number of threads for the optimizer process next to ``device``.

    Next to a GPU, all cores but two are the optimizer's; on a CPU device most belong to the computation. Threads that
    share a core would not be faster: vector units and memory bandwidth bound an update.
    """
    return 1 if device.shares_host_memory else max(1, core_count() - 2)


def memory_limits(
    device: Device, host: int | str | None, device_memory: int | str | None, ranks_per_node: int = 1
) -> tuple[int, int]:
    """Return the budgets of host and device memory in bytes: as given, or what there is.

    On the host that is four fifths of it, and less where the processes themselves need more than the rest. The host's
    is shared by ``ranks_per_node`` ranks. A device's is never more than it has free: a card with 24 GiB on its box has
    half a GiB less, and screens and other programs take some of it. Where host and device allocate from one memory,
    both share the host's budget.

    Raises:
        UserError: more host memory than the machine has, or nothing left of one memory for the host.
    """
    budget = None if host is None else parse_bytes(host)
    limit = memory_limit_bytes()
    if budget is not None and budget > limit:
        raise UserError(
            f"--host-memory {format_bytes(budget)} is more than this machine lets a process have, "
            f"{format_bytes(limit)}. Give less, or leave it out to use what is free."
        )
    if budget is None:
        available = memory_available_bytes()
        budget = available - max(available // 5, min(available // 3, _PROCESS_BYTES))
    host_limit = budget // ranks_per_node
    free = device.memory_limit()
    device_limit = free if device_memory is None else parse_bytes(device_memory)
    if device_limit is not None and free is not None:
        device_limit = min(device_limit, free)
    if device.is_integrated and device_limit is not None:
        return budgets_of_one_memory(host_limit, device_limit, device_memory is not None)
    # What shares the host's memory is a part of its budget: the planner counts it there as well.
    return host_limit, host_limit if device_limit is None else device_limit


def budgets_of_one_memory(total: int, device_limit: int, is_requested: bool) -> tuple[int, int]:
    """Return the budgets of host and device that allocate from ``total`` bytes of one memory.

    The device gets its limit if the user has requested that, and else at most half.
    """
    device_bytes = device_limit if is_requested else min(device_limit, total // 2)
    if device_bytes >= total:
        raise UserError(
            f"--device-memory {format_bytes(device_bytes)} leaves nothing for the host of {format_bytes(total)}, "
            "--host-memory, which this GPU shares: give less."
        )
    return total - device_bytes, device_bytes


def open_device(name: str | torch.device) -> Device:
    """Open the device called ``"auto"`` (the first GPU, else the CPU), ``"cpu"`` or ``"cuda:0"``.

    Raises:
        UserError: there is no such device.
    """
    try:
        device = torch.device(torch_name(pick_gpu("auto")) if name == "auto" else name)
    except RuntimeError:
        raise UserError(f"{name!r} is not a device. It is auto, cpu or cuda:0.") from None
    if device.type == "cpu":
        return Device()
    why = obstacle() if device.type == "cuda" else "the engine computes on a CPU or an NVIDIA GPU"
    if why is None and (device.index or 0) >= torch.cuda.device_count():
        why = f"PyTorch sees {torch.cuda.device_count()}, from cuda:0 on"
    if why is not None:
        raise UserError(f"There is no device {device} here: {why}. device='cpu' works everywhere.")
    check_kernels(device)
    return CudaDevice(device.index or 0)


def check_kernels(device: torch.device) -> None:
    """Run a kernel, which a PyTorch that was not built for this GPU has not.

    Raises:
        UserError: it did not run.
    """
    try:
        torch.ones(1, device=device).add_(1).item()
    except RuntimeError as error:
        built = " ".join(torch.cuda.get_arch_list())
        name = torch.cuda.get_device_name(device)
        raise UserError(
            f"{name} runs no kernel of this PyTorch {torch.__version__} ({on_one_line(error)}; built for {built}): "
            "install a build for it, or use device='cpu'."
        ) from error


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Let PyTorch take deterministic kernels only, and raise an error where there is none.

    Attention's backward pass adds with atomics on CUDA by default; with this it does not. cuBLAS reads
    its setting when CUDA starts, so this comes before. Not run on a GPU yet.
    """
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    memory: Any = deterministic
    filled = memory.fill_uninitialized_memory
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # It would fill the buffers of each block again; what is uninitialized here is never read.
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled
