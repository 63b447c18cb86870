"""The cluster that a plan is for: a preset with its sources (``configs/clusters``), or a profile that was measured; and
how long collectives take on it."""

import bisect
import itertools
import json
import math
import tomllib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

from common.errors import UserError, did_you_mean
from common.files import preset_files, read_text_file, replace_file
from common.hardware.compute_rates import MEMORY_PART, ComputeRates
from common.hardware.presets import gpu_preset
from common.units import parse_bytes
from fcdp.planner.workload import Operation, ring_parts
from fcdp.strategy.mesh import Levels, Mesh
from fcdp.strategy.strategy import Ring, StrategyMeshes


@dataclass(frozen=True)
class Link:
    """A link between the groups of a level."""

    # Of one rank, one way, while all ranks send: a node's network cards divided by its ranks
    bytes_per_second: float
    latency_seconds: float  # latency of one step of a ring


# A ring's bandwidth falls with its ranks beyond 16, with which the presets' rates were measured, as the power -0.2 of
# their number. FCDP, figure 2: ZeRO-3 on 32 GPUs has 0.82, 0.89 and 0.96 of the rate per GPU that 16 have, by network.
RING_DECAY = 0.2
RING_MEASURED = 16


@dataclass(frozen=True)
class AlphaBeta:
    """Times alpha + beta n, level by level (AMSP IV-A; latencies of NCCL's tuning.cc)."""

    links: tuple[Link, ...]  # links by level, fastest first
    start_seconds: float = 0.0  # time of launching a collective on one level

    def seconds(self, operation: Operation, mesh: Mesh, nbytes: float, ring: Ring) -> float:
        """Return the seconds of a collective over ``mesh`` of ``nbytes`` in all, while all groups do the same.

        All-reduce: reduce-scatter and all-gather, or a tree if faster."""
        if mesh.shards == 1:
            return 0.0
        if operation == "broadcast":
            # Unlike in a gather, no rank sends while a part that it has itself goes round: all of the buffer, in turn.
            nbytes *= mesh.shards / (mesh.shards - 1)
        moving = [
            part * nbytes / link.bytes_per_second
            for part, link in zip(ring_parts(mesh, ring), self.links, strict=True)
        ]
        tree = self._tree(mesh, moving)
        moving[-1] *= max(1.0, (mesh.shards if ring == "flat" else mesh.nodes) / RING_MEASURED) ** RING_DECAY
        used = [(extent, link) for extent, link in zip(mesh.extents, self.links, strict=True) if extent > 1]
        if ring == "flat":  # each step takes as long as its slowest link
            slowest = max(link.latency_seconds for _, link in used)
            once = self.start_seconds + (mesh.shards - 1) * slowest + max(moving)
        else:
            latencies = sum(self.start_seconds + (extent - 1) * link.latency_seconds for extent, link in used)
            blocks = mesh.nodes
            intra_node = sum(moving[:-1])
            inter_node = moving[-1]
            # HO-Ring (PaRO 3.4): only the last block goes round inside with no other beyond.
            overlapped = max(inter_node, intra_node * (blocks - 1) / blocks) + intra_node / blocks
            once = (overlapped if ring == "ho" else sum(moving)) + latencies
        if operation != "all_reduce":
            return once
        one_level = mesh.shards in mesh.extents  # where every ring is NCCL's
        return min(2 * once, tree) if ring == "flat" or one_level else 2 * once

    def _tree(self, mesh: Mesh, moving: list[float]) -> float:
        """Return the time of double binary trees: few steps, at 0.9 of a ring's bandwidth (NCCL's tuning.cc)."""
        *intra_node, inter_node = zip(mesh.extents, self.links, strict=True)
        steps = sum((extent - 1) * link.latency_seconds for extent, link in intra_node)
        steps += math.ceil(math.log2(inter_node[0])) * inter_node[1].latency_seconds
        return self.start_seconds + 2 * (steps + max(moving) / 0.9)


@dataclass(frozen=True)
class CollectiveTiming:
    """One measured collective."""

    operation: Operation
    ring: Ring
    mesh: tuple[int, ...]  # extents of the mesh by level
    nbytes: int  # bytes of the whole buffer
    seconds: float  # median of the seconds taken, while all groups of the cluster did the same


