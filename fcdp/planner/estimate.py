"""The cost of a strategy on a cluster: memory, bytes, and the time of a step in which computing hides communication."""

from dataclasses import dataclass
from typing import Any

from fcdp.planner.cluster import Cluster
from fcdp.planner.collectives import Collective, Phase, bytes_per_node, step_collectives
from fcdp.planner.memory import ADAPTIVE_THRESHOLD, P_BYTES, Memory, memory_of
from fcdp.planner.workload import Workload
from fcdp.strategy.strategy import StrategyMeshes

OPTIMIZER_BYTES = 28.0  # per trainable parameter: 12 of states and 2 of gradient in, 12 and 2 of P out


@dataclass(frozen=True)
class Estimate:
    """The cost of one strategy on one cluster with one workload."""

    layout: StrategyMeshes
    checkpointing: bool  # whether blocks keep only their inputs and are computed again in the backward pass
    memory: Memory
    collectives: tuple[Collective, ...]
    seconds: tuple[float, ...]  # seconds of each collective, per step
    inter_node_bytes: float  # bytes that a node sends to others per step
    intra_node_bytes: float  # bytes that the ranks of a node send to each other per step
    compute_seconds: float  # seconds of computing per step, without waiting for anything
    step_seconds: float
    fits: bool

    @property
    def name(self) -> str:
        """Name of the strategy."""
        return self.layout.strategy.name

    @property
    def communication_seconds(self) -> float:
        """Seconds of all collectives together, hidden or not: what AMSP minimises (V-B, equation 1)."""
        return sum(self.seconds)

    def as_dict(self) -> dict[str, Any]:
        """Return the estimate for JSON; scopes are pairs, ranks per node and nodes."""
        layout = self.layout
        return {
            "name": self.name,
            "scopes": layout.strategy.scopes,
            "p": layout.p.pair,
            "g": layout.g.pair,
            "os": layout.os.pair,
            "second": None if layout.secondary is None else layout.secondary.pair,
            "cache": layout.cache,
            "exact": layout.strategy.precision.exact,
            "ring": layout.strategy.ring,
            "checkpointing": self.checkpointing,
            "device_bytes": round(self.memory.device),
            "device_bytes_of": {
                "parameters": round(self.memory.parameters),
                "second": round(self.memory.secondary),
                "gradients": round(self.memory.gradients),
                "optimizer": round(self.memory.optimizer),
                "activations": round(self.memory.activations),
                "working": round(self.memory.working),
            },
            "host_bytes": round(self.memory.host),
            "inter_node_bytes_per_step": round(self.inter_node_bytes),
            "intra_node_bytes_per_step": round(self.intra_node_bytes),
            "collectives": [self._collective(index) for index in range(len(self.collectives))],
            "compute_seconds": self.compute_seconds,
            "communication_seconds": self.communication_seconds,
            "step_seconds": self.step_seconds,
            "fits": self.fits,
        }

    def _collective(self, index: int) -> dict[str, Any]:
        collective = self.collectives[index]
        inter, intra = bytes_per_node([collective], self.layout)
        return {
            "purpose": collective.purpose,
            "operation": collective.operation,
            "ranks": collective.mesh.pair,
            "times": collective.times,
            "inter_node_bytes": round(inter),
            "intra_node_bytes": round(intra),
            "seconds": self.seconds[index],
        }


