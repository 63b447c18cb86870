"""What a rank keeps of gathered parameters from use to use: which groups' shares, how large, and in which memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from common.quantisation import Bits, quantised_nbytes
from fcdp.grouping import ParameterGroup
from fcdp.strategy.routes import Routes
from fcdp.strategy.strategy import BITS


@dataclass(frozen=True)
class CachedGroup:
    """One group's share of P, or its second shard."""

    group: ParameterGroup
    is_secondary: bool
    block: int
    """Ranks that have a copy of the parameters among them."""
    nbytes: int
    in_host: bool
    """Whether it has a place in host memory. It may be on the device all the same, if the tier is adaptive."""
    bits: Bits | None
    """In which it is kept; None: as it is."""


def all_kept(routes: Routes, groups: Sequence[ParameterGroup]) -> list[CachedGroup]:
    """Everything that a strategy keeps, if there is room for it."""
    layout = routes.layout
    found = []
    if routes.keeps_shares:
        block = layout.p.shards
        for group in groups:
            found.append(
                CachedGroup(group, False, block, routes.shards // block * group.cell_bytes, layout.p_in_cache, None)
            )
    if layout.secondary is not None:
        block, in_host = layout.secondary.shards, layout.cache != "device"
        for group in groups:
            if group.kept_after_forward:
                continue  # the backward pass does not gather it
            # Groups of mixed dtype are gathered as plain bytes, which nobody can quantise.
            bits = None if group.mixes_dtypes else BITS.get(layout.strategy.precision.secondary)
            cell = group.cell_bytes if bits is None else quantised_nbytes(group.cell_numel, bits)
            found.append(CachedGroup(group, True, block, routes.shards // block * cell, in_host, bits))
    return found


def within(budget: int | None, wanted: Sequence[CachedGroup]) -> list[CachedGroup]:
    """Those for which ``budget`` bytes of host memory suffice, in the same order; None: all of them.

    Frozen groups come first: what they have kept is good for the whole run.
    """
    if budget is None:
        return list(wanted)
    chosen = set()
    for place in sorted(range(len(wanted)), key=lambda place: wanted[place].group.trainable):
        need = wanted[place].nbytes if wanted[place].in_host else 0
        if need <= budget:
            chosen.add(place)
            budget -= need
    return [wanted[place] for place in sorted(chosen)]
