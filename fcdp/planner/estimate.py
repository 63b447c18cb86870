"""The cost of a strategy on a cluster: memory, bytes, and the time of a step in which computing hides communication."""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fcdp.planner.cluster import Cluster
from fcdp.planner.collectives import Collective, Phase, bytes_per_node, step_collectives
from fcdp.planner.memory import P_BYTES, Memory, memory_of
from fcdp.planner.workload import Workload
from fcdp.strategy.strategy import StrategyMeshes

# Part of the shorter of two overlapping activities that is saved: products of matrices are slower while a collective
# uses the device's processors and memory. AMSP, table V: of 0.41 s of collectives (7B, M = 1), 0.29 s.
OVERLAP = 0.7

OPTIMIZER_BYTES = 28.0  # per trainable parameter: 12 of states and 2 of gradient in, 12 and 2 of P out


@dataclass(frozen=True)
class Engine:
    """How a training engine communicates. Ours, the default: whole blocks, all of it while something computes."""

    tensors: int = 0  # number of tensors, each gathered and reduced alone where P is sharded; 0: by block
    bucket_bytes: float = 0.0  # of gradients and of new P where P is not sharded; 0: by block
    overlaps: frozenset[str] = frozenset({"gather", "scatter", "reduce", "spread"})  # what computing overlaps
    gathers_again: bool = False  # whether parameters are gathered to compute activations again, too
    select_and_drop: bool = False  # see :func:`step_collectives`

    def pieces(self, collective: Collective, is_gathered: bool, workload: Workload) -> int:
        """Return the number of messages in which a collective of all units is sent."""
        if is_gathered and collective.phase in ("forward", "backward"):
            return self.tensors or workload.units
        return math.ceil(collective.nbytes / self.bucket_bytes) if self.bucket_bytes else workload.units

    def hides(self, collective: Collective) -> bool:
        """Return whether something computes meanwhile; ``scatter``: a reduction in every micro-batch."""
        if collective.phase in ("reduce", "spread"):
            return collective.phase in self.overlaps
        return ("gather" if collective.operation == "all_gather" else "scatter") in self.overlaps


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
    mfu: float | None  # the model's FLOPs, without recomputation, over what the device's peak allows, if that is known
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
            "mfu": self.mfu,
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
    layout: StrategyMeshes, workload: Workload, cluster: Cluster, *, checkpointing: bool, engine: Engine | None = None
) -> Estimate:
    """Return what ``layout`` costs, with our engine or another."""
    engine = engine or Engine()
    memory = memory_of(layout, workload, checkpointing=checkpointing)
    collectives = step_collectives(layout, workload, select_and_drop=engine.select_and_drop)
    if engine.gathers_again and checkpointing:
        forward_gathers = [collective for collective in collectives if collective.phase == "forward"]
        collectives += [
            replace(collective, purpose="gather P, again", phase="backward") for collective in forward_gathers
        ]
    is_gathered = layout.p.shards > 1 or layout.p_in_cache
    durations = []
    for collective in collectives:
        pieces = engine.pieces(collective, is_gathered, workload)
        once = cluster.rates.seconds(collective.operation, collective.mesh, collective.nbytes / pieces, collective.ring)
        durations.append(pieces * once)
    room = cluster.device_memory_bytes
    forward = workload.forward_flops / cluster.flops_per_second
    backward = workload.backward_flops(checkpointing) / cluster.flops_per_second
    forward += _packing(layout, workload, "forward") / cluster.memory_bytes_per_second
    backward += _packing(layout, workload, "backward") / cluster.memory_bytes_per_second
    update = OPTIMIZER_BYTES * workload.trainable / layout.os.shards / cluster.memory_bytes_per_second
    overlaps = cluster.overlaps and bool(engine.overlaps)
    clock = _Step(forward, backward, _copies(layout, workload, memory, cluster), workload.units, overlaps)
    hidden: dict[Phase, float] = defaultdict(float)
    exposed: dict[Phase, float] = defaultdict(float)
    for collective, seconds in zip(collectives, durations, strict=True):
        # Some run in all micro-batches but one (AMSP's T_g); time them as an even part of each.
        each = workload.micro_batches if collective.phase in ("forward", "backward") else 1
        part = hidden if overlaps and engine.hides(collective) else exposed
        part[collective.phase] += seconds * collective.times / each
    step = clock.seconds(hidden, exposed, workload.micro_batches) + update
    flops = workload.micro_batches * (workload.forward_flops + workload.backward_flops(False))
    peak = cluster.peak_flops_per_second
    inter, intra = bytes_per_node(collectives, layout)
    return Estimate(
        layout=layout,
        checkpointing=checkpointing,
        memory=memory,
        collectives=tuple(collectives),
        seconds=tuple(seconds * collective.times for collective, seconds in zip(collectives, durations, strict=True)),
        inter_node_bytes=inter,
        intra_node_bytes=intra,
        compute_seconds=workload.micro_batches * (forward + backward) + update,
        step_seconds=step,
        mfu=None if peak is None else flops / step / peak,
        fits=memory.device <= room and memory.host <= cluster.host_memory_bytes,
    )


@dataclass(frozen=True)
class _Step:
    """A step's phases, in each of which the slowest resource sets the pace."""

    forward: float  # the same in the forward pass
    backward: float  # seconds of computing in the backward pass of one micro-batch
    copies: float  # seconds of host copies in one forward, and in one backward
    pieces: int  # units sent; the first gather and the last reduction of a pass overlap with nothing
    overlaps: bool  # whether anything overlaps

    def seconds(self, hidden: Mapping[Phase, float], exposed: Mapping[Phase, float], micro_batches: int) -> float:
        """Return a step's seconds by AMSP V-C: of what is ``hidden``, gathers run one unit ahead, reductions one
        behind, and new P is spread during the first forward; what is ``exposed`` runs while nothing computes."""
        first = self._pass(self.forward, hidden["forward"] + hidden["spread"])
        plain_forward = self._pass(self.forward, hidden["forward"])
        plain_backward = self._pass(self.backward, hidden["backward"])
        last = self._pass(self.backward, hidden["backward"] + hidden["reduce"])
        each = exposed["forward"] + exposed["backward"]
        once = exposed["reduce"] + exposed["spread"]
        return first + last + (micro_batches - 1) * (plain_forward + plain_backward) + micro_batches * each + once

    def _pass(self, compute: float, communicate: float) -> float:
        if not self.overlaps:
            return compute + communicate + self.copies
        saved = min(OVERLAP, 1 - 1 / self.pieces) * min(compute, communicate)
        return max(compute + communicate - saved, self.copies)


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
        room = workload.cache_threshold * cluster.device_memory_bytes - memory.device
        kept = min(max(room / memory.cached, 0.0), 1.0)
    whole = memory.cached if layout.secondary is not None else P_BYTES * workload.parameters / layout.p.shards
    return (1.0 - kept) * whole / cluster.host_link_bytes_per_second
