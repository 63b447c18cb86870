"""The device and host memory that a layout takes: PaRO table 2, AMSP IV-D, ZeRO-topo tables V and VI, FCDP VI-A."""

from dataclasses import dataclass

from fcdp.planner.collectives import BYTES_PER_ELEMENT
from fcdp.planner.workload import Workload
from fcdp.strategy.routes import Axis, Routes
from fcdp.strategy.strategy import Format, StrategyMeshes

P_BYTES, G_BYTES, OS_BYTES = 2.0, 2.0, 12.0  # per parameter: P and G in bf16; OS, K of the papers

RUNTIME_BYTES = 2 * 2**30  # driver's context, libraries' workspaces, communicators' buffers: assumed

ADAPTIVE_THRESHOLD = 0.9  # as in ``fcdp.fully_shard``


@dataclass(frozen=True)
class Memory:
    """Bytes that a layout takes."""

    parameters: float  # P's shards on a device
    secondary: float  # the secondary partition on a device
    gradients: float  # G's shards on a device
    optimizer: float  # OS's shards on a device
    activations: float  # activations of a micro-batch on a device
    working: float  # gathered blocks, whole gradients of one, and what the runtime takes
    host: float  # cached shards in the memory of one node
    cached: float  # cached shards of one device, in host memory

    @property
    def states(self) -> float:
        """P, G and OS on a device: what the papers' tables give."""
        return self.parameters + self.secondary + self.gradients + self.optimizer

    @property
    def device(self) -> float:
        """Everything on a device. An adaptive cache takes more while there is room."""
        return self.states + self.activations + self.working


def memory_of(layout: StrategyMeshes, workload: Workload, *, checkpointing: bool) -> Memory:
    """Return what ``layout`` takes."""
    psi, trained = workload.parameters, workload.trainable
    on_device = layout.os if layout.p_in_cache else layout.p
    cached = secondary = 0.0
    if layout.p_in_cache:
        cached = P_BYTES * psi / layout.p.shards
    elif layout.secondary is not None:
        nbytes = BYTES_PER_ELEMENT[layout.strategy.precision.secondary] * psi / layout.secondary.shards
        cached, secondary = (0.0, nbytes) if layout.cache == "device" else (nbytes, 0.0)
    return Memory(
        parameters=P_BYTES * psi / on_device.shards,
        secondary=secondary,
        gradients=(workload.sum_bytes if workload.micro_batches > 1 else G_BYTES) * trained / layout.g.shards,
        optimizer=OS_BYTES * trained / layout.os.shards,
        activations=workload.activation_bytes(checkpointing),
        working=RUNTIME_BYTES + _gathered(layout, workload),
        host=cached * layout.levels.ranks_per_node,
        cached=cached,
    )


def _gathered(layout: StrategyMeshes, workload: Workload) -> float:
    """Return the bytes of blocks that are whole: the one that computes, the one fetched ahead, and one's gradients."""
    parameters = 2 * P_BYTES * workload.parameters / workload.units if layout.p.shards > 1 or layout.p_in_cache else 0.0
    gradients = G_BYTES * workload.trainable / workload.units if layout.g.shards > 1 else 0.0
    return parameters + gradients + _gather_scratch(layout, workload)


def _gather_scratch(layout: StrategyMeshes, workload: Workload) -> float:
    """Return the bytes that the largest gather of a block takes next to the block itself.

    Cells of ranks that are not next to each other are gathered in separate memory and copied to their places
    (``RankLevel.gather``), except those that HO-Ring sends one by one. What is quantised arrives in separate bytes."""
    routes, precision = Routes.of(layout), layout.strategy.precision
    block = workload.parameters / workload.units
    stages: list[tuple[tuple[Axis, ...], Format]] = [(routes.spread, "bf16"), (routes.gather, precision.gather)]
    worst = 0.0
    for axes, form in stages:
        one_by_one = layout.strategy.ring == "ho" and len(axes) > 1 and axes[0].stride == 1
        for axis in axes:
            part = block / axis.stride
            if form != "bf16":
                worst = max(worst, part * BYTES_PER_ELEMENT[form])
            elif axis.stride > 1 and not one_by_one:
                worst = max(worst, part * P_BYTES * (1 + 1 / axis.size))
    return worst
