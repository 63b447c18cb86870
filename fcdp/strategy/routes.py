"""The routes of tensors: which ranks exchange data under a strategy, in which order, and what stays where.

Ranks are numbered level by level, fastest first, and a scope crosses a level only when it has filled the faster ones
(AMSP V-B, equations 5 to 7). So every scope is a *block* of consecutive ranks, and every collective works on the ranks
between two sizes of blocks. An :class:`Axis` is one step of it: ranks ``stride`` apart, ``size`` of them.

                     1 .. P            P .. OS           OS .. all
    parameters       gather            spread
    gradients        1 .. G: reduce    G .. OS: finish   replicate"""

import itertools
import operator
from dataclasses import dataclass

from fcdp.strategy.mesh import Levels
from fcdp.strategy.strategy import Ring, StrategyMeshes


@dataclass(frozen=True)
class Axis:
    """Ranks that exchange data in one step: ``size`` of them, ``stride`` apart, in one block of consecutive ranks."""

    stride: int
    size: int

    def index(self, rank: int) -> int:
        """Return the place of ``rank`` on its line of the axis."""
        return rank // self.stride % self.size

    def line(self, rank: int) -> list[int]:
        """Return the ranks on the line of ``rank``, in order."""
        first = rank - self.index(rank) * self.stride
        return [first + place * self.stride for place in range(self.size)]

    def crosses_nodes(self, ranks_per_node: int) -> bool:
        """Return whether ranks of different nodes are on one line."""
        return self.stride * self.size > ranks_per_node

    def mixes_levels(self, ranks_per_node: int) -> bool:
        """Return whether ranks of one node and of others are on one line."""
        return self.stride < ranks_per_node < self.stride * self.size


def axes_between(low: int, high: int, levels: Levels, ring: Ring) -> tuple[Axis, ...]:
    """Return the axes between blocks of ``low`` and of ``high`` ranks, fastest first: one per level (leaf switches
    count if known, PaRO 3.4), or one for all with a flat ring."""
    borders = [low]
    if ring != "flat":
        blocks = list(itertools.accumulate(levels.sizes, operator.mul))
        blocks.insert(-1, levels.ranks_per_node * (levels.nodes_per_switch or 1))
        borders += [block for block in dict.fromkeys(blocks) if low < block < high]
    borders.append(high)
    return tuple(Axis(start, stop // start) for start, stop in itertools.pairwise(borders) if stop > start)


@dataclass(frozen=True)
class Routes:
    """The axes of a layout's collectives, fastest first: reductions follow them, gathers go the other way."""

    layout: StrategyMeshes
    gather: tuple[Axis, ...]  # axes along which P is gathered from its shards, at every use
    spread: tuple[Axis, ...]  # from OS's ranks to P's shards, at the first use after each step
    secondary: tuple[Axis, ...]  # P from the secondary partition, in the backward pass
    reduce: tuple[Axis, ...]  # axes along which G is reduced over its scope, by every micro-batch
    finish: tuple[Axis, ...]  # axes along which G is reduced to OS's scope, once per step
    replicate: tuple[Axis, ...]  # axes along which G is reduced over the replicas of OS's shards, once per step

    @classmethod
    def of(cls, layout: StrategyMeshes) -> "Routes":
        """Return the routes of ``layout``."""
        p, g, os = layout.p.shards, layout.g.shards, layout.os.shards
        secondary = 1 if layout.secondary is None else layout.secondary.shards

        def between(low: int, high: int) -> tuple[Axis, ...]:
            return axes_between(low, high, layout.levels, layout.strategy.ring)

        reduce = between(1, g)
        if layout.strategy.precision.reduce != "bf16":
            # Every hop quantises again: one for all levels inside the node (ZeRO-topo V-D), and one beyond.
            levels = Levels((layout.levels.ranks_per_node, layout.levels.nodes))
            reduce = axes_between(1, g, levels, "hierarchical")
        return cls(
            layout,
            gather=between(1, p),
            spread=between(p, os),
            secondary=between(1, secondary),
            reduce=reduce,
            finish=between(g, os),
            replicate=between(os, layout.levels.world_size),
        )

    @property
    def shards(self) -> int:
        """Number of ranks over which FSDP2 shards: OS's."""
        return self.layout.os.shards

    @property
    def replicas(self) -> int:
        """Number of ranks that hold the same shard."""
        return self.layout.levels.world_size // self.shards

    @property
    def keeps_gathered(self) -> bool:
        """Whether P is not sharded, so that gathered parameters stay until they change."""
        return self.layout.p.shards == 1 and not self.layout.p_in_cache

    @property
    def caches_shards(self) -> bool:
        """Whether ranks keep P's shards besides their shards of OS: P is sharded, and less finely than OS."""
        return self.layout.p.shards < self.shards and not self.keeps_gathered
