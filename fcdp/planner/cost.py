"""The cost of a strategy on a cluster: device and host memory, bytes, and the time of a step.

Memory is as FSDP2 holds it: gradients and master weights in fp32, parameters in compute precision only while they are
gathered or cached. With one scope for all, that is the 16 bytes of PaRO table 2, AMSP IV-D, ZeRO-topo tables V and VI,
and FCDP VI-A."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.hardware.compute_rates import FUSED_PART
from fcdp.planner.cluster import Cluster
from fcdp.planner.workload import Collective, Phase, Workload, bytes_per_node, element_bytes, step_collectives
from fcdp.strategy.strategy import Axis, Format, Routes, StrategyMeshes

P_BYTES, G_BYTES, OS_BYTES = 2.0, 4.0, 12.0  # per parameter: P in bf16; G; OS with fp32 master weights

RUNTIME_BYTES = 2 * 2**30  # driver's context, libraries' workspaces, communicators' buffers: assumed


@dataclass(frozen=True)
class Memory:
    """Bytes that a layout takes when it takes most, in the backward pass."""

    parameters: float  # frozen shards, and P's shards in the device's cache, on a device
    secondary: float  # the secondary partition on a device
    gradients: float  # sums over micro-batches, and the optimizer's gradients, on a device
    optimizer: float  # OS's shards on a device
    activations: float  # activations of a micro-batch on a device, next to gradients
    working: float  # gathered blocks, whole gradients of two, and what the runtime takes
    host: float  # cached shards in the memory of one node
    cached: float  # cached shards of one device, in host memory

    @property
    def states(self) -> float:
        """P, G, and OS on a device."""
        return self.parameters + self.secondary + self.gradients + self.optimizer

    @property
    def device(self) -> float:
        """Everything on a device. An adaptive cache takes more while there is room."""
        return self.states + self.activations + self.working


def memory_of(layout: StrategyMeshes, workload: Workload, *, checkpointing: bool) -> Memory:
    psi = workload.parameters
    nbytes = workload.compute_bytes
    cached = secondary = 0.0
    if layout.p_in_cache:
        cached = nbytes * psi / layout.p.shards
    elif layout.secondary is not None:
        second = element_bytes(layout.strategy.precision.secondary, nbytes) * psi / layout.secondary.shards
        cached, secondary = (0.0, second) if layout.cache == "device" else (second, 0.0)
    parameters, gradients, activations = _held(layout, workload, checkpointing)
    return Memory(
        parameters=parameters,
        secondary=secondary,
        gradients=gradients,
        optimizer=OS_BYTES * workload.trainable / layout.os.shards,
        activations=activations,
        working=RUNTIME_BYTES + _working(layout, workload),
        host=cached * layout.levels.ranks_per_node,
        cached=cached,
    )


def _held(layout: StrategyMeshes, workload: Workload, checkpointing: bool) -> tuple[float, float, float]:
    """Return the bytes of parameters, gradients, and activations when they are most together."""
    psi = workload.parameters
    trained = workload.trainable
    shards = layout.os.shards
    activations = workload.activation_bytes(checkpointing)
    if workload.deepspeed_states:
        p = layout.os if layout.p_in_cache else layout.p
        return P_BYTES * psi / p.shards, P_BYTES * trained / layout.g.shards, activations
    routes = Routes.of(layout)
    frozen = workload.compute_bytes * (psi - trained) / shards
    has_shards = routes.keeps_gathered or (routes.caches_shards and not layout.p_in_cache)
    parameters = workload.compute_bytes * psi / layout.p.shards if has_shards else 0.0
    gradients = G_BYTES * trained / shards
    if workload.micro_batches > 1:
        if routes.finish or routes.replicate:  # summed before they are the optimizer's
            gradients += G_BYTES * trained / layout.g.shards
        return frozen + parameters, gradients, activations
    # Gradients come as activations go, and as what was kept gathered goes; those of two blocks are on the way.
    part = min(1.0, 2 / workload.units)
    late = parameters * part if routes.keeps_gathered else parameters
    late_gradients = gradients * (1 - part)
    late_activations = workload.activation_bytes(checkpointing, blocks=2)
    if late + late_gradients + late_activations > parameters + activations:
        return frozen + late, late_gradients, late_activations
    return frozen + parameters, 0.0, activations


def _working(layout: StrategyMeshes, workload: Workload) -> float:
    """Return the bytes of blocks that are whole: parameters of the one that computes and of the one fetched ahead, and
    gradients of the first, and of the one before it, which are being reduced."""
    routes = Routes.of(layout)
    precision = layout.strategy.precision
    average = workload.parameters / workload.units
    units = max(workload.largest_unit, average) + average
    is_gathered = layout.p.shards > 1 or layout.p_in_cache
    gathered = workload.compute_bytes * units if is_gathered else 0.0
    gradients = workload.gradient_bytes * units * workload.trainable / workload.parameters
    forward: list[tuple[tuple[Axis, ...], Format]] = [
        (routes.spread, "bf16"),
        (routes.gather, precision.gather),
    ]
    backward = forward[1:] if layout.secondary is None else [(routes.secondary, precision.secondary)]
    return gathered + max(
        _scratch(forward, layout, workload), gradients + _scratch(backward, layout, workload)
    )


def _scratch(
    stages: Sequence[tuple[tuple[Axis, ...], Format]], layout: StrategyMeshes, workload: Workload
) -> float:
    """Return the bytes that the largest gather of a block takes next to the block itself.

    Cells of ranks that are not next to each other are gathered in separate memory and copied to their places
    (``RankLevel.gather``), except those that HO-Ring sends one by one. What is quantized arrives in separate bytes."""
    block = workload.parameters / workload.units
    worst = 0.0
    for axes, form in stages:
        one_by_one = layout.strategy.ring == "ho" and len(axes) > 1 and axes[0].stride == 1
        for axis in axes:
            part = block / axis.stride
            if form != "bf16":
                worst = max(worst, part * element_bytes(form, 0.0))
            elif axis.stride > 1 and not one_by_one:
                worst = max(worst, part * workload.compute_bytes * (1 + 1 / axis.size))
    return worst


# Part of the shorter of two overlapping activities that is saved: products of matrices are slower while a collective
# uses the device's processors and memory. AMSP, table V: of 0.41 s of collectives (7B, M = 1), 0.29 s.
OVERLAP = 0.7

PASSES: tuple[Phase, ...] = ("forward", "backward", "route")  # phases of every micro-batch

OPTIMIZER_BYTES = 28.0  # per trainable parameter: 12 of states and 2 of gradient in, 12 and 2 of P out


class Engine:
    """How our engine communicates: in whole blocks, all of it while something computes. Others are subclasses."""

    @property
    def overlaps(self) -> bool:
        """Whether anything is sent while something computes."""
        return True

    def collectives(
        self, layout: StrategyMeshes, workload: Workload, checkpointing: bool
    ) -> list[Collective]:
        return step_collectives(layout, workload)

    def pieces(self, collective: Collective, is_gathered: bool, workload: Workload) -> int:
        """Return the number of messages in which a collective of all units is sent."""
        return workload.units

    def hides(self, collective: Collective) -> bool:
        """Return whether something computes meanwhile."""
        return True


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
    # The model's FLOPs, without recomputation, over what the device's peak allows, if that is known
    mfu: float | None
    fits: bool

    @property
    def name(self) -> str:
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
                "second" if name == "secondary" else name: round(nbytes)
                for name, nbytes in vars(self.memory).items()
                if name not in ("host", "cached")
            },
            "host_bytes": round(self.memory.host),
            "inter_node_bytes_per_step": round(self.inter_node_bytes),
            "intra_node_bytes_per_step": round(self.intra_node_bytes),
            "collectives": [
                {
                    "purpose": collective.purpose,
                    "operation": collective.operation,
                    "ranks": collective.mesh.pair,
                    "times": collective.times,
                    "inter_node_bytes": round(inter),
                    "intra_node_bytes": round(intra),
                    "seconds": seconds,
                }
                for collective, seconds in zip(self.collectives, self.seconds, strict=True)
                for inter, intra in [bytes_per_node([collective], layout)]
            ],
            "compute_seconds": self.compute_seconds,
            "communication_seconds": self.communication_seconds,
            "step_seconds": self.step_seconds,
            "mfu": self.mfu,
            "fits": self.fits,
        }


def compute_seconds(workload: Workload, cluster: Cluster, checkpointing: bool) -> tuple[float, float]:
    """Return the seconds of a micro-batch's forward and backward pass, without waiting and without copies."""
    rates = cluster.compute
    if rates is None or not workload.dense_flops_per_token:  # a workload of counts alone has no parts
        flops = workload.forward_flops, workload.backward_flops(checkpointing)
        return flops[0] / cluster.flops_per_second, flops[1] / cluster.flops_per_second
    tokens = workload.tokens
    attention = workload.causal_flops_per_token
    moved = workload.moved_bytes * (FUSED_PART if workload.compiled else 1.0)
    products = workload.dense_flops_per_token / rates.dense + workload.expert_flops_per_token / rates.experts
    block = products + attention / rates.flash2.forward + moved / rates.memory
    head = workload.head_flops_per_token / rates.dense, workload.logits_bytes / rates.memory
    # A gradient is a product for the input and one for the weights; passes over memory read and write twice as much.
    trained = 1 + workload.trainable / workload.parameters
    again = block if checkpointing else 0.0
    back = trained * products + 2.5 * attention / rates.flash2.backward + 2 * moved / rates.memory
    return tokens * (block + sum(head)), tokens * (again + back + trained * head[0] + 2 * head[1])


