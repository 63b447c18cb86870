"""An accelerator that is not there: computing and copying take the time they would take, storage and Adam are real.

There is seldom a GPU at hand, and a CPU that plays the device takes the cores that Adam and I/O need. With
``emulated:tflops=165,memory=24GiB,link=25GB/s`` block computation is a timed wait and copies are paced, while
scheduling, buffers, SSDs and the optimizer process are what they always are. It measures overlap and nothing else: no
loss, no gradient and no weight of such a run means anything, and none is ever exported.

Like a GPU it is asynchronous: work is queued on streams in no time, waits for events, and the host goes on.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch

from common.errors import UserError
from common.store import IoThrottle
from common.units import format_bytes, parse_bytes
from fuyou.layout.visits import BEFORE_HEAD_PHASES, FORWARD_PHASES, Phase
from fuyou.runtime.executor import Executor
from fuyou.schedule.tasks import Op, Resource, StepList, Task

PREFIX = "emulated:"
_USAGE = (
    "Write it as emulated:tflops=165,memory=24GiB,link=25GB/s, and to slow the drives down as well, "
    "ssd_read=3GB/s,ssd_write=2GB/s (per directory); among several ranks, inside=20GB/s,across=1.2GB/s; for gradients "
    "to be clipped, norm=2."
)
_FIELDS = ("tflops", "memory", "link", "ssd_read", "ssd_write", "inside", "across", "norm")


@dataclass(frozen=True)
class EmulatedSpec:
    """What the accelerator, its link and (if they are to be slower than they are) the drives can do."""

    flops_per_second: float
    memory_bytes: int
    link_bytes_per_second: float
    """To the device and from it, each."""
    throttle: IoThrottle | None = None
    """Of each directory's drive; None leaves the drives as they are."""
    inside_bytes_per_second: float | None = None
    """From a rank to the others of its node, where there are several ranks."""
    across_bytes_per_second: float | None = None
    """From a node to the others, shared by its ranks' tasks one at a time."""
    norm: float = 0.0
    """What every gradient's norm is said to be, for clipping to strike."""

    @staticmethod
    def parse(text: str) -> "EmulatedSpec":
        """Read ``"emulated:tflops=165,memory=24GiB,link=25GB/s"``.

        Raises:
            UserError: a part is missing, unknown or not a number.
        """
        fields: dict[str, str] = {}
        for part in text.removeprefix(PREFIX).split(","):
            name, equals, value = part.partition("=")
            if not equals or name.strip() not in _FIELDS:
                raise UserError(f"{part!r} in device {text!r} is not understood. {_USAGE}")
            fields[name.strip()] = value.strip()
        missing = [name for name in ("tflops", "memory", "link") if name not in fields]
        if missing or ("ssd_read" in fields) != ("ssd_write" in fields):
            raise UserError(f"Device {text!r} lacks {', '.join(missing) or 'one of the two SSD rates'}. {_USAGE}")
        tflops, norm = (_number(name, fields.get(name, "0"), text) for name in ("tflops", "norm"))
        throttle = IoThrottle(_rate(fields["ssd_read"]), _rate(fields["ssd_write"])) if "ssd_read" in fields else None
        inside, across = (_rate(fields[name]) if name in fields else None for name in ("inside", "across"))
        spec = EmulatedSpec(
            tflops * 1e12, parse_bytes(fields["memory"]), _rate(fields["link"]), throttle, inside, across, norm
        )  # fmt: skip
        rates = [rate for rate in (inside, across) if rate is not None]
        if min(spec.flops_per_second, spec.memory_bytes, spec.link_bytes_per_second, *rates) <= 0:
            raise UserError(f"Every part of device {text!r} must be more than nothing.")
        return spec


def is_emulated(device: object) -> bool:
    """Whether ``device`` names an accelerator that is only timed."""
    return isinstance(device, str) and device.startswith(PREFIX)