class MeasuredRates:
    """Times of collectives by interpolation between measurements (AMSP IV-A).

    The effective bandwidth is interpolated over the logarithm of the size; a smaller buffer takes as long as the
    smallest measured one, a larger one has the bandwidth of the largest."""

    def __init__(self, timings: Iterable[CollectiveTiming]):
        self.timings = list(timings)
        self._by_kind: dict[tuple[str, str, tuple[int, ...]], list[tuple[float, float]]] = {}
        for timing in self.timings:
            if timing.nbytes <= 0 or timing.seconds <= 0:
                raise UserError(
                    f"A measurement of {timing.nbytes} bytes in {timing.seconds} s cannot be one."
                )
            kind = (timing.operation, timing.ring, timing.mesh)
            self._by_kind.setdefault(kind, []).append((timing.nbytes, timing.seconds))
        for points in self._by_kind.values():
            points.sort()
        if not self._by_kind:
            raise UserError("A cluster's profile has no measurements of collectives in it.")

    def seconds(self, operation: Operation, mesh: Mesh, nbytes: float, ring: Ring) -> float:
        """See :meth:`AlphaBeta.seconds`."""
        if mesh.shards == 1 or not nbytes:
            return 0.0
        points = self._by_kind.get((operation, ring, mesh.extents))
        if points is None:
            raise UserError(
                f"The cluster's profile has no {ring} {operation} over {'x'.join(map(str, mesh.extents))} ranks. "
                "Measure it, or plan with a preset."
            )
        index = bisect.bisect_left(points, (nbytes, 0.0))
        if index == 0:
            return points[0][1]
        if index == len(points):
            return nbytes * points[-1][1] / points[-1][0]
        (low, low_seconds), (high, high_seconds) = points[index - 1], points[index]
        weight = math.log(nbytes / low) / math.log(high / low)
        return nbytes / ((1 - weight) * low / low_seconds + weight * high / high_seconds)

    def save(self, path: Path, **facts: Any) -> None:
        """Write the measurements as JSON, with ``facts`` of the cluster."""
        body = {**facts, "collectives": [asdict(timing) for timing in self.timings]}
        replace_file(path, json.dumps(body, indent=1))

    @classmethod
    def from_facts(cls, facts: dict[str, Any]) -> "MeasuredRates":
        """Read back what :meth:`save` wrote."""
        timings = []
        for entry in facts.get("collectives", []):
            timing = CollectiveTiming(**{**entry, "mesh": tuple(entry["mesh"])})
            if timing.operation not in get_args(Operation) or timing.ring not in get_args(Ring):
                raise UserError(
                    f"A cluster's profile has a {timing.ring} {timing.operation}, which is unknown here."
                )
            timings.append(timing)
        return cls(timings)


@dataclass(frozen=True)
class Cluster:
    """The hardware of a cluster: memory, computing and links."""

    name: str
    title: str
    levels: Levels
    device_memory_bytes: int  # memory of one device
    host_memory_bytes: int  # host memory of one node
    # FLOPs per second of one device while nothing waits for the network, if `compute` is None
    flops_per_second: float
    memory_bytes_per_second: float  # bandwidth of the device's own memory, which bounds an optimizer step
    host_link_bytes_per_second: float  # to or from host memory, while all devices of the node copy
    rates: AlphaBeta | MeasuredRates
    peak_flops_per_second: float | None = None  # of dense bf16 products, if known
    # Rates of the parts of computing; None: one rate was measured for all of it
    compute: ComputeRates | None = None
    overlaps: bool = True  # whether devices compute while they communicate, as CPUs do not
    leaf_of_node: tuple[int, ...] | None = None  # if known

    def resized(self, levels: Levels) -> "Cluster":
        """Return the same hardware with other numbers of ranks and nodes."""
        if levels == self.levels:
            return self
        if not isinstance(self.rates, AlphaBeta):
            raise UserError(
                f"{self.name} was measured with levels {self.levels}; for {levels} there are no times."
            )
        if len(levels.sizes) != len(self.levels.sizes):
            raise UserError(
                f"{self.name} has {len(self.levels.sizes)} levels ({self.levels}), but {levels} are "
                f"{len(levels.sizes)}. Give as many."
            )
        *inner, outer = self.rates.links
        share = self.levels.ranks_per_node / levels.ranks_per_node
        links = (*inner, replace(outer, bytes_per_second=outer.bytes_per_second * share))
        leaves = self.leaf_of_node if levels.nodes == self.levels.nodes else None
        return replace(self, levels=levels, rates=replace(self.rates, links=links), leaf_of_node=leaves)


def cluster_names() -> list[str]:
    return sorted(preset_files("clusters"))


def load_cluster(name: str) -> Cluster:
    """Return the cluster called ``name``: a preset, a file written like one (``.toml``), or a profile's file."""
    presets = preset_files("clusters")
    if name in presets:
        return _read_preset(name, tomllib.loads(presets[name].read_text(encoding="utf-8")))
    path = Path(name).expanduser()
    if path.is_file():
        try:
            text = read_text_file(path)
            if path.suffix == ".toml":
                return _read_preset(path.stem, tomllib.loads(text))
            return _read_profile(path.name, json.loads(text))
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            what = "does not describe a cluster" if path.suffix == ".toml" else "is not a cluster's profile"
            raise UserError(f"{path} {what}: {type(error).__name__}: {error}.") from error
    hint = did_you_mean(name, presets) or f" There are {', '.join(sorted(presets))}."
    raise UserError(f"{name!r} is neither a cluster preset nor the file of a cluster's profile.{hint}")


