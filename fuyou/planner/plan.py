"""A plan: one way of running a job on a machine, its memory, traffic, and speed, and what bounds it."""

from dataclasses import asdict, dataclass, field
from typing import Any

from fuyou.layout.record import Kind
from fuyou.layout.record_parts import ADAMW
from fuyou.model.recompute.policy import ActivationPolicy
from fuyou.optimizer.clipping import ClipBy
from fuyou.planner.machine import Machine
from fuyou.planner.training_job import TrainingJob
from fuyou.schedule.memory_plan import MemoryPlan
from fuyou.schedule.tasks import Resource

SAVE_NOTHING = ActivationPolicy((), 0)


@dataclass(frozen=True)
class Candidate:
    """One way of running a step."""

    micro_rows: int | None = None  # Sequences in a micro-batch; None takes what the memory plan prefers
    deferred_fraction: float = 0.0
    activation_policy: ActivationPolicy = SAVE_NOTHING
    clip_by: ClipBy = ClipBy.DEFERRAL  # Way in which gradients are clipped, if they are


@dataclass(frozen=True)
class Point:
    """A schedule on the frontier of time and bytes written."""

    step_seconds: float
    written_bytes: int  # Bytes written to SSD per step and rank
    chosen: bool


@dataclass(frozen=True)
class Plan:
    """Plan of a run: its memory, traffic, and speed; if it does not fit, what is missing."""

    job: TrainingJob
    machine: Machine
    candidate: Candidate = Candidate()
    missing: tuple[str, ...] = ()  # Sentences that say what the machine lacks; none if the run fits
    memory: MemoryPlan | None = None
    step_seconds: float = 0.0  # Average over all steps; what follows is for one that is not clipped
    # Means over the steps from one commit to the next: seconds of work by resource, and bytes per rank.
    busy: dict[Resource, float] = field(default_factory=dict)
    read_bytes: int = 0  # Bytes read from SSD
    written_bytes: int = 0  # Bytes written to SSD
    sent_bytes: int = 0  # Bytes sent to other nodes
    clipped_seconds: float | None = None  # Seconds of a clipped step that updates twice
    # Seconds of work of the updates of one step: what deferring some of them could move
    update_seconds: float = 0.0
    saved_flops: float = 0.0  # FLOPs that a step leaves out of the recomputation of all blocks
    saved_activation_bytes: int = 0  # Bytes of saved activations of one step, beyond the blocks' inputs
    ssd_bytes: int = 0
    frontier: tuple[Point, ...] = ()  # Schedules that none beats in time and bytes written, fastest first

    @property
    def start_bytes(self) -> int:
        """Return the bytes that a new run writes to SSD before its first step."""
        return sum(record.first_nbytes for record in self.job.layout.records)

    @property
    def start_seconds(self) -> float:
        """Return the seconds that writing them takes; a checkpoint on a slower drive takes longer to read."""
        return self.start_bytes / self.machine.rates.write_bytes_per_second

    @property
    def fits(self) -> bool:
        return not self.missing

    @property
    def bound(self) -> Resource:
        return max(self.busy, key=lambda resource: self.busy[resource])

    @property
    def bound_seconds(self) -> float:
        """Return the lower bound of the step's seconds under any schedule."""
        return max(self.busy.values())

    @property
    def clip_by(self) -> ClipBy | None:
        """Return the way in which gradients are clipped; None without clipping."""
        return self.candidate.clip_by if self.job.clips else None

    @property
    def deferred_fraction(self) -> float:
        """Return the fraction of the blocks with deferred updates; clipping by deferral defers all."""
        return 1.0 if self.clip_by is ClipBy.DEFERRAL else self.candidate.deferred_fraction

    @property
    def device_peak_bytes(self) -> int:
        return self.memory.device_bytes if self.memory else 0

    @property
    def host_peak_bytes(self) -> int:
        return self.memory.host_bytes if self.memory else 0

    @property
    def tokens_per_second(self) -> float:
        return self.job.tokens / self.step_seconds

    @property
    def flops_per_second(self) -> float:
        """Return FLOPs per second without recomputation."""
        return self.tokens_per_second * self.job.model_flops_per_token

    @property
    def hardware_flops_per_second(self) -> float:
        """Return FLOPs per second including recomputation."""
        done = self.job.tokens * self.job.hardware_flops_per_token - self.saved_flops
        return done / self.step_seconds

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Return what was assumed without a measurement, of the machine and of how the model runs on it."""
        if self.machine.profile is not None:
            return self.machine.assumptions
        slots = [slot for record in self.job.layout.records for slot in record.parameters]
        assumed = list(self.machine.assumptions)
        if any(slot.activity < 1 for slot in slots):
            assumed.append("tokens are spread evenly over experts")
        if any(record.decoded_nbytes for record in self.job.layout.records):
            assumed.append("decoding frozen weights takes the device no time")
        return tuple(assumed)

    @property
    def written_bytes_per_day(self) -> float:
        return self.written_bytes * 86400 / self.step_seconds

    @property
    def drive_days(self) -> float | None:
        """Return the days until the drives' warranted writes are used up; None if these are not known."""
        if self.machine.endurance_bytes is None or not self.written_bytes:
            return None
        return self.machine.drive_days(self.written_bytes, self.step_seconds)

    @property
    def gpu_bound_tokens(self) -> float:
        """Return T*: the tokens per step from which computing takes longer than everything independent of the batch.

        ``T* = peak / 8 x max(14/R + 12/W, 1/adam)`` for states of 10 bytes and parameters of 2, with R and W the rates
        of all drives together; 8 FLOPs per parameter and token are forward, recomputation, and backward. Deferral must
        spread the traffic evenly over the step for that.

        With N nodes of M ranks, each rank moves ``(4 + 10/N) / M`` and ``(2 + 10/N) / M`` bytes, updates one parameter
        of N M, and sends ``4 (N - 1) / (N M)`` bytes to other nodes.
        """
        precision = self.job.layout.precision
        rates = self.machine.rates
        share = self.job.layout.share
        written = (precision.parameter_bytes + precision.state_bytes / share.nodes) / share.ranks_per_node
        read = written + precision.parameter_bytes / share.ranks_per_node
        sent = (precision.gradient_bytes + precision.parameter_bytes) * (share.nodes - 1) / share.world_size
        seconds_per_parameter = max(
            read / rates.read_bytes_per_second + written / rates.write_bytes_per_second,
            1 / (share.world_size * rates.adam_parameters_per_second),
            sent / rates.inter_node_bytes_per_second,
        )
        return rates.flops_per_second / 8 * seconds_per_parameter * share.world_size

    def to_json(self) -> dict[str, Any]:
        batch = self.memory.batch if self.memory else None
        known = self.memory is not None and self.step_seconds > 0

        def number(value: Any) -> Any:
            return value if known else None

        return {
            "model": self.job.name,
            "fits": self.fits,
            "missing": list(self.missing),
            "parameters": self.job.parameters,
            "nodes": self.job.layout.share.nodes,
            "ranks_per_node": self.job.layout.share.ranks_per_node,
            "batch_size": self.job.rows * self.job.layout.share.world_size,
            "seq_len": self.job.seq_len,
            "device": self.machine.device,
            "drives": self.machine.drives,
            "drive_count": self.machine.drive_count,
            "step_seconds": number(self.step_seconds),
            "tokens_per_second": number(known and self.tokens_per_second),
            "flops_per_second": number(known and self.flops_per_second),
            "hardware_flops_per_second": number(known and self.hardware_flops_per_second),
            "bound": number(known and self.bound.value),
            "bound_seconds": number({resource.value: seconds for resource, seconds in self.busy.items()}),
            "device_peak_bytes": number(self.device_peak_bytes),
            "host_peak_bytes": number(self.host_peak_bytes),
            "ssd_bytes": self.ssd_bytes,
            "start_bytes": self.start_bytes,
            "start_seconds": self.start_seconds,
            "ssd_read_bytes_per_step": number(self.read_bytes),
            "ssd_written_bytes_per_step": number(self.written_bytes),
            "network_sent_bytes_per_step": number(self.sent_bytes),
            "ssd_written_bytes_per_day": number(known and self.written_bytes_per_day),
            "drive_life_days": number(known and self.drive_days),
            "frontier": [asdict(point) for point in self.frontier],
            "micro_batch": batch and batch.micro_rows,
            "micro_batches": batch and batch.micro_batches,
            "deferred_fraction": number(self.deferred_fraction),
            "clip_by": number(self.clip_by and self.clip_by.value),
            "clipped_share": number(self.clip_by and self.job.clipped_share),
            "clipped_step_seconds": number(self.clipped_seconds),
            "saved_activation_bytes": number(self.saved_activation_bytes),
            "gpu_bound_tokens": self.gpu_bound_tokens,
            "assumptions": list(self.assumptions),
        }


_HARDWARE = {
    Resource.GPU: "a faster device",
    Resource.HOST_TO_DEVICE: "a faster link to the device",
    Resource.DEVICE_TO_HOST: "a faster link from the device",
    Resource.SSD: "more or faster SSDs",
    Resource.ADAM: "faster host memory",
    Resource.INTRA_NODE: "faster links inside the nodes",
    Resource.INTER_NODE: "a faster network",
}
_PER_STEP = (Resource.SSD, Resource.ADAM, Resource.INTER_NODE)  # Work that hardly grows with the batch


def what_relaxes(plan: Plan) -> list[str]:
    """Return what would shorten a step of this plan, or give more tokens for it."""
    ways = [_HARDWARE[plan.bound]]
    if plan.bound in _PER_STEP:
        ways.append("a larger --batch-size")
    layout = plan.job.layout
    if (
        plan.bound is Resource.SSD
        and layout.precision.optimizer == ADAMW
        and layout.sizes[Kind.BLOCK].trained_elements
    ):
        ways.append("--optimizer adamw8bit")
    return ways