def _number(name: str, value: str, text: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise UserError(f"{name}={value} in device {text!r} is not a number. {_USAGE}") from None


def _rate(text: str) -> float:
    return float(parse_bytes(text.removesuffix("/s")))


@dataclass(frozen=True)
class EmulatedEvent:
    """When a queued piece of work begins and ends, on :func:`time.monotonic`'s clock."""

    began: float
    ended: float


_STREAMS = (Resource.HOST_TO_DEVICE, Resource.DEVICE_TO_HOST, Resource.INTRA_NODE, Resource.INTER_NODE)


class EmulatedDevice:
    """Queues work on streams whose clocks only count; :class:`fuyou.runtime.devices.CudaDevice` is the real thing."""

    torch_device = torch.device("cpu")
    shares_host_memory = False
    page_locks = False

    def __init__(self, spec: EmulatedSpec):
        self.spec = spec
        self.name = (
            f"emulated accelerator ({spec.flops_per_second / 1e12:g} TFLOP/s, {format_bytes(spec.memory_bytes)}, link "
            f"{spec.link_bytes_per_second / 1e9:g} GB/s)"
        )
        self._free_at: dict[Resource, float] = {}  # one compute stream, one copy engine per direction
        self._waits: dict[Task, float] = {}

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Memory that has a size and no bytes."""
        return torch.empty(nbytes, dtype=torch.uint8, device="meta")

    def copy(self, task: Task, target: torch.Tensor, source: torch.Tensor) -> None:
        self._queue(task, source.numel() / self.spec.link_bytes_per_second)

    def exchange(self, task: Task, work: Callable[[], None]) -> None:
        """Meet the other ranks, which ``work`` does, then take the time that the bytes would take."""
        work()
        inside = task.op.resource is Resource.INTRA_NODE
        rate = self.spec.inside_bytes_per_second if inside else self.spec.across_bytes_per_second
        assert rate is not None
        self._queue(task, task.nbytes / rate)

    def begin_compute(self, task: Task) -> None:
        """Queue the time that ``task`` would compute for."""
        self._queue(task, task.flops / self.spec.flops_per_second)

    def end_compute(self, task: Task) -> None:
        pass

    def wait_event(self, task: Task, event: object) -> None:
        assert isinstance(event, EmulatedEvent)
        if task.op is Op.COMPUTE or task.op.resource in _STREAMS:
            self._waits[task] = max(event.ended, self._waits.get(task, 0.0))
        else:
            sleep_until(event.ended)  # the CPU, or an SSD, is about to touch the bytes

    def ended(self, task: Task) -> bool:
        return task.event is None or task.event.ended <= time.monotonic()

    def interval(self, task: Task) -> tuple[float, float]:
        return (task.event.began, task.event.ended) if task.event is not None else (task.began, task.ended)

    def synchronize(self) -> None:
        """Wait for the compute stream."""
        sleep_until(self._free_at.get(Resource.GPU, 0.0))

    def release(self) -> None:
        pass

    def memory_limit(self) -> int | None:
        return self.spec.memory_bytes

    def cap_memory(self, nbytes: int) -> None:
        pass

    def peak_bytes(self) -> int | None:
        return None

    def _queue(self, task: Task, seconds: float) -> None:
        resource = task.op.resource
        began = max(time.monotonic(), self._free_at.get(resource, 0.0), self._waits.pop(task, 0.0))
        self._free_at[resource] = began + seconds
        task.event = EmulatedEvent(began, began + seconds)


class TimedComputation:
    """Stands in for :class:`fuyou.runtime.compute.StepComputation`: launches compute tasks, which compute nothing.

    Args:
        device: whose clock they take.
        executor: runs all other tasks of the step.
        tasks: the step.
        tokens: in the whole batch.
        began: when the step began, on :func:`time.monotonic`'s clock.
    """

    def __init__(self, device: EmulatedDevice, executor: Executor, tasks: StepList, tokens: int, began: float):
        self.tasks, self.tokens, self.began = tasks, tokens, began
        self.loss = 0.0
        self.router = None
        self.recomputation_saved = 0.0
        self.complete = False
        self._device, self._executor = device, executor
        self._todo = deque(task for task in tasks.tasks if task.op is Op.COMPUTE)

    def forward(self) -> torch.Tensor:
        """Everything up to the head; returns when it is done, as a loss that is brought to the CPU makes a GPU do."""
        for task in self._take(FORWARD_PHASES):
            self._launch(task)
        self._device.synchronize()
        return torch.zeros(())

    def backward(self) -> None:
        """The rest; returns when it is launched."""
        while self._todo:
            self._launch(self._todo.popleft())
        self.complete = True

    def abandon(self) -> None:
        """Give up before the head, as :meth:`fuyou.runtime.compute.StepComputation.abandon` does."""
        for task in self._take(BEFORE_HEAD_PHASES):
            self._executor.finish(task)

    def gradient_norm(self) -> float:
        """There is no gradient; but whoever asks waits for it."""
        self._device.synchronize()
        return self._device.spec.norm

    def _take(self, phases: Collection[Phase]) -> Iterator[Task]:
        """The tasks that come next, as long as they belong to ``phases``."""
        while self._todo and self._todo[0].visit is not None and self._todo[0].visit.phase in phases:
            yield self._todo.popleft()

    def _launch(self, task: Task) -> None:
        self._executor.start(task)
        self._device.begin_compute(task)
        self._device.end_compute(task)
        self._executor.finish(task)


def sleep_until(moment: float) -> None:
    """Return at ``moment`` on :func:`time.monotonic`'s clock."""
    remaining = moment - time.monotonic()
    if remaining > 0:
        time.sleep(remaining)
