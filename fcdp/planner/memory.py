"""The device and host memory that a layout takes, as FSDP2 holds it.

Gradients and master weights are in fp32, parameters in compute precision only while they are gathered or cached. With
one scope for all, that is the 16 bytes of PaRO table 2, AMSP IV-D, ZeRO-topo tables V and VI, and FCDP VI-A."""

from collections.abc import Sequence
from dataclasses import dataclass

from fcdp.planner.collectives import BYTES_PER_ELEMENT
from fcdp.planner.workload import Workload
from fcdp.strategy.routes import Axis, Routes
from fcdp.strategy.strategy import Format, StrategyMeshes

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
    """Return what ``layout`` takes."""
    psi, nbytes = workload.parameters, workload.compute_bytes
    cached = secondary = 0.0
    if layout.p_in_cache:
        cached = nbytes * psi / layout.p.shards
    elif layout.secondary is not None:
        form = layout.strategy.precision.secondary
        second = (nbytes if form == "bf16" else BYTES_PER_ELEMENT[form]) * psi / layout.secondary.shards
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
    psi, trained, shards = workload.parameters, workload.trainable, layout.os.shards
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
    late_gradients, late_activations = gradients * (1 - part), workload.activation_bytes(checkpointing, blocks=2)
    if late + late_gradients + late_activations > parameters + activations:
        return frozen + late, late_gradients, late_activations
    return frozen + parameters, 0.0, activations


def _working(layout: StrategyMeshes, workload: Workload) -> float:
    """Return the bytes of blocks that are whole: parameters of the one that computes and of the one fetched ahead, and
    gradients of the first, and of the one before it, which are being reduced."""
    routes, precision = Routes.of(layout), layout.strategy.precision
    average = workload.parameters / workload.units
    units = max(workload.largest_unit, average) + average
    is_gathered = layout.p.shards > 1 or layout.p_in_cache
    gathered = workload.compute_bytes * units if is_gathered else 0.0
    gradients = workload.gradient_bytes * units * workload.trainable / workload.parameters
    forward: list[tuple[tuple[Axis, ...], Format]] = [(routes.spread, "bf16"), (routes.gather, precision.gather)]
    backward = forward[1:] if layout.secondary is None else [(routes.secondary, precision.secondary)]
    return gathered + max(_scratch(forward, layout, workload), gradients + _scratch(backward, layout, workload))


def _scratch(stages: Sequence[tuple[tuple[Axis, ...], Format]], layout: StrategyMeshes, workload: Workload) -> float:
    """Return the bytes that the largest gather of a block takes next to the block itself.

    Cells of ranks that are not next to each other are gathered in separate memory and copied to their places
    (``RankLevel.gather``), except those that HO-Ring sends one by one. What is quantised arrives in separate bytes."""
    block = workload.parameters / workload.units
    worst = 0.0
    for axes, form in stages:
        one_by_one = layout.strategy.ring == "ho" and len(axes) > 1 and axes[0].stride == 1
        for axis in axes:
            part = block / axis.stride
            if form != "bf16":
                worst = max(worst, part * BYTES_PER_ELEMENT[form])
            elif axis.stride > 1 and not one_by_one:
                worst = max(worst, part * workload.compute_bytes * (1 + 1 / axis.size))
    return worst