def estimate(
    layout: StrategyMeshes,
    workload: Workload,
    cluster: Cluster,
    *,
    checkpointing: bool,
    engine: Engine | None = None,
) -> Estimate:
    """Return what ``layout`` costs, with our engine or another."""
    engine = engine or Engine()
    memory = memory_of(layout, workload, checkpointing=checkpointing)
    collectives = engine.collectives(layout, workload, checkpointing)
    is_gathered = layout.p.shards > 1 or layout.p_in_cache
    durations = []
    for collective in collectives:
        pieces = engine.pieces(collective, is_gathered, workload)
        once = cluster.rates.seconds(
            collective.operation, collective.mesh, collective.nbytes / pieces, collective.ring
        )
        durations.append(pieces * once)
    forward, backward = compute_seconds(workload, cluster, checkpointing)
    # FSDP2 copies gathered parameters and gradients once in every pass.
    copied = workload.compute_bytes * workload.parameters if is_gathered else 0.0
    copied_back = (
        workload.compute_bytes * (workload.parameters - workload.kept_gathered) if is_gathered else 0.0
    )
    copied_back += workload.gradient_bytes * workload.trainable
    forward += 2 * copied / cluster.memory_bytes_per_second
    backward += 2 * copied_back / cluster.memory_bytes_per_second
    update = OPTIMIZER_BYTES * workload.trainable / layout.os.shards / cluster.memory_bytes_per_second
    overlaps = cluster.overlaps and engine.overlaps
    hidden: dict[Phase, float] = defaultdict(float)
    exposed: dict[Phase, float] = defaultdict(float)
    for collective, seconds in zip(collectives, durations, strict=True):
        # Some run in all micro-batches but one (AMSP's T_g); time them as an even part of each.
        each = workload.micro_batches if collective.phase in PASSES else 1
        part = hidden if overlaps and engine.hides(collective) else exposed
        part[collective.phase] += seconds * collective.times / each
    copies = _copies(layout, workload, memory, cluster)

    def pass_seconds(compute: float, communicate: float) -> float:
        if not overlaps:
            return compute + communicate + copies
        # The first gather and the last reduction of a pass overlap with nothing.
        saved = min(OVERLAP, 1 - 1 / workload.units) * min(compute, communicate)
        return max(compute + communicate - saved, copies)

    # By AMSP V-C: gathers run one unit ahead, reductions one behind, and new P is spread during the first forward.
    first = pass_seconds(forward, hidden["forward"] + hidden["spread"])
    if workload.router_passes:  # new P is spread during these
        first = pass_seconds(forward, hidden["route"] + hidden["spread"]) + pass_seconds(
            forward, hidden["forward"]
        )
        first += (workload.router_passes - 1) * pass_seconds(forward, hidden["route"])
    last = pass_seconds(backward, hidden["backward"] + hidden["reduce"])
    others = pass_seconds(forward, hidden["forward"]) + pass_seconds(backward, hidden["backward"])
    step = first + last + (workload.micro_batches - 1) * others
    step += workload.micro_batches * (exposed["forward"] + exposed["backward"] + exposed["route"])
    step += exposed["reduce"] + exposed["spread"]
    step += update
    flops = workload.micro_batches * (workload.forward_flops + workload.backward_flops(False))
    peak = cluster.peak_flops_per_second
    inter, intra = bytes_per_node(collectives, layout)
    return Estimate(
        layout=layout,
        checkpointing=checkpointing,
        memory=memory,
        collectives=tuple(collectives),
        seconds=tuple(
            seconds * collective.times for collective, seconds in zip(collectives, durations, strict=True)
        ),
        inter_node_bytes=inter,
        intra_node_bytes=intra,
        compute_seconds=workload.micro_batches * (forward + backward)
        + workload.router_passes * forward
        + update,
        step_seconds=step,
        mfu=None if peak is None else flops / step / peak,
        fits=memory.device <= cluster.device_memory_bytes and memory.host <= cluster.host_memory_bytes,
    )


def _copies(layout: StrategyMeshes, workload: Workload, memory: Memory, cluster: Cluster) -> float:
    """Return the seconds in which a device's cached shards cross the host link once, but for those on the device."""
    if not memory.cached:
        return 0.0
    cached_share = 0.0
    if layout.cache == "adaptive":
        room = workload.cache_threshold * cluster.device_memory_bytes - memory.device
        cached_share = min(max(room / memory.cached, 0.0), 1.0)
    whole = memory.cached if layout.secondary is not None else P_BYTES * workload.parameters / layout.p.shards
    return (1.0 - cached_share) * whole / cluster.host_link_bytes_per_second
