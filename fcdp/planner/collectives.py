"""The collectives of a step: each with its ranks and bytes, and how many of these cross which level.

Notation of PaRO: Psi parameters, Psi' trainable, s micro-batches. All bytes are those of a whole model."""

from dataclasses import dataclass
from math import prod
from typing import Literal

from common.errors import UserError
from common.quantisation import BLOCK, quantised_nbytes
from fcdp.planner.workload import Workload
from fcdp.strategy.mesh import Mesh
from fcdp.strategy.strategy import Format, Ring, StrategyMeshes

# A broadcast: every rank in turn sends its part to all, with an all-gather's result.
Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast"]
# In every forward, in every backward, after the last backward, or before the next forward.
Phase = Literal["forward", "backward", "reduce", "spread"]

BYTES_PER_ELEMENT: dict[Format, float] = {
    "bf16": 2.0,
    "int8": quantised_nbytes(BLOCK, 8) / BLOCK,
    "int4": quantised_nbytes(BLOCK, 4) / BLOCK,
}


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


def step_collectives(layout: StrategyMeshes, workload: Workload, *, select_and_drop: bool = False) -> list[Collective]:
    """Return all collectives of one step that move anything.

    With ``select_and_drop`` as AMSP (IV-C), whose ranks hold whole tensors of optimizer states: all-reduces of G of
    which each rank keeps its part, and broadcasts of new P. Otherwise G is reduce-scattered over the scope of OS and
    all-reduced over its replicas, and P gathered."""
    strategy, p, g, os = layout.strategy, layout.p, layout.g, layout.os
    world, s = layout.levels.whole, workload.micro_batches
    psi, trained = workload.parameters, workload.trainable
    compute, gradient = workload.compute_bytes, workload.gradient_bytes
    gather = _element(strategy.precision.gather, compute)
    reduce = _element(strategy.precision.reduce, gradient)
    again = psi - workload.kept_gathered  # what is gathered in the backward pass, too
    ring = strategy.ring
    found: list[Collective] = []

    def add(
        purpose: str, operation: Operation, mesh: Mesh, nbytes: float, times: int, phase: Phase, ring: Ring = ring
    ) -> None:
        if mesh.shards > 1 and times:
            found.append(Collective(purpose, operation, mesh, nbytes, times, phase, ring))

    add("gather P, forward", "all_gather", p, gather * psi, s, "forward")
    if layout.secondary is None:
        add("gather P, backward", "all_gather", p, gather * again, s, "backward")
    else:
        secondary = _element(strategy.precision.secondary, compute)
        add("gather second shards, backward", "all_gather", layout.secondary, secondary * again, s, "backward")

    if select_and_drop:
        if g not in (p, os) or not g.holds(p):
            raise UserError(f"{strategy.name}: AMSP has G sharded as P or as OS (IV-C3), not over {g}.")
        add("reduce G", "reduce_scatter", p, gradient * trained, s, "backward")
        add("reduce G, keep a part", "all_reduce", g.over(p), gradient * trained / p.shards, s - 1, "backward")
        add("reduce G, last", "all_reduce", world.over(p), gradient * trained / p.shards, 1, "reduce")
    else:
        # What is quantised goes in one hop inside the node, and one beyond it: a ring would quantise it at every step.
        hops: Ring = ring if strategy.precision.reduce == "bf16" else "hierarchical"
        add("reduce G", "reduce_scatter", g, reduce * trained, s, "backward", hops)
        add("reduce G to OS", "reduce_scatter", os.over(g), gradient * trained / g.shards, 1, "reduce")
        add("reduce G over replicas", "all_reduce", world.over(os), gradient * trained / os.shards, 1, "reduce")
    spread: Operation = "broadcast" if select_and_drop else "all_gather"
    add("spread new P", spread, os.over(p), compute * trained / p.shards, 1, "spread")
    return found


def _element(format: Format, plain: float) -> float:
    """Return the bytes of one element in ``format``; ``plain`` where it is not quantised."""
    return plain if format == "bf16" else BYTES_PER_ELEMENT[format]


def bytes_per_node(collectives: list[Collective], layout: StrategyMeshes) -> tuple[float, float]:
    """Return the bytes that one node's ranks send per step: to other nodes, and to each other."""
    sent = [collective.sent_by_rank() for collective in collectives]
    ranks = layout.levels.ranks_per_node
    return ranks * sum(parts[-1] for parts in sent), ranks * sum(sum(parts[:-1]) for parts in sent)