def _read_preset(name: str, fields: dict[str, Any]) -> Cluster:
    sections: Sequence[dict[str, Any]] = fields["level"]
    levels = Levels(tuple(section["size"] for section in sections))
    links = []
    for section in sections:
        per_node = section.get("gb_per_s_per_node")
        rate = section["gb_per_s"] if per_node is None else per_node / levels.ranks_per_node
        links.append(Link(rate * 1e9, section["latency_us"] * 1e-6))
    leaves = fields.get("leaf_of_node")
    if leaves is not None and len(leaves) != levels.nodes:
        raise UserError(f"{name}: leaf_of_node has {len(leaves)} entries for {levels.nodes} nodes.")
    compute = None
    memory = fields.get("memory_gb_per_s", 0.0) * 1e9
    if "gpu" in fields:
        gpu = gpu_preset(fields["gpu"])
        compute = gpu.compute.scaled(fields.get("power_part", 1.0), gpu.compute.memory)
        peak = gpu.bf16_flops_per_second
        compute = replace(compute, memory=MEMORY_PART * memory) if memory else compute
        reached = compute.dense
    else:  # a file of the user's that gives one measured rate
        peak = fields["bf16_tflops"] * 1e12
        reached = peak * fields["reached"]
    return Cluster(
        name=name,
        title=fields["name"],
        levels=_with_switches(levels, leaves),
        device_memory_bytes=parse_bytes(fields["device_memory"]),
        host_memory_bytes=parse_bytes(fields["host_memory"]),
        flops_per_second=reached,
        peak_flops_per_second=peak,
        memory_bytes_per_second=memory
        or (compute.memory / MEMORY_PART if compute else fields["memory_gb_per_s"]),
        host_link_bytes_per_second=fields["host_link_gb_per_s"] * 1e9,
        rates=AlphaBeta(tuple(links), fields["start_us"] * 1e-6),
        compute=compute,
        leaf_of_node=None if leaves is None else tuple(leaves),
    )


def _with_switches(levels: Levels, leaves: Sequence[int] | None) -> Levels:
    """Return the levels with the nodes of each leaf switch, once nodes are numbered switch by switch."""
    if not leaves:
        return levels
    return replace(
        levels, nodes_per_switch=nodes_per_switch([leaves[node] for node in node_order(leaves, 1)])
    )


def _read_profile(name: str, facts: dict[str, Any]) -> Cluster:
    """Read a profile: fields of ``Cluster`` by name, levels as a list, and ``collectives`` (see ``MeasuredRates``)."""
    return Cluster(
        name=name,
        title=facts.get("title", name),
        levels=_with_switches(Levels(tuple(facts["levels"])), facts.get("leaf_of_node")),
        device_memory_bytes=int(facts["device_memory_bytes"]),
        host_memory_bytes=int(facts["host_memory_bytes"]),
        flops_per_second=float(facts["flops_per_second"]),
        memory_bytes_per_second=float(facts["memory_bytes_per_second"]),
        host_link_bytes_per_second=float(facts["host_link_bytes_per_second"]),
        rates=MeasuredRates.from_facts(facts),
        overlaps=bool(facts.get("overlaps", True)),
        leaf_of_node=tuple(facts["leaf_of_node"]) if facts.get("leaf_of_node") else None,
    )


def node_order(leaf_of_node: Sequence[Hashable], group: int) -> list[int]:
    """Return node indices in the order in which to number them (AMSP V-D, figure 10): consecutive nodes form groups of
    ``group``, whose traffic never reaches a spine switch under one leaf switch. First whole groups of every leaf, then
    the rest; but node 0, where ranks meet, stays the first with its group."""
    if group < 1 or len(leaf_of_node) % group:
        raise UserError(f"{len(leaf_of_node)} nodes are no whole number of groups of {group}.")
    by_leaf: dict[Hashable, list[int]] = {}
    for node, leaf in enumerate(leaf_of_node):
        by_leaf.setdefault(leaf, []).append(node)
    whole: list[int] = []
    rest: list[list[int]] = []
    for nodes in by_leaf.values():
        full = len(nodes) // group * group
        whole += nodes[:full]
        rest.append(nodes[full:])
    # The largest remainders first: each takes in as few others as it can to make a group.
    rest.sort(key=len, reverse=True)
    order = whole + [node for nodes in rest for node in nodes]
    first = order.index(0) // group * group
    leading = order[first : first + group]
    return [0, *(node for node in leading if node), *order[:first], *order[first + group :]]


def nodes_per_switch(leaves: Sequence[Hashable]) -> int | None:
    """Return how many nodes each leaf switch has, the scope ``switch``; None: not as many each, or not in a row."""
    runs = [len(list(run)) for _, run in itertools.groupby(leaves)]
    return runs[0] if len(set(runs)) == 1 and len(runs) == len(set(leaves)) else None


def groups_across_leaves(order: Sequence[int], leaf_of_node: Sequence[Hashable], group: int) -> int:
    """Return how many groups of an order have nodes under more than one leaf switch."""
    starts = range(0, len(order), group)
    return sum(len({leaf_of_node[node] for node in order[start : start + group]}) > 1 for start in starts)


def group_of(layout: StrategyMeshes) -> int:
    """Return the nodes of the smallest group that crosses nodes, which communicates most often; 1 if none does."""
    return min((mesh.nodes for mesh in (layout.p, layout.g, layout.os) if mesh.nodes > 1), default=1)
