"""Rates of a machine: for the simulator, and as measured in a profile."""

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

from fuyou.layout.model_layout import Phase
from fuyou.schedule.tasks import ComputeTask, Resource


@dataclass(frozen=True)
class Contention:
    """Speeds of work next to other work, as fractions of the speed alone.

    Adam and I/O always run on the host's cores; on a CPU device, so do computing and copies.
    """

    # Measured speeds, by the two or more resources that work at the same time. Work that was not measured next to other
    # work (copies) neither slows that down nor is slowed.
    speeds: dict[frozenset[Resource], dict[Resource, float]] = field(default_factory=dict)

    def speed(self, resource: Resource, running: Collection[Resource]) -> float:
        """Return the speed of ``resource`` while all of ``running``, including itself, work."""
        return self.speeds.get(self._measured.intersection(running), {}).get(resource, 1.0)

    @cached_property
    def _measured(self) -> frozenset[Resource]:
        return frozenset().union(*self.speeds)

    def to_list(self) -> list[dict[str, float]]:
        """Return the speeds as JSON: one object per combination."""
        return [{resource.value: speed for resource, speed in speeds.items()} for speeds in self.speeds.values()]

    @staticmethod
    def from_list(content: Any) -> "Contention":
        """Return the speeds of :meth:`to_list`.

        Raises:
            ValueError: if ``content`` is something else.
        """
        try:
            measured = [{Resource(name): float(speed) for name, speed in entry.items()} for entry in content]
        except (AttributeError, TypeError) as error:
            raise ValueError(f"not speeds next to other work: {error}") from error
        if not all(0 < speed < 100 for entry in measured for speed in entry.values()):
            raise ValueError(f"not speeds next to other work: {content}")
        return Contention({frozenset(entry): entry for entry in measured})


@dataclass(frozen=True)
class TaskRates:
    """Rates of a machine, in the units in which tasks count their work."""

    flops_per_second: float  # FLOPs per second of the device, on blocks of the model
    upload_bytes_per_second: float  # Bytes per second from host to device
    download_bytes_per_second: float  # Bytes per second from device to host, at the same time
    read_bytes_per_second: float  # Bytes per second from all SSDs together, reading only
    write_bytes_per_second: float  # To all SSDs, writing only; mixed traffic takes the sum of both times
    adam_parameters_per_second: float
    commit_seconds: float = 0.005  # Seconds for `fdatasync` and the manifest
    non_block_seconds: tuple[tuple[Phase, float], ...] = ()  # Measured seconds per token, outside blocks
    finish_seconds: float = 0.0  # Seconds per block's backward visit for its gradient's norm
    intra_node_bytes_per_second: float = float("inf")  # Bytes per second from one rank of a node to the others
    inter_node_bytes_per_second: float = float("inf")  # From one rank to other nodes, while all send
    message_seconds: float = 0.0  # Seconds that every exchange between ranks takes besides its bytes
    exchanges_in_one_order: bool = False  # Whether exchanges run one at a time, in order (NCCL)
    saving_seconds_per_token: float = 0.0  # Extra seconds of a block that saves outputs
    backward_flops_per_second: float | None = None  # On blocks; None: as in the forward pass
    contention: Contention | None = None  # Slowdown of work next to other work, if any

    def compute_seconds(self, task: ComputeTask) -> float:
        for phase, seconds in self.non_block_seconds:
            if phase is task.visit.phase:
                return seconds * task.tokens
        if task.visit.phase is not Phase.BLOCK_BACKWARD:
            saving = 0.0 if task.kept is None else self.saving_seconds_per_token * task.tokens
            return task.flops / self.flops_per_second + saving
        finishes = task.last and (task.visit.part is None or (task.gradient is not None and task.visit.completes))
        finish = self.finish_seconds if finishes else 0.0
        return task.flops / (self.backward_flops_per_second or self.flops_per_second) + finish


FORMAT = 7  # Version of the JSON: profiles of another one are not read, but measured again


class OperatorTime(NamedTuple):
    """One call of an operator in a block's forward pass."""

    name: str  # Such as `aten.addmm.default`
    ordinal: int  # Number of the call among this operator's calls in the block, from 0
    seconds: float


