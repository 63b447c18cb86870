"""Levels that strategies shape: two axes at once (HO-Ring), and fewer bits.

Both stand wherever a :class:`fcdp.rank_level.RankLevel` does, in gathers (``fcdp.all_gather``) and in reductions
(``fcdp.reduce_scatter``).
"""

from fcdp.collectives.ho_ring import HoRing
from fcdp.collectives.quantised import QuantisedLevel
from fcdp.collectives.shaping import shaped_levels

__all__ = ["HoRing", "QuantisedLevel", "shaped_levels"]
