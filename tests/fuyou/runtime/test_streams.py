"""Which CUDA stream computes, with stand-ins for CUDA's functions."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from common.store import Layout, Store
from fuyou.runtime.device import CudaDevice
from fuyou.schedule.tasks import Op
from tests.helpers import kvikio


class Stream:
    def __init__(self, *_: Any) -> None:
        self.waited: list[Any] = []
        self.is_busy = False

    def wait_stream(self, other: "Stream") -> None:
        self.waited.append(other)

    def wait_event(self, event: Any) -> None:
        self.waited.append(event)


class Event:
    def __init__(self, **_: Any) -> None:
        self.stream: Any = None

    def record(self, stream: Any = None) -> None:
        self.stream = stream

    def synchronize(self) -> None: ...


class Work:
    op, event = Op.COMPUTE, None


DEFAULT = Stream()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stand-ins: every thread computes in the default stream until it chooses another."""
    chosen = threading.local()
    for name, value in {
        "Stream": Stream,
        "Event": Event,
        "set_device": lambda device: None,
        "get_device_name": lambda index: "stand-in",
        "get_device_properties": lambda index: SimpleNamespace(is_integrated=False),
        "reset_peak_memory_stats": lambda device: None,
        "current_stream": lambda device=None: getattr(chosen, "stream", DEFAULT),
        "set_stream": lambda stream: setattr(chosen, "stream", stream),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return torch.cuda


def test_nothing_computes_in_the_default_stream(cuda: Any) -> None:
    device, task = CudaDevice(0), Work()
    computing = cuda.current_stream()
    assert computing is not DEFAULT and DEFAULT in computing.waited
    entered: list[Any] = []

    def compute() -> None:  # in a thread that has not opened the device
        device.begin_compute(task)  # type: ignore[arg-type]
        entered.append(cuda.current_stream())
        device.end_compute(task)  # type: ignore[arg-type]

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert entered == [computing] and task.event is not None and task.event.stream is computing
    event = Event()
    device.wait_event(task, event)  # type: ignore[arg-type]
    assert event in computing.waited


def test_a_lane_waits_with_the_engines_gpu_current(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread's current device is GPU 0: waiting there would make a context on it."""
    entered: list[torch.device] = []

    @contextlib.contextmanager
    def current(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield
        entered.pop()

    class OnItsDevice(Event):
        def synchronize(self) -> None:
            assert entered == [torch.device("cuda", 1)]

    monkeypatch.setattr(torch.cuda, "device", current)
    device, task = CudaDevice(1), Work()
    task.op = Op.PARAMETER_WRITE
    device.wait_event(task, OnItsDevice())  # type: ignore[arg-type]


def test_a_read_past_the_host_ends_while_computing_is_queued(
    cuda: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kvikio copies in blocking streams: they wait for all that is queued in the default stream."""

    @contextlib.contextmanager
    def in_a_blocking_stream() -> Iterator[None]:
        if DEFAULT.is_busy:
            raise TimeoutError("the default stream is still computing")
        yield

    kvikio.install(monkeypatch, in_a_blocking_stream)
    layout = Layout(1)
    extent = layout.allocate("weights.0", 8192)
    device, task, back = CudaDevice(0), Work(), torch.zeros(8192, dtype=torch.uint8)
    with Store.create([tmp_path], layout, io="kvikio") as store:
        store.write(extent, np.full(8192, 7, np.uint8)).result()
        device.begin_compute(task)  # type: ignore[arg-type]
        cuda.current_stream().is_busy = True
        store.read_unchecked(extent, kvikio.on_device(back)).result()
        assert bool((back == 7).all())
        cuda.set_stream(DEFAULT)
        monkeypatch.setattr(cuda.current_stream(), "is_busy", True)
        with pytest.raises(TimeoutError):
            store.read_unchecked(extent, kvikio.on_device(back)).result()
