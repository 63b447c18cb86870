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
from typing import Any

import torch

from common.errors import UserError
from common.store import IoThrottle
from common.units import format_bytes, parse_bytes
from fuyou.layout.visits import BEFORE_HEAD_PHASES, Phase
from fuyou.model.loss.router_loss import RouterPass
from fuyou.runtime.executor import Executor
from fuyou.schedule.tasks import ComputeTask, Op, Resource, StepList, Task

PREFIX = "emulated:"
_USAGE = (
    "Write it as emulated:tflops=165,memory=24GiB,link=25GB/s, and to slow the drives down as well, "
    "ssd_read=3GB/s,ssd_write=2GB/s (per directory); among several ranks, inside=20GB/s,across=1.2GB/s; for gradients "
    "to be clipped, norm=2."
)
_FIELDS = ("tflops", "memory", "link", "ssd_read", "ssd_write", "inside", "across", "norm")


@dataclass(frozen=True)
class EmulatedSpec:
    """Rates of the accelerator, of its link and (if they are to be slower than they are) of the drives."""

    flops_per_second: float
    memory_bytes: int
    link_bytes_per_second: float
    """Bytes per second to the device, and as many from it."""
    throttle: IoThrottle | None = None
    """Rates to which each directory's drive is slowed down; None leaves the drives as they are."""
    intra_node_bytes_per_second: float | None = None
    """Bytes per second from a rank to the others of its node, where there are several."""
    inter_node_bytes_per_second: float | None = None
    """Bytes per second from a node to the others, for one task of its ranks at a time."""
    norm: float = 0.0
    """Norm that every gradient is said to have, for clipping to strike."""

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
        intra_node, inter_node = (_rate(fields[name]) if name in fields else None for name in ("inside", "across"))
        spec = EmulatedSpec(
            tflops * 1e12, parse_bytes(fields["memory"]), _rate(fields["link"]), throttle, intra_node, inter_node, norm
        )
        rates = [rate for rate in (intra_node, inter_node) if rate is not None]
        if min(spec.flops_per_second, spec.memory_bytes, spec.link_bytes_per_second, *rates) <= 0:
            raise UserError(f"Every part of device {text!r} must be more than nothing.")
        return spec


def is_emulated(device: object) -> bool:
    """Return whether ``device`` names an accelerator that is only timed."""
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
    """Begin and end of a queued piece of work, on :func:`time.monotonic`'s clock."""

    started_at: float
    finished_at: float


_STREAMS = (Resource.HOST_TO_DEVICE, Resource.DEVICE_TO_HOST, Resource.INTRA_NODE, Resource.INTER_NODE)


