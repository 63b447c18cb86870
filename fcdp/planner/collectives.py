"""The collectives of a step: each with its ranks and bytes, how many of these cross which level, and how long it takes.

Notation of PaRO: Psi parameters, Psi' trainable, s micro-batches. All bytes are those of a whole model."""

import bisect
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal, get_args

from common.errors import UserError
from common.quantization import BLOCK, quantized_nbytes
from fcdp.planner.workload import Workload
from fcdp.strategy.mesh import Mesh
from fcdp.strategy.strategy import BITS, Format, Ring, StrategyMeshes

# A broadcast: every rank in turn sends its part to all, with an all-gather's result.
Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast"]
# In every forward, in every backward, after the last backward, before the next forward, or in a forward for the router.
Phase = Literal["forward", "backward", "reduce", "spread", "route"]


def element_bytes(format: Format, plain: float) -> float:
    """Return the bytes of one element in ``format``, scales included; ``plain`` where it is not quantized."""
    return plain if format == "bf16" else quantized_nbytes(BLOCK, BITS[format]) / BLOCK


@dataclass(frozen=True)
class Collective:
    """One kind of collective of a step. Every rank of the cluster is in one group of it."""

    purpose: str  # description for people: ``gather P, forward``
    operation: Operation
    mesh: Mesh  # ranks of the group by level
    nbytes: float  # of the whole buffer, of all units together: the result of a gather, the input of a reduction
    times: int  # number of runs per step
    phase: Phase
    ring: Ring

    def sent_by_rank(self) -> tuple[float, ...]:
        """Return the bytes that a rank sends per step, on average over ranks, by level of the link."""
        passes = 2 if self.operation == "all_reduce" else 1
        return tuple(self.times * passes * part * self.nbytes for part in ring_parts(self.mesh, self.ring))


def ring_parts(mesh: Mesh, ring: Ring) -> tuple[float, ...]:
    """Return the part of the buffer that a rank sends over links of each level in an all-gather or a reduce-scatter.

    Level after level (``hierarchical``, ``ho``), each of e ranks sends (e-1)/e of 1/(product of the faster levels). In
    a flat ring of E ranks each sends (E-1)/E to the next one, which for one in each group is beyond that level."""
    extents = mesh.extents
    if ring == "flat":
        shards = mesh.shards
        outermost = max((level for level, extent in enumerate(extents) if extent > 1), default=0)
        parts = []
        for level, extent in enumerate(extents):
            # The ring closes over the outermost level: all of its links are used, of faster levels all but the last.
            crossing = 1.0 if level == outermost else (extent - 1) / extent
            reached = crossing / prod(extents[:level]) if level <= outermost else 0.0
            parts.append(reached * (shards - 1) / shards)
        return tuple(parts)
    return tuple((extent - 1) / extent / prod(extents[:level]) for level, extent in enumerate(extents))


def step_collectives(layout: StrategyMeshes, workload: Workload) -> list[Collective]:
    """Return all collectives of one step that move anything.

    G is reduce-scattered over the scope of OS and all-reduced over its replicas, and P gathered."""
    strategy, p, g, os = layout.strategy, layout.p, layout.g, layout.os
    world, s = layout.levels.whole, workload.micro_batches
    psi, trained = workload.parameters, workload.trainable
    compute, gradient = workload.compute_bytes, workload.gradient_bytes
    gather = element_bytes(strategy.precision.gather, compute)
    reduce = element_bytes(strategy.precision.reduce, gradient)
    again = psi - workload.kept_gathered  # what is gathered in the backward pass, too
    ring = strategy.ring
    collectives: list[Collective] = []

    def add(
        purpose: str, operation: Operation, mesh: Mesh, nbytes: float, times: int, phase: Phase, ring: Ring = ring
    ) -> None:
        if mesh.shards > 1 and times:
            collectives.append(Collective(purpose, operation, mesh, nbytes, times, phase, ring))

    add("gather P, forward", "all_gather", p, gather * psi, s, "forward")
    add("gather P, router loss", "all_gather", p, gather * again, workload.router_passes, "route")
    if layout.secondary is None:
        add("gather P, backward", "all_gather", p, gather * again, s, "backward")
    else:
        secondary = element_bytes(strategy.precision.secondary, compute)
        add("gather second shards, backward", "all_gather", layout.secondary, secondary * again, s, "backward")

    # What is quantized goes in one hop inside the node, and one beyond it: a ring would quantize it at every step.
    hops: Ring = ring if strategy.precision.reduce == "bf16" else "hierarchical"
    add("reduce G", "reduce_scatter", g, reduce * trained, s, "backward", hops)
    add("reduce G to OS", "reduce_scatter", os.over(g), gradient * trained / g.shards, 1, "reduce")
    add("reduce G over replicas", "all_reduce", world.over(os), gradient * trained / os.shards, 1, "reduce")
    add("spread new P", "all_gather", os.over(p), compute * trained / p.shards, 1, "spread")
    return collectives


def bytes_per_node(collectives: list[Collective], layout: StrategyMeshes) -> tuple[float, float]:
    """Return the bytes that one node's ranks send per step: to other nodes, and to each other."""
    sent = [collective.sent_by_rank() for collective in collectives]
    ranks = layout.levels.ranks_per_node
    return ranks * sum(parts[-1] for parts in sent), ranks * sum(sum(parts[:-1]) for parts in sent)


@dataclass(frozen=True)
class Link:
    """A link between the groups of a level."""

    bytes_per_second: float  # of one rank, one way, while all ranks send: a node's network cards divided by its ranks
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
            # Unlike in a gather, nobody sends while a part that it has itself goes round: all of the buffer, in turn.
            nbytes *= mesh.shards / (mesh.shards - 1)
        moving = [
            part * nbytes / link.bytes_per_second for part, link in zip(ring_parts(mesh, ring), self.links, strict=True)
        ]
        tree = self._tree(mesh, moving)
        moving[-1] *= max(1.0, (mesh.shards if ring == "flat" else mesh.nodes) / RING_MEASURED) ** RING_DECAY
        used = [(extent, link) for extent, link in zip(mesh.extents, self.links, strict=True) if extent > 1]
        if ring == "flat":  # each step takes as long as its slowest link
            slowest = max(link.latency_seconds for _, link in used)
            once = self.start_seconds + (mesh.shards - 1) * slowest + max(moving)
        else:
            latencies = sum(self.start_seconds + (extent - 1) * link.latency_seconds for extent, link in used)
            blocks, intra_node, inter_node = mesh.nodes, sum(moving[:-1]), moving[-1]
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
                raise UserError(f"A measurement of {timing.nbytes} bytes in {timing.seconds} s cannot be one.")
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
        path.write_text(json.dumps(body, indent=1), encoding="utf-8")

    @classmethod
    def from_facts(cls, facts: dict[str, Any]) -> "MeasuredRates":
        """Read back what :meth:`save` wrote."""
        timings = []
        for entry in facts.get("collectives", []):
            timing = CollectiveTiming(**{**entry, "mesh": tuple(entry["mesh"])})
            if timing.operation not in get_args(Operation) or timing.ring not in get_args(Ring):
                raise UserError(f"A cluster's profile has a {timing.ring} {timing.operation}, which is unknown here.")
            timings.append(timing)
        return cls(timings)
