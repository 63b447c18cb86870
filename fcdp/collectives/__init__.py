"""Collectives that strategies shape: both levels at once (HO-Ring), and quantised.

* :class:`HoRing`: gather and reduce-scatter of cells ``[N, M, c]`` over two :class:`fcdp.rank_level.RankLevel`.
* :class:`QuantisedLevel`: stands for a ``RankLevel`` in whatever is built of levels.
* :class:`QuantisedGather`: any gather, of int8 or int4.
* :class:`ShapedAllGather`, :class:`ShapedReduceScatter`: what FSDP2's ``set_custom_all_gather`` and
  ``set_custom_reduce_scatter`` take, by a strategy's ``ring`` and ``precision``.
"""

from fcdp.collectives.comms import BITS, ShapedAllGather, ShapedReduceScatter
from fcdp.collectives.ho_ring import HoRing
from fcdp.collectives.quantised import QuantisedGather, QuantisedLevel

__all__ = ["BITS", "HoRing", "QuantisedGather", "QuantisedLevel", "ShapedAllGather", "ShapedReduceScatter"]