class EmulatedDevice:
    """Queues work on streams whose clocks only count; :class:`.device.CudaDevice` is the real thing."""

    torch_device = torch.device("cpu")
    shares_host_memory = False
    page_locks = False
    computes = False
    in_one_order: frozenset[Op] = frozenset()
    flops_per_second: float | None
    exchange_rates: tuple[float, float] | None

    def __init__(self, spec: EmulatedSpec):
        self.spec, self.throttle, self.flops_per_second = spec, spec.throttle, spec.flops_per_second
        intra_node, inter_node = spec.intra_node_bytes_per_second, spec.inter_node_bytes_per_second
        self.exchange_rates = intra_node or float("inf"), inter_node or float("inf")
        self.name = (
            f"emulated accelerator ({spec.flops_per_second / 1e12:g} TFLOP/s, {format_bytes(spec.memory_bytes)}, link "
            f"{spec.link_bytes_per_second / 1e9:g} GB/s)"
        )
        self._free_at: dict[Resource, float] = {}  # one compute stream, one copy engine per direction
        self._waits: dict[Task, float] = {}

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return memory that has a size and no bytes."""
        return torch.empty(nbytes, dtype=torch.uint8, device="meta")

    def copy(self, task: Task, target: torch.Tensor, source: torch.Tensor) -> None:
        self._queue(task, source.numel() / self.spec.link_bytes_per_second)

    def read_buffer(self, task: Task, memory: torch.Tensor) -> Any:
        raise AssertionError("the engine refuses to read into memory that is no GPU's")

    def exchange(self, task: Task, work: Callable[[], None], meet: Callable[[], None]) -> None:
        """Meet the other ranks, then take the time that the bytes would take; buffers here have none."""
        meet()
        intra_node = task.op.resource is Resource.INTRA_NODE
        rate = self.spec.intra_node_bytes_per_second if intra_node else self.spec.inter_node_bytes_per_second
        assert rate is not None
        self._queue(task, task.nbytes / rate)

    def check_ranks(self, ranks_per_node: int, nodes: int) -> None:
        """See whether there is a rate for each level of ranks.

        Raises:
            UserError: there is none.
        """
        for level, ranks, rate in (
            ("inside", ranks_per_node, self.spec.intra_node_bytes_per_second),
            ("across", nodes, self.spec.inter_node_bytes_per_second),
        ):
            if ranks > 1 and rate is None:
                raise UserError(f"An emulated accelerator among several ranks needs a rate: add {level}=10GB/s.")

    def stand_in(self, executor: Executor, tasks: StepList, tokens: int, start_time: float) -> "TimedComputation":
        """Return a computation that only takes its time."""
        return TimedComputation(self, executor, tasks, tokens, start_time)

    def begin_compute(self, task: Task) -> None:
        """Queue the time that ``task`` would compute for."""
        self._queue(task, task.flops / self.spec.flops_per_second)

    def end_compute(self, task: Task) -> None:
        pass

    def wait_event(self, task: Task, event: object) -> None:
        assert isinstance(event, EmulatedEvent)
        if task.op is Op.COMPUTE or task.op.resource in _STREAMS:
            self._waits[task] = max(event.finished_at, self._waits.get(task, 0.0))
        else:
            sleep_until(event.finished_at)  # the CPU, or an SSD, is about to touch the bytes

    def has_finished(self, task: Task) -> bool:
        return task.event is None or task.event.finished_at <= time.monotonic()

    def interval(self, task: Task) -> tuple[float, float]:
        if task.event is None:
            return task.started_at, task.finished_at
        return task.event.started_at, task.event.finished_at

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
    """Stands in for ``StepComputation`` (fuyou/runtime/compute): launches compute tasks, which compute nothing.

    Args:
        device: whose clock they take.
        executor: runs all other tasks of the step.
        tasks: the step.
        tokens: in the whole batch.
        start_time: when the step began, on :func:`time.monotonic`'s clock.
    """

    def __init__(self, device: EmulatedDevice, executor: Executor, tasks: StepList, tokens: int, start_time: float):
        self.tasks, self.tokens, self.start_time = tasks, tokens, start_time
        self.loss = 0.0
        self.router: RouterPass | None = None
        self.recomputation_saved = 0.0
        self.complete = False
        self._device, self._executor = device, executor
        self._todo = deque(task for task in tasks.tasks if isinstance(task, ComputeTask))

    def forward(self) -> torch.Tensor:
        """Launch everything up to the head; return when it is done, as a GPU does whose loss is brought to the CPU."""
        for task in self._take(self.tasks.forward_phases):
            self._launch(task)
        self._device.synchronize()
        return torch.zeros(())

    def backward(self) -> None:
        """Launch the rest; return when it is launched."""
        while self._todo:
            self._launch(self._todo.popleft())
        self.complete = True

    def abandon(self) -> None:
        """Give up before the head, as :meth:`fuyou.runtime.compute.step_computation.StepComputation.abandon` does."""
        for task in self._take(BEFORE_HEAD_PHASES):
            self._executor.finish(task)

    def gradient_norm(self) -> float:
        """Return the norm that gradients are said to have, when the backward pass would be done."""
        self._device.synchronize()
        return self._device.spec.norm

    def _take(self, phases: Collection[Phase]) -> Iterator[Task]:
        """Yield the tasks that come next, as long as they belong to ``phases``."""
        while self._todo and self._todo[0].visit.phase in phases:
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
