"""Cut a block into pieces (whole parameters by first use, and ranges of experts), and find the order of their use."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter

from common.errors import UserError
from common.models.adapters.memory import AdapterMemory, adapter_memory
from fuyou.layout.cutting import cut_blocks
from fuyou.layout.model_layout import ModelLayout
from fuyou.layout.record_parts import Piece, PieceOrder, PiecePart, Stage
from fuyou.model.streamed_model import StreamedModel
from fuyou.pieces.handles import expert_parameters
from fuyou.pieces.meta_block import cut_off_layer, learn
from fuyou.pieces.recording import Uses, record
from fuyou.pieces.run import Use


def divide(
    stack: StreamedModel, layer: int, limit: int, names: Collection[str], nbytes: Callable[[str], int]
) -> tuple[Piece, ...]:
    """Cut a block into pieces of at most ``limit`` bytes each, as far as it can be cut.

    Whole parameters come in the order of their first use in the forward pass; those that one operator uses together
    stay together. Parameters that hold a matrix per expert are cut at experts, all those of a mixture alike, in ranges
    whose lengths differ by at most one. What cannot be cut is a separate piece, however large.

    Args:
        limit: bytes on the device that a piece may have.
        names: first names of the parameters that are to be cut.
        nbytes: returns the bytes that a parameter of this name takes on the device.

    Raises:
        UserError: if the block cannot be cut in pieces.
    """
    inside = stack.blocks[layer].named_parameters(prefix=f"{stack.block_prefix}.{layer}")
    order = [name for name, _ in inside if name in names]
    mixtures = expert_parameters(stack, layer, order)
    within = tuple(cut_off_layer(stack, layer, name) for name in order)
    groups = learn(stack, layer, ("division", within), lambda: _groups(stack, layer, order, mixtures))
    pieces: list[list[PiecePart]] = []
    room = 0
    for group in groups:
        members = [order[index] for index in group]
        experts = next((count for names, count in mixtures if set(names) == set(members)), None)
        if experts is not None:
            rows = {name: _rows(stack, name) for name in members}
            each = sum(-(-nbytes(name) // rows[name]) for name in members)
            pieces += _ranges(members, experts, limit, each)
            pieces += [[PiecePart(name, (experts, count))] for name, count in rows.items() if count > experts]
            room = 0
            continue
        size = sum(nbytes(name) for name in members)
        if size > room:
            pieces.append([])
            room = limit
        pieces[-1] += [PiecePart(name) for name in members]
        room -= size
    return tuple(map(tuple, pieces))


def _groups(
    stack: StreamedModel, layer: int, order: Sequence[str], mixtures: Sequence[tuple[Sequence[str], int]]
) -> list[list[int]]:
    """Return the parameters (their indices) that cannot be apart, group by group, by first use."""
    together = [list(names) for names, _ in mixtures]
    together += [[name] for name in order if not any(name in names for names, _ in mixtures)]
    counts = {names[0] for names, _ in mixtures}
    pieces = [
        tuple(PiecePart(name, (0, _rows(stack, name)) if names[0] in counts else None) for name in names)
        for names in together
    ]
    uses = [used for used, _ in record(stack, layer, pieces, backward=False)[0]]
    for repeated in _repeated(stack, layer, order):
        uses.append(frozenset(index for index, names in enumerate(together) if names[0] in repeated))
    groups: list[set[int]] = []
    for used in uses:
        touched = [group for group in groups if group & used]
        if touched:
            touched[0].update(used, *touched[1:])
            groups = [group for group in groups if group not in touched[1:]]
        else:
            groups.append(set(used))
    ordered = [sorted(order.index(name) for index in group for name in together[index]) for group in groups]
    for index in range(len(order)):
        if not any(index in group for group in ordered):  # nothing uses it: it follows its neighbor
            position = next((position for position, group in enumerate(ordered) if index - 1 in group), -1)
            ordered.insert(position + 1, [index])
    return ordered


def _rows(stack: StreamedModel, name: str) -> int:
    return int(stack.model.get_parameter(name).shape[0])


def _repeated(stack: StreamedModel, layer: int, names: Sequence[str]) -> list[set[str]]:
    """Return the parameters of each module that is called once for each document of a packed row: as often as there are
    documents, its parameters are needed again from the first to the last."""
    isolation = stack.family.isolation
    modules = [] if isolation is None else isolation.called_for_each(stack.blocks[layer])
    prefixes = [f"{stack.block_prefix}.{layer}.{name}." for name, _ in modules]
    repeated = ({name for name in names if name.startswith(prefix)} for prefix in prefixes)
    return [members for members in repeated if members]


def _ranges(names: Sequence[str], experts: int, limit: int, each: int) -> list[list[PiecePart]]:
    count = math.ceil(experts / max(1, min(experts, limit // each)))
    ends = [experts * (index + 1) // count for index in range(count)]
    return [
        [PiecePart(name, (first, last)) for name in names]
        for first, last in zip([0, *ends[:-1]], ends, strict=True)
    ]


def find_order(stack: StreamedModel, layer: int, pieces: Sequence[Piece]) -> PieceOrder:
    """Find the order in which a block's pieces are needed in the forward pass and in the backward pass.

    What is trained is what requires gradients in ``stack.model``. Pieces of experts are in the order even if no token
    may come to them: a pass skips what it does not need. Blocks of one structure share one run.

    Raises:
        UserError: if the block cannot be cut in pieces, or not in these.
    """
    inside = tuple(
        tuple((cut_off_layer(stack, layer, part.name), part.experts) for part in piece) for piece in pieces
    )
    return learn(stack, layer, ("order", inside), lambda: _order(stack, layer, pieces))


def _order(stack: StreamedModel, layer: int, pieces: Sequence[Piece]) -> PieceOrder:
    (forward, between_bytes), (backward, _) = (
        record(stack, layer, pieces, backward) for backward in (False, True)
    )
    stages = _stages(backward, pieces)
    return PieceOrder(tuple(stage.piece for stage in _stages(forward, pieces)), tuple(stages), between_bytes)


def _stages(uses: Uses, pieces: Sequence[Piece]) -> list[Stage]:
    stages = []
    for needed, group in groupby(uses, key=itemgetter(0)):
        if len(needed) > 1:
            names = [pieces[index][0].name for index in sorted(needed)]
            raise UserError(
                f"One operator uses {' and '.join(names)}, which have been cut into different pieces."
            )
        purposes, (piece,) = {use for _, use in group}, needed
        stages.append(
            Stage(piece, Use.FORWARD in purposes, Use.BACKWARD in purposes, Use.GRADIENT in purposes)
        )
    return stages


def in_pieces(stack: StreamedModel, layout: ModelLayout, piece_bytes: int) -> ModelLayout:
    """Return the layout of a model whose blocks are cut into pieces of at most ``piece_bytes``, in the compute dtype.

    Args:
        piece_bytes: largest size; a larger matrix is a separate piece.

    Raises:
        UserError: if this family's blocks cannot be cut.
    """
    pieces = []
    orders = []
    for layer, (index,) in enumerate(layout.blocks):
        record = layout.records[index]
        sizes = {slot.name: slot.span * record.precision.parameter_bytes for slot in record.parameters}
        cut = divide(stack, layer, piece_bytes, sizes, sizes.__getitem__)
        pieces.append(cut)
        orders.append(find_order(stack, layer, cut))
    adapters = (
        adapter_memory(block, largest_share(cut)) for block, cut in zip(stack.blocks, pieces, strict=True)
    )
    return replace(
        cut_blocks(layout, pieces, orders, piece_bytes), block_adapter_memory=AdapterMemory.most(adapters)
    )


def largest_share(pieces: Sequence[Piece]) -> float | None:
    """Return the largest fraction of a mixture's experts that is in one piece; None: the block is not cut."""
    if len(pieces) == 1:
        return None
    ranged = [(part.name, *part.experts) for piece in pieces for part in piece if part.experts is not None]
    experts = {name: last for name, _, last in sorted(ranged, key=lambda item: item[2])}
    return max(((last - first) / experts[name] for name, first, last in ranged), default=1.0)
