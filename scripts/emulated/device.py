"""An accelerator that is not there: computing and copying take the time they would take, storage and Adam are real.

There is seldom a GPU at hand, and a CPU that plays the device takes the cores that Adam and I/O need. With
``emulated:tflops=165,memory=24GiB,link=25GB/s`` block computation is a timed wait and copies are paced, while
scheduling, buffers, SSDs and the optimizer process are what they always are. It measures overlap and nothing else: no
loss, no gradient and no weight of such a run means anything.

Like a GPU it is asynchronous: work is queued on streams in no time, waits for events, and the host continues.

Give engines ``device=emulated_device("emulated:tflops=165,memory=24GiB,link=25GB/s")`` and a ``dtype``.
"""

import functools
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from common.errors import UserError
from common.units import parse_bytes
from emulated.throttle import IoThrottle
from fuyou.config import EngineConfig
from fuyou.engine import opening
from fuyou.engine.steps import Steps
from fuyou.layout.model_layout import BEFORE_HEAD_PHASES, ModelLayout, Phase
from fuyou.model.loss.router_loss import RouterPass
from fuyou.planner.profiling import measure
from fuyou.runtime.compute.step_computation import StepComputation
from fuyou.runtime.data_plane.buffers import Buffers
from fuyou.runtime.data_plane.data_plane import DataPlane
from fuyou.runtime.data_plane.rank_handlers import RankHandlers
from fuyou.runtime.device import Device
from fuyou.runtime.executor import Executor
from fuyou.runtime.ranks import gather
from fuyou.schedule.tasks import ComputeTask, Op, Resource, StepList, Task

PREFIX = "emulated:"
_USAGE = (
    "Write it as emulated:tflops=165,memory=24GiB,link=25GB/s, and to slow the drives down as well, "
    "ssd_read=3GB/s,ssd_write=2GB/s (per directory), and further after some writes, ssd_cache=4GB,ssd_full=1GB/s; "
    "among several ranks, inside=20GB/s,across=1.2GB/s; for gradients to be clipped, norm=2."
)
_FIELDS = (
    "tflops", "memory", "link", "ssd_read", "ssd_write", "ssd_cache", "ssd_full", "inside", "across", "norm",
)  # fmt: skip


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
    norm: float = 1e-3
    """Norm that every gradient is reported to have: a run whose first one is 0 ends."""

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
            raise UserError(
                f"Device {text!r} lacks {', '.join(missing) or 'one of the two SSD rates'}. {_USAGE}"
            )
        tflops, norm = (_number(name, fields.get(name, "1e-3"), text) for name in ("tflops", "norm"))
        throttle = None
        if "ssd_read" in fields:
            cache = parse_bytes(fields["ssd_cache"]) if "ssd_cache" in fields else math.inf
            full = _rate(fields["ssd_full"]) if "ssd_full" in fields else math.inf
            throttle = IoThrottle(_rate(fields["ssd_read"]), _rate(fields["ssd_write"]), cache, full)
        intra_node, inter_node = (
            _rate(fields[name]) if name in fields else None for name in ("inside", "across")
        )
        spec = EmulatedSpec(
            tflops * 1e12,
            parse_bytes(fields["memory"]),
            _rate(fields["link"]),
            throttle,
            intra_node,
            inter_node,
            norm,
        )
        rates = [rate for rate in (intra_node, inter_node) if rate is not None]
        if min(spec.flops_per_second, spec.memory_bytes, spec.link_bytes_per_second, *rates) <= 0:
            raise UserError(f"Every part of device {text!r} must be more than nothing.")
        return spec


def emulated_device(text: str) -> "EmulatedDevice":
    """Return the accelerator that ``text`` describes, see :meth:`EmulatedSpec.parse`."""
    return EmulatedDevice(EmulatedSpec.parse(text))


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