def estimate(
    layout: StrategyMeshes,
    workload: Workload,
    cluster: Cluster,
    *,
    checkpointing: bool,
    select_and_drop: bool = False,
    overlap_spread: bool = True,
) -> Estimate:
    """Return what ``layout`` costs; ``select_and_drop`` as in :func:`step_collectives`.

    ``overlap_spread``: new parameters are spread while the next forward computes (AMSP V-C2); AMSP's own comparison
    does without (VI-A4)."""
    memory = memory_of(layout, workload, checkpointing=checkpointing)
    collectives = step_collectives(layout, workload, select_and_drop=select_and_drop)
    pieces = workload.units
    one = [
        pieces * cluster.rates.seconds(found.operation, found.mesh, found.nbytes / pieces, found.ring)
        for found in collectives
    ]
    room = cluster.device_memory_bytes
    forward = workload.forward_flops / cluster.flops_per_second
    backward = workload.backward_flops(checkpointing) / cluster.flops_per_second
    forward += _packing(layout, workload, "forward") / cluster.memory_bytes_per_second
    backward += _packing(layout, workload, "backward") / cluster.memory_bytes_per_second
    update = OPTIMIZER_BYTES * workload.trainable / layout.os.shards / cluster.memory_bytes_per_second
    clock = _Step(forward, backward, _copies(layout, workload, memory, cluster), pieces)
    phases: dict[Phase, float] = {"forward": 0.0, "backward": 0.0, "reduce": 0.0, "spread": 0.0}
    for found, seconds in zip(collectives, one, strict=True):
        # Some run in all micro-batches but one (AMSP's T_g); time them as an even part of each.
        each = workload.micro_batches if found.phase in ("forward", "backward") else 1
        phases[found.phase] += seconds * found.times / each
    if cluster.overlaps:
        step = clock.seconds(phases, workload.micro_batches, overlap_spread)
    else:
        step = clock.serial_seconds(phases, workload.micro_batches)
    inter, intra = bytes_per_node(collectives, layout)
    return Estimate(
        layout=layout,
        checkpointing=checkpointing,
        memory=memory,
        collectives=tuple(collectives),
        seconds=tuple(seconds * found.times for found, seconds in zip(collectives, one, strict=True)),
        inter_node_bytes=inter,
        intra_node_bytes=intra,
        compute_seconds=workload.micro_batches * (forward + backward) + update,
        step_seconds=step + update,
        fits=memory.device <= room and memory.host <= cluster.host_memory_bytes,
    )


@dataclass(frozen=True)
class _Step:
    """A step's phases, in each of which the slowest resource sets the pace."""

    forward: float  # the same in the forward pass
    backward: float  # seconds of computing in the backward pass of one micro-batch
    copies: float  # seconds of host copies in one forward, and in one backward
    pieces: int  # units sent; the first gather and the last reduction of a pass overlap with nothing

    def seconds(self, phases: dict[Phase, float], micro_batches: int, overlap_spread: bool) -> float:
        """Return a step's seconds by AMSP V-C: gathers run one unit ahead, reductions one behind."""
        gathers, both = phases["forward"], phases["backward"]
        spread_hidden = phases["spread"] if overlap_spread else 0.0
        first = self._pass(self.forward, gathers + spread_hidden)
        plain_forward, plain_backward = self._pass(self.forward, gathers), self._pass(self.backward, both)
        last = self._pass(self.backward, both + phases["reduce"])
        return first + last + (micro_batches - 1) * (plain_forward + plain_backward) + phases["spread"] - spread_hidden

    def serial_seconds(self, phases: dict[Phase, float], micro_batches: int) -> float:
        """Return the seconds of a step in which nothing overlaps."""
        each = self.forward + self.backward + 2 * self.copies + phases["forward"] + phases["backward"]
        return micro_batches * each + phases["reduce"] + phases["spread"]

    def _pass(self, compute: float, communicate: float) -> float:
        return max(compute + communicate / self.pieces, communicate + compute / self.pieces, self.copies)


def _packing(layout: StrategyMeshes, workload: Workload, phase: Phase) -> float:
    """Return the bytes that FSDP2 reads and writes in one pass to copy gathered parameters and gradients."""
    is_gathered = layout.p.shards > 1 or layout.p_in_cache
    gathered = workload.parameters - (workload.kept_gathered if phase == "backward" else 0.0) if is_gathered else 0.0
    reduced = workload.trainable if phase == "backward" else 0.0
    return 2 * (workload.compute_bytes * gathered + workload.gradient_bytes * reduced)


def _copies(layout: StrategyMeshes, workload: Workload, memory: Memory, cluster: Cluster) -> float:
    """Return the seconds in which a device's cached shards cross the host link once, but for those on the device."""
    if not memory.cached:
        return 0.0
    kept = 0.0
    if layout.cache == "adaptive":
        room = ADAPTIVE_THRESHOLD * cluster.device_memory_bytes - memory.device
        kept = min(max(room / memory.cached, 0.0), 1.0)
    whole = memory.cached if layout.secondary is not None else P_BYTES * workload.parameters / layout.p.shards
    return (1.0 - kept) * whole / cluster.host_link_bytes_per_second
