"""How fast a machine does each kind of work: alone, and beside other work that shares its processor cores."""

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fuyou.layout.visits import Phase
from fuyou.schedule.tasks import ComputeTask, Resource


@dataclass(frozen=True)
class Contention:
    """Speeds of work beside other work, as fractions of its speed alone.

    Adam and I/O always run on the host's cores. Where the CPU is the device, computing and copying do, too.
    """

    # Measured speeds, by the two or more resources that work at the same time. A combination that was not measured is
    # put together from the largest measured part of it, times the speeds in pairs with each of the others; a pair that
    # was not measured counts as full speed.
    speeds: dict[frozenset[Resource], dict[Resource, float]] = field(default_factory=dict)

    def speed(self, resource: Resource, running: Collection[Resource]) -> float:
        """Return the speed of ``resource`` while all of ``running`` work, itself included."""
        running = frozenset(running)
        if running not in self._known:
            self._known[running] = {one: self._speed(one, running) for one in running}
        return self._known[running][resource]

    @cached_property
    def _known(self) -> dict[frozenset[Resource], dict[Resource, float]]:
        return {}

    def _speed(self, resource: Resource, running: frozenset[Resource]) -> float:
        if running in self.speeds:
            return self.speeds[running][resource]
        parts = (measured for measured in self.speeds if resource in measured and measured < running)
        largest: frozenset[Resource] = max(parts, key=len, default=frozenset())
        speed = self.speeds[largest][resource] if largest else 1.0
        for other in running - largest - {resource}:
            speed *= self.speeds.get(frozenset({resource, other}), {}).get(resource, 1.0)
        return speed

    def to_list(self) -> list[dict[str, float]]:
        """Return the speeds as JSON: one object per combination."""
        return [{one.value: speed for one, speed in speeds.items()} for speeds in self.speeds.values()]

    @staticmethod
    def from_list(content: Any) -> "Contention":
        """Return the speeds that :meth:`to_list` described.

        Raises:
            ValueError: ``content`` is something else.
        """
        try:
            measured = [{Resource(name): float(speed) for name, speed in one.items()} for one in content]
        except (AttributeError, TypeError) as error:
            raise ValueError(f"not speeds beside other work: {error}") from error
        if not all(0 < speed < 100 for one in measured for speed in one.values()):
            raise ValueError(f"not speeds beside other work: {content}")
        return Contention({frozenset(one): one for one in measured})


@dataclass(frozen=True)
class TaskRates:
    """Rates of a machine, in the units in which tasks count their work."""

    flops_per_second: float  # FLOPs per second of the device, on blocks of the model
    upload_bytes_per_second: float  # Bytes per second from host to device
    download_bytes_per_second: float  # Bytes per second from device to host, at the same time
    read_bytes_per_second: float  # Bytes per second from all SSDs together, reading only
    # Bytes per second to all SSDs together, writing only; mixed traffic takes the sum of both times.
    write_bytes_per_second: float
    adam_parameters_per_second: float
    commit_seconds: float = 0.005  # Seconds for `fdatasync` and the manifest
    # Seconds per token in phases outside the blocks, where they were measured; others take their FLOPs' time.
    non_block_seconds: tuple[tuple[Phase, float], ...] = ()
    # Seconds at the end of each block's backward visit, for its gradient's part of the norm.
    finish_seconds: float = 0.0
    intra_node_bytes_per_second: float = float("inf")  # Bytes per second from one rank of a node to the others
    # Bytes per second from one rank to other nodes, while the other ranks of its node send as well.
    inter_node_bytes_per_second: float = float("inf")
    message_seconds: float = 0.0  # Seconds that every exchange between ranks takes beside its bytes
    # Whether one exchange between ranks at a time is under way, in the order of the list, as on GPUs (NCCL).
    exchanges_in_one_order: bool = False
    # Seconds per token by which a block's forward pass takes longer if it saves outputs of its operators.
    saving_seconds_per_token: float = 0.0
    # FLOPs per second of the device, on blocks in the backward pass; None: as in the forward pass.
    backward_flops_per_second: float | None = None
    contention: Contention | None = None  # Slowdown of work beside other work; None: there is none

    def compute_seconds(self, task: ComputeTask) -> float:
        """Return how long a compute task takes."""
        for phase, seconds in self.non_block_seconds:
            if phase is task.visit.phase:
                return seconds * task.tokens
        if task.visit.phase is not Phase.BLOCK_BACKWARD:
            saving = 0.0 if task.kept is None else self.saving_seconds_per_token * task.tokens
            return task.flops / self.flops_per_second + saving
        finishes = task.last and (task.visit.part is None or (task.gradient is not None and task.visit.completes))
        finish = self.finish_seconds if finishes else 0.0
        return task.flops / (self.backward_flops_per_second or self.flops_per_second) + finish