class EmulatedDevice(Device):
    """Queues work on streams whose clocks only count; :class:`.device.CudaDevice` is the real thing."""

    shares_host_memory = False

    def __init__(self, spec: EmulatedSpec):
        install()
        self.spec = spec
        self.throttle = spec.throttle
        self.name = f"emulated accelerator ({spec})"
        self.plane: DataPlane | None = None
        """What moves the bytes of the newest run."""
        self._free_at: dict[Resource, float] = {}  # one compute stream, one copy engine per direction
        self._waits: dict[Task, float] = {}

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return memory that has a size and no bytes."""
        return torch.empty(nbytes, dtype=torch.uint8, device="meta")

    def copy(self, task: Task, target: torch.Tensor, source: torch.Tensor) -> None:
        self._queue(task, source.numel() / self.spec.link_bytes_per_second)

    def read_buffer(self, task: Task, memory: torch.Tensor) -> Any:
        raise AssertionError("the engine refuses to read into memory that is no GPU's")

    def exchange(self, task: Task, work: Callable[[], None]) -> None:
        """Meet the other ranks (:func:`install` makes ``work`` do that), then take the time that the bytes would."""
        work()
        intra_node = task.op.resource is Resource.INTRA_NODE
        rate = self.spec.intra_node_bytes_per_second if intra_node else self.spec.inter_node_bytes_per_second
        if rate is None:
            raise UserError(f"{self.name} among several ranks needs rates: add inside=10GB/s,across=1GB/s.")
        self._queue(task, task.nbytes / rate)

    def begin_compute(self, task: Task) -> None:
        """Queue the time that ``task`` would compute for."""
        self._queue(task, task.flops / self.spec.flops_per_second)

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

    def _queue(self, task: Task, seconds: float) -> None:
        resource = task.op.resource
        began = max(time.monotonic(), self._free_at.get(resource, 0.0), self._waits.pop(task, 0.0))
        self._free_at[resource] = began + seconds
        task.event = EmulatedEvent(began, began + seconds)


class TimedComputation:
    """Replaces ``StepComputation`` (fuyou/runtime/compute): launches compute tasks, which compute nothing.

    Args:
        device: whose clock they take.
        executor: runs all other tasks of the step.
        tasks: the step.
        tokens: in the whole batch.
        start_time: when the step began, on :func:`time.monotonic`'s clock.
    """

    def __init__(
        self, device: EmulatedDevice, executor: Executor, tasks: StepList, tokens: int, start_time: float
    ):
        self.tasks, self.tokens, self.start_time = tasks, tokens, start_time
        self.loss = self.share = 0.0
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
        """Return the norm that gradients are reported to have, when the backward pass would be done."""
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


@functools.cache
def install() -> None:
    """Let engines and profiles in this process time emulated devices instead of computing on them."""
    computation, norm, parts = Steps._computation, Steps._computed_norm, measure._parts
    prove, run = opening.prove_once, RankHandlers._run

    def timed_computation(
        steps: Steps, tasks: StepList, micro: list[dict[str, torch.Tensor]], labels: int, start_time: float,
        *passing: Any,
    ) -> StepComputation | TimedComputation:  # fmt: skip
        device, plane = steps._run.device, steps._run.runtime.plane
        if not isinstance(device, EmulatedDevice):
            return computation(steps, tasks, micro, labels, start_time, *passing)
        if device.plane is not plane:
            device.plane = plane
            _zero_gradients(plane.buffers)
        tokens = sum(each["input_ids"].numel() for each in micro)
        return TimedComputation(device, plane.executor, tasks, tokens, start_time)

    def timed_norm(steps: Steps, current: Any) -> float:
        return current.gradient_norm() if isinstance(current, TimedComputation) else norm(steps, current)

    def timed_parts(stack: Any, layout: ModelLayout, device: Device, workload: Any) -> dict[str, Any]:
        if isinstance(device, EmulatedDevice):
            return _parts_of(layout, device.spec.flops_per_second, workload.rows * workload.seq_len)
        return parts(stack, layout, device, workload)

    def prove_unless_timed(config: EngineConfig, *arguments: Any, **options: Any) -> None:
        if not isinstance(config.device, EmulatedDevice):
            prove(config, *arguments, **options)

    def meet(handlers: RankHandlers, task: Task, group: Any, work: Callable[[Any], None]) -> None:
        if isinstance(handlers._buffers.device, EmulatedDevice):  # whose buffers have no bytes
            run(handlers, task, group, lambda group: gather(torch.empty(group.size(), 1), group))
        else:
            run(handlers, task, group, work)

    for owner, name, function in (
        (Steps, "_computation", timed_computation),
        (Steps, "_computed_norm", timed_norm),
        (measure, "_parts", timed_parts),
        (opening, "prove_once", prove_unless_timed),
        (RankHandlers, "_run", meet),
    ):
        setattr(owner, name, function)


def _zero_gradients(buffers: Buffers) -> None:
    """Clear what the store's making left in host gradients, which nothing overwrites here: low bits of weights, read as
    gradients, are full of denormal numbers, which make Adam five times slower."""
    for region in buffers.shared.gradients.values():
        buffers.host.bytes(region.start(0), region.nbytes)[:] = 0


def _parts_of(layout: ModelLayout, flops_per_second: float, tokens: int) -> dict[str, Any]:
    """Return the times of a device that computes the FLOPs which tasks count."""
    block = layout.active_parameters(layout.largest_block) * tokens / flops_per_second
    head = layout.records[layout.head].parameter_count * tokens / flops_per_second
    return {
        "measured_tokens": tokens, "matmul_flops_per_second": flops_per_second, "embed_forward_seconds": 0.0,
        "block_forward_seconds": 2 * block, "block_backward_seconds": 6 * block, "block_finish_seconds": 0.0,
        "head_seconds": 6 * head, "head_forward_seconds": 2 * head, "embed_backward_seconds": 0.0,
    }  # fmt: skip
