"""Which groups' gathered parameters a rank caches from use to use, how large they are, and in which memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from common.quantisation import Bits, quantised_nbytes
from fcdp.grouping import ParameterGroup
from fcdp.strategy.routes import Routes
from fcdp.strategy.strategy import BITS


@dataclass(frozen=True)
class CachedGroup:
    """A group's shard of P that is cached, or its shard in the secondary partition."""

    group: ParameterGroup
    is_secondary: bool
    """Whether it belongs to the secondary partition, kept from forward to backward."""
    block: int
    """Number of ranks that together hold one copy of the parameters."""
    nbytes: int
    in_host: bool
    """Whether it has a place in host memory. It may still be on the device, if the tier is adaptive."""
    bits: Bits | None
    """Bits per element that it is quantised to; None: it is not."""


def all_cached(routes: Routes, groups: Sequence[ParameterGroup]) -> list[CachedGroup]:
    """Return everything that a strategy caches if there is room for it."""
    layout = routes.layout
    found = []
    if routes.caches_shards:
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


def fit_into(budget: int | None, wanted: Sequence[CachedGroup]) -> list[CachedGroup]:
    """Return those of ``wanted`` for which ``budget`` bytes of host memory suffice, in order; None: all of them.

    Frozen groups are served first: their cached parameters stay valid for the whole run.
    """
    if budget is None:
        return list(wanted)
    chosen = set()
    for index in sorted(range(len(wanted)), key=lambda index: wanted[index].group.trainable):
        need = wanted[index].nbytes if wanted[index].in_host else 0
        if need <= budget:
            chosen.add(index)
            budget -= need
    return [wanted[index] for index in sorted(chosen)]