@dataclass(frozen=True)
class Profile:
    """Rates and times of one machine with one model and one micro-batch."""

    device: str  # Name of the device that computes
    tokens: int  # Tokens in a micro-batch
    # Seconds of one micro-batch, part by part, as in the engine's tasks.
    measured_tokens: int  # Tokens that were run; times are scaled up to a whole micro-batch
    matmul_flops_per_second: float  # FLOPs per second of matrix products with the shapes of the block's parameters
    embed_forward_seconds: float
    block_forward_seconds: float
    block_backward_seconds: float  # Seconds with the forward pass computed again, as far as it is needed
    kept_forward_seconds: float  # Seconds of a block that saves all useful outputs; 0 if none
    kept_backward_seconds: float
    kept_bytes: int  # Bytes of these outputs
    block_finish_seconds: float  # Seconds for squaring a block's gradient, once per visit
    head_seconds: float  # Seconds of forward and backward pass
    head_forward_seconds: float
    embed_backward_seconds: float
    operators: tuple[OperatorTime, ...]  # Operators of the block's forward pass, in order
    block_parameters: float  # Parameters of a block that one token uses: of routed experts those that it visits
    upload_bytes_per_second: float  # Bytes per second from host to device while both directions are busy
    download_bytes_per_second: float

    read_bytes_per_second: float  # Bytes per second from all SSDs together, through the store, reading only
    write_bytes_per_second: float  # Past the drives' fast caches
    burst_write_bytes_per_second: float  # At first, while the fast caches have room
    commit_seconds: float  # Seconds for `fdatasync` and manifest

    adam_parameters_per_second: float  # Parameters per second that the optimizer process updates alone
    adam_threads: int
    contention: Contention  # Slowdown of work on the same cores, and of Adam and drives by each other

    measured_at: float  # Time of the measurement, in seconds since the epoch
    measured_in_seconds: float

    def rates(self, recomputed: float = 1.0) -> TaskRates:
        """Return the rates for the simulator.

        Args:
            recomputed: fraction of a block's forward FLOPs that the measured backward pass computed again.
        """
        flops = 2.0 * self.block_parameters * self.tokens
        return TaskRates(
            flops_per_second=flops / self.block_forward_seconds,
            backward_flops_per_second=(2 + recomputed) * flops / self.block_backward_seconds,
            upload_bytes_per_second=self.upload_bytes_per_second,
            download_bytes_per_second=self.download_bytes_per_second,
            read_bytes_per_second=self.read_bytes_per_second,
            write_bytes_per_second=self.write_bytes_per_second,
            adam_parameters_per_second=self.adam_parameters_per_second,
            commit_seconds=self.commit_seconds,
            non_block_seconds=(
                (Phase.EMBED_FORWARD, self.embed_forward_seconds / self.tokens),
                (Phase.HEAD, self.head_seconds / self.tokens),
                (Phase.HEAD_EVAL, self.head_forward_seconds / self.tokens),
                (Phase.EMBED_BACKWARD, self.embed_backward_seconds / self.tokens),
            ),
            finish_seconds=self.block_finish_seconds,
            contention=self.contention,
        )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(replace(self, contention=Contention())), "contention": self.contention.to_list()}

    @staticmethod
    def from_dict(content: dict[str, Any]) -> "Profile":
        """Return the profile of :meth:`to_dict`.

        Raises:
            ValueError: if ``content`` is not a profile.
        """
        try:
            operators = tuple(
                OperatorTime(str(name), int(number), float(seconds)) for name, number, seconds in content["operators"]
            )
            contention = Contention.from_list(content["contention"])
            profile = Profile(**{**content, "operators": operators, "contention": contention})
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"not a profile: {error}") from error
        numbers = {field.name: getattr(profile, field.name) for field in fields(profile) if field.type in (int, float)}
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise ValueError(f"not a profile: {name} is {value!r}")
        for name in [name for name in numbers if name.endswith("_per_second")] + ["tokens", "block_parameters"]:
            if not numbers[name]:
                raise ValueError(f"not a profile: {name} is 0")
        return profile
