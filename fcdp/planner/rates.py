"""The time that one collective takes: by latency and bandwidth of each level, or by measurements on a cluster."""

import bisect
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, get_args

from common.errors import UserError
from fcdp.planner.collectives import Operation, ring_parts
from fcdp.strategy.mesh import Mesh
from fcdp.strategy.strategy import Ring


class CollectiveRates(Protocol):
    """Times of collectives, as the planner asks for them."""

    def seconds(self, operation: Operation, mesh: Mesh, nbytes: float, ring: Ring) -> float:
        """Return the seconds of a collective over ``mesh`` of ``nbytes`` in all, while all groups do the same."""


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
        """See :class:`CollectiveRates`. All-reduce: reduce-scatter and all-gather, or a tree if faster."""
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
        if ring == "flat":
            once = self._flat(mesh, moving)
        elif ring == "ho":
            once = self._overlapped(mesh, moving)
        else:
            once = sum(moving) + self._latencies(mesh)
        if operation != "all_reduce":
            return once
        one_level = mesh.shards in mesh.extents  # where every ring is NCCL's
        return min(2 * once, tree) if ring == "flat" or one_level else 2 * once

    def _flat(self, mesh: Mesh, moving: list[float]) -> float:
        """Return the time of a ring, each step of which takes as long as its slowest link."""
        step = max(link.latency_seconds for extent, link in zip(mesh.extents, self.links, strict=True) if extent > 1)
        return self.start_seconds + (mesh.shards - 1) * step + max(moving)

    def _overlapped(self, mesh: Mesh, moving: list[float]) -> float:
        """Return the time of an HO-Ring (PaRO 3.4): only the last block goes round inside with no other beyond."""
        blocks = mesh.extents[-1]
        intra_node, inter_node = sum(moving[:-1]), moving[-1]
        overlapped = max(inter_node, intra_node * (blocks - 1) / blocks) + intra_node / blocks
        return overlapped + self._latencies(mesh)

    def _tree(self, mesh: Mesh, moving: list[float]) -> float:
        """Return the time of double binary trees: few steps, at 0.9 of a ring's bandwidth (NCCL's tuning.cc)."""
        *intra_node, inter_node = zip(mesh.extents, self.links, strict=True)
        steps = sum((extent - 1) * link.latency_seconds for extent, link in intra_node)
        steps += math.ceil(math.log2(inter_node[0])) * inter_node[1].latency_seconds
        return self.start_seconds + 2 * (steps + max(moving) / 0.9)

    def _latencies(self, mesh: Mesh) -> float:
        used = [(extent, link) for extent, link in zip(mesh.extents, self.links, strict=True) if extent > 1]
        return sum(self.start_seconds + (extent - 1) * link.latency_seconds for extent, link in used)


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
        """See :class:`CollectiveRates`."""
        if mesh.shards == 1 or not nbytes:
            return 0.0
        points = self._by_kind.get((operation, ring, mesh.extents))
        if points is None:
            raise UserError(
                f"The cluster's profile has no {ring} {operation} over {'x'.join(map(str, mesh.extents))} ranks. "
                "Measure it, or plan with a preset."
            )
        place = bisect.bisect_left(points, (nbytes, 0.0))
        if place == 0:
            return points[0][1]
        if place == len(points):
            return nbytes * points[-1][1] / points[-1][0]
        (low, low_seconds), (high, high_seconds) = points[place - 1], points[place]
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
