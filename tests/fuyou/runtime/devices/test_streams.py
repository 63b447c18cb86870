"""Which CUDA stream computes, with stand-ins for CUDA's functions."""

import threading
from typing import Any

import pytest
import torch

from fuyou.runtime.devices.device import CudaDevice
from fuyou.schedule.tasks import Op


class Stream:
    def __init__(self, *_: Any) -> None:
        self.waited: list[Any] = []

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
