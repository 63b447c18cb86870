"""A processor that plays a GPU: what is launched is only queued, and done later, by other threads.

What must hold for the numbers to be right on a GPU, and need not on a CPU, thereby decides about them on a CPU, too:
*Computing* is queued on its own stream, and the thread that launches it continues to the next task at once. *Copies*
are queued on a stream for each lane, end in any order among the lanes, and late. Streams wait for nothing but events
that they have to wait for. Copies between device and host move contiguous bytes, from and to memory that is
page-locked: for anything else CUDA would take temporaries, and wait. *Device memory* can be made unreadable
(``mprotect``) while no stream runs: what on the host touches it dies.
"""

import contextlib
import ctypes
import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

import fuyou.engine.opening
from common.store import checksums
from fuyou.runtime.compute.step_computation import StepComputation
from fuyou.runtime.device import Device
from fuyou.schedule.tasks import ComputeTask, Op, Task
from tests.helpers import kvikio
from tests.helpers.cudart import FakeCuda

_COPIES = (Op.PARAMETER_UPLOAD, Op.GRADIENT_DOWNLOAD, Op.ACTIVATION_UPLOAD, Op.ACTIVATION_DOWNLOAD)
_NOBODY, _EVERYBODY = 0, 3  # PROT_NONE; PROT_READ | PROT_WRITE


class QueuedDevice(Device):
    """Queues copies, and with :meth:`install` computing.

    Args:
        protects: whether its memory is unreadable while no stream runs.
        deaf: a stream that waits for no event, to show that it would be noticed: it works at once, all others late.
    """

    def __init__(self, protects: bool = True, deaf: Op | None = None) -> None:
        super().__init__()
        self._streams = {op: ThreadPoolExecutor(1) for op in (*_COPIES, Op.COMPUTE)}
        self._waits: dict[Op, list[Future]] = defaultdict(list)
        self._dice, self._deaf = random.Random(5), deaf
        self._protects, self._open_count, self._lock = protects, 0, threading.Lock()
        self._mappings: list[tuple[int, int]] = []
        self.cudart: FakeCuda | None = None
        self.pageable = False
        """Whether some host memory could not be page-locked, so that copies of it are allowed."""
        self.past_host: list[Task] = []
        """Tasks that have read from the drives into its memory."""

    def install(self, monkeypatch: pytest.MonkeyPatch) -> "QueuedDevice":
        """Have engines use this device, and queue what they compute."""
        device, run_at_once = self, StepComputation._run

        def run(computation: Any, task: ComputeTask) -> None:
            if computation._buffers.device is not device:  # the proof before a run has no device
                run_at_once(computation, task)
                return
            computation._plane.executor.start(task)
            device._launch(task, lambda: computation._compute(task))
            computation._plane.executor.finish(task)

        run_all = StepComputation._run_all

        def run_all_and_synchronize(computation: Any, phases: Any) -> None:
            run_all(computation, phases)
            device._streams[Op.COMPUTE].submit(int).result()  # a loss, or a norm, is about to be read

        self.cudart, self.page_locks = FakeCuda().install(monkeypatch), True
        copy = torch.Tensor.copy_

        def strictly_copied(
            target: torch.Tensor, source: torch.Tensor, *options: Any, **named: Any
        ) -> torch.Tensor:
            # Elsewhere, tensors of the host stand for what computing makes on the device: only the engine's own count.
            if any(self.cudart.holds(one.data_ptr(), one.nbytes) for one in (target, source) if one.numel()):
                device.check_copy(target, source)
            return copy(target, source, *options, **named)

        monkeypatch.setattr(torch.Tensor, "copy_", strictly_copied)
        for module in ("fuyou.engine.opening", "cli.job.machine"):
            if module in sys.modules:
                monkeypatch.setattr(f"{module}.open_device", lambda name: device)
        monkeypatch.setattr(StepComputation, "_run", run)
        monkeypatch.setattr(StepComputation, "_run_all", run_all_and_synchronize)
        return self

    def install_kvikio(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have kvikio's stand-in fill this device's memory."""
        kvikio.install(monkeypatch, self.opened)
        hashes = checksums._device_hashes

        def hashes_by_the_device(pages: torch.Tensor) -> Any:
            with self.opened():
                return hashes(pages)

        monkeypatch.setattr(checksums, "_device_hashes", hashes_by_the_device)
        monkeypatch.setattr(fuyou.engine.opening, "check_io", lambda config, device: None)

    def check_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Refuse what CUDA would copy by way of temporaries, or from and to pageable memory."""
        on_device = [self._holds(tensor) for tensor in (target, source)]
        if any(on_device):
            for tensor, here in zip((target, source), on_device, strict=True):
                assert tensor.is_contiguous(), "a copy of memory that is not contiguous"
                registered = self.cudart is None or self.cudart.holds(tensor.data_ptr(), tensor.nbytes)
                assert here or registered or self.pageable, "a copy of host memory that is not page-locked"
            assert target.dtype == source.dtype, "a copy from one dtype to another"

    def _holds(self, tensor: torch.Tensor) -> bool:
        with self._lock:
            return any(start <= tensor.data_ptr() < start + nbytes for start, nbytes in self._mappings)

    def allocate(self, nbytes: int) -> torch.Tensor:
        made = super().allocate(nbytes)
        with self._lock:
            self._mappings.append((made.data_ptr(), self._buffers[-1].nbytes))
            self._protect(_EVERYBODY if self._open_count else _NOBODY, self._mappings[-1:])
        return made

    def copy(self, task: Task, target: torch.Tensor, source: torch.Tensor) -> None:
        self.check_copy(target, source)
        self._launch(task, lambda: target.copy_(source))

    def read_buffer(self, task: Task, memory: torch.Tensor) -> torch.Tensor:
        self.past_host.append(task)
        return kvikio.on_device(memory)

    def wait_event(self, task: Task, event: Any) -> None:
        if task.op is self._deaf:
            return
        if task.op in self._streams:
            self._waits[task.op].append(event)  # the stream waits, not the thread
        else:
            event.result()

    def synchronize(self) -> None:
        for stream in self._streams.values():
            stream.submit(int).result()

    def release(self) -> None:
        with self._lock:
            self._protect(_EVERYBODY, self._mappings)
            self._mappings.clear()
        super().release()

    def _launch(self, task: Task, work: Callable[[], object]) -> None:
        waits, self._waits[task.op] = self._waits[task.op], []
        late = self._dice.random() * 0.004 if self._deaf is None else (task.op is not self._deaf) * 0.04
        task.event = self._streams[task.op].submit(self._run, waits, late, work)

    def _run(self, waits: list[Future], seconds: float, work: Callable[[], object]) -> None:
        for event in waits:
            event.result()
        time.sleep(seconds)
        with self.opened():
            work()

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Let device memory be read and written, as kernels and copy engines do."""
        with self._lock:
            self._open_count += 1
            if self._open_count == 1:
                self._protect(_EVERYBODY, self._mappings)
        try:
            yield
        finally:
            with self._lock:
                self._open_count -= 1
                if not self._open_count:
                    self._protect(_NOBODY, self._mappings)

    def _protect(self, access: int, mappings: list[tuple[int, int]]) -> None:
        for address, nbytes in mappings if self._protects else ():
            if ctypes.CDLL(None, use_errno=True).mprotect(
                ctypes.c_void_p(address), ctypes.c_size_t(nbytes), access
            ):
                raise OSError(ctypes.get_errno(), "mprotect")
