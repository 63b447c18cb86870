"""How a block is cut into pieces: whole parameters in the order of their first use, and ranges of experts."""

import math
from collections.abc import Callable, Collection, Sequence

from fuyou.layout.pieces import Piece, PiecePart
from fuyou.model.streamed_model import StreamedModel
from fuyou.pieces.experts import expert_parameters
from fuyou.pieces.meta_block import cut_off_layer, learn
from fuyou.pieces.recording import record


def divide(
    stack: StreamedModel, layer: int, limit: int, names: Collection[str], nbytes: Callable[[str], int]
) -> tuple[Piece, ...]:
    """Cut a block into pieces of at most ``limit`` bytes each, as far as it can be cut.

    Whole parameters come in the order of their first use in the forward pass; those that one operator uses together
    stay together. Parameters that hold a matrix per expert are cut at experts, all those of a mixture alike, in ranges
    whose lengths differ by at most one. What cannot be cut is a piece of its own, however large.

    Args:
        stack: the model.
        layer: index of the block.
        limit: bytes on the device that a piece may have.
        names: first names of the parameters that are to be cut.
        nbytes: returns the bytes that a parameter of this name takes on the device.

    Raises:
        UserError: the block cannot be cut in pieces.
    """
    inside = stack.blocks[layer].named_parameters(prefix=f"{stack.block_prefix}.{layer}")
    order = [name for name, _ in inside if name in names]
    mixtures = expert_parameters(stack, layer, order)
    within = tuple(cut_off_layer(stack, layer, name) for name in order)
    found = learn(stack, layer, ("division", within), lambda: _groups(stack, layer, order, mixtures))
    pieces: list[list[PiecePart]] = []
    room = 0
    for group in found:
        own = [order[index] for index in group]
        experts = next((count for members, count in mixtures if set(own) == set(members)), None)
        if experts is not None:
            pieces += _ranges(own, experts, limit, nbytes)
            room = 0
            continue
        size = sum(nbytes(name) for name in own)
        if size > room:
            pieces.append([])
            room = limit
        pieces[-1] += [PiecePart(name) for name in own]
        room -= size
    return tuple(map(tuple, pieces))


def _groups(
    stack: StreamedModel, layer: int, order: Sequence[str], mixtures: Sequence[tuple[Sequence[str], int]]
) -> list[list[int]]:
    """Return the parameters (their indices) that cannot be apart, group by group, by first use."""
    together = [list(names) for names, _ in mixtures]
    together += [[name] for name in order if not any(name in names for names, _ in mixtures)]
    counts = {names[0]: count for names, count in mixtures}
    pieces = [
        tuple(PiecePart(name, (0, counts[names[0]]) if names[0] in counts else None) for name in names)
        for names in together
    ]
    uses = [used for used, _ in record(stack, layer, pieces, backward=False).uses]
    for own in _repeated(stack, layer, order):
        uses.append(frozenset(index for index, names in enumerate(together) if names[0] in own))
    groups: list[set[int]] = []
    for used in uses:
        touched = [group for group in groups if group & used]
        if touched:
            touched[0].update(used, *touched[1:])
            groups = [group for group in groups if group not in touched[1:]]
        else:
            groups.append(set(used))
    ordered = [sorted(order.index(name) for index in group for name in together[index]) for group in groups]
    seen = {index for group in ordered for index in group}
    for index, name in enumerate(order):  # what no token has come to, or nothing uses, follows its neighbour
        if index not in seen:
            owner = name.rpartition(".")[0]
            mine = [other for other, its in enumerate(order) if its.rpartition(".")[0] == owner and other not in seen]
            place = next((place for place, group in enumerate(ordered) if index - 1 in group), -1)
            ordered.insert(place + 1, mine)
            seen.update(mine)
    return ordered


def _repeated(stack: StreamedModel, layer: int, names: Sequence[str]) -> list[set[str]]:
    """Return the parameters of each module that is called once for each document of a packed row: as often as there are
    documents, its parameters are needed again from the first to the last."""
    isolation = stack.family.isolation
    modules = [] if isolation is None else isolation.called_for_each(stack.blocks[layer])
    prefixes = [f"{stack.block_prefix}.{layer}.{name}." for name, _ in modules]
    return [own for own in ({name for name in names if name.startswith(prefix)} for prefix in prefixes) if own]


def _ranges(names: Sequence[str], experts: int, limit: int, nbytes: Callable[[str], int]) -> list[list[PiecePart]]:
    each = -(-sum(nbytes(name) for name in names) // experts)
    count = math.ceil(experts / max(1, min(experts, limit // each)))
    ends = [experts * (index + 1) // count for index in range(count)]
    return [
        [PiecePart(name, (first, last)) for name in names] for first, last in zip([0, *ends[:-1]], ends, strict=True)
    ]
