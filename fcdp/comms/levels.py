"""The communication levels along a strategy's axes, with its shape of ring and its precision."""

import functools
from collections.abc import Sequence
from typing import cast

from fcdp.comms.ho_ring import HoRing
from fcdp.comms.quantised import QuantisedLevel
from fcdp.comms.rank_level import CommLevel, FlatRing, RankLevel
from fcdp.strategy.routes import Axis
from fcdp.strategy.strategy import BITS, Format, Ring
from fcdp.strategy.topology import Purpose, Topology
from fcdp.traffic import Traffic


def make_levels(
    topology: Topology,
    axes: Sequence[Axis],
    purpose: Purpose,
    traffic: Traffic,
    ring: Ring,
    precision: Format = "bf16",
) -> list[CommLevel]:
    """Make the levels along ``axes``, fastest first; ``ho`` makes one of all. Collective: process groups are made.

    A reduction below bf16 takes one hop along each axis, as partial sums would be quantised at every step of a ring."""
    bits = BITS.get(precision)
    if purpose == "reduce" and bits is not None:
        hops = [RankLevel(topology, axis, purpose, traffic) for axis in axes]
        return [QuantisedLevel(hop, bits) for hop in hops]
    ranks = topology.ranks_per_node
    levels = [(FlatRing if axis.mixes_levels(ranks) else RankLevel)(topology, axis, purpose, traffic) for axis in axes]
    made: list[CommLevel] = list(levels)
    if ring == "ho" and levels:
        made = [functools.reduce(HoRing, levels[1:], cast(CommLevel, levels[0]))]
    return made if bits is None else [QuantisedLevel(level, bits) for level in made]
