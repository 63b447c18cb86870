"""Cutting blocks' records into pieces: one record for each, with the parameters and ranges of experts that it holds."""

import math
from collections.abc import Sequence
from dataclasses import replace

from common.errors import UserError
from common.models.checkpoint.compressed import CompressedParameter
from fuyou.layout.frozen_weights import FrozenDtype
from fuyou.layout.model_layout import ModelLayout
from fuyou.layout.pieces import Piece, PieceOrder
from fuyou.layout.record import Record
from fuyou.layout.record_parts import ParameterSlot


def cut_blocks(
    layout: ModelLayout, pieces: Sequence[tuple[Piece, ...]], orders: Sequence[PieceOrder], piece_bytes: int
) -> ModelLayout:
    """Return the layout with each block's record cut into its pieces; all other records are as they were.

    Args:
        layout: of a model whose blocks are one record each.
        pieces: of each block; a block in one piece stays as it is.
        orders: of each block's pieces.
        piece_bytes: largest piece that was asked for.

    Raises:
        UserError: gradients of two pieces of a block would be on the device at the same time, or nothing uses a piece.
    """
    made: list[Record] = []
    places: dict[int, int] = {}  # index of a record that is not cut -> its new index
    blocks = {index: layer for layer, (index,) in enumerate(layout.blocks)}
    cut: dict[int, tuple[int, ...]] = {}
    for record in layout.records:
        layer = blocks.get(record.index)
        if layer is None or len(pieces[layer]) == 1:
            places[record.index] = len(made)
            made.append(replace(record, index=len(made)))
            continue
        _check_order(record, pieces[layer], orders[layer])
        cut[layer] = tuple(range(len(made), len(made) + len(pieces[layer])))
        for number, piece in enumerate(pieces[layer]):
            made.append(_piece_of(record, len(made), f"{record.name}, piece {number}", piece))

    def place(index: int | None) -> int | None:
        return None if index is None else places[index]

    return replace(
        layout,
        records=tuple(record.shared(layout.share) for record in made),
        embedding=places[layout.embedding],
        head=places[layout.head],
        blocks=tuple(cut.get(layer) or (places[index],) for layer, (index,) in enumerate(layout.blocks)),
        block_adapters=tuple(place(index) for index in layout.block_adapters),
        embedding_adapter=place(layout.embedding_adapter),
        head_adapter=place(layout.head_adapter),
        tower=place(layout.tower),
        orders=tuple(orders),
        piece_bytes=piece_bytes,
        widened=sum(_compressed_weights(one) for one in layout.records) - sum(map(_compressed_weights, made)),
    )


def _piece_of(record: Record, index: int, name: str, piece: Piece) -> Record:
    slots = {slot.names[0]: slot for slot in record.parameters}
    parts = {part.name: part for part in piece}
    whole = [(slots[part.name], part.experts) for part in piece]
    entries = [(slot.names, _shape(slot, experts), slot.decay) for slot, experts in whole]
    held = [part.name for part in piece if not slots[part.name].trained]
    cut = {part.name: _cut_compressed(slots[part.name], part.experts) for part in piece}
    compressed = {name: one for name, one in cut.items() if one is not None}
    in_own_bytes = record.frozen is FrozenDtype.CHECKPOINT
    built = Record.build(
        index,
        name,
        record.kind,
        record.precision,
        entries,
        trainable=record.trainable and len(held) < len(piece),
        frozen=FrozenDtype.PLAIN if in_own_bytes and not compressed else record.frozen,
        held=held,
        compressed=compressed,
    )
    placed = tuple(
        replace(
            slot,
            experts=parts[slot.names[0]].experts,
            all_experts=slots[slot.names[0]].shape[0] if parts[slot.names[0]].experts else 0,
            activity=slots[slot.names[0]].activity,
        )
        for slot in built.parameters
    )
    return replace(built, parameters=placed)


def _shape(slot: ParameterSlot, experts: tuple[int, int] | None) -> tuple[int, ...]:
    return slot.shape if experts is None else (experts[1] - experts[0], *slot.shape[1:])


def _compressed_weights(record: Record) -> int:
    return sum(slot.numel for slot in record.parameters if slot.compressed is not None)


def _cut_compressed(slot: ParameterSlot, experts: tuple[int, int] | None) -> CompressedParameter | None:
    if slot.compressed is None or experts is None:
        return slot.compressed
    width = math.prod(slot.shape[1:])
    return slot.compressed.between(experts[0] * width, experts[1] * width)


def _check_order(record: Record, pieces: Sequence[Piece], order: PieceOrder) -> None:
    names = {slot.names[0] for slot in record.parameters if slot.trained} if record.trainable else set()
    trained = [index for index, piece in enumerate(pieces) if any(part.name in names for part in piece)]
    never = set(trained) - (set(order.forward) & {stage.piece for stage in order.backward})
    if never:
        raise UserError(
            f"{record.name} cannot be trained in pieces: {pieces[min(never)][0].name} is a piece of its own, and no "
            "pass through the block uses it. Give more --device-memory, so that a whole block fits."
        )
    holds = order.holds_gradient(trained)
    sequence = [stage.piece for stage, held in zip(order.backward, holds, strict=True) if held]
    changes = [piece for before, piece in zip([-1, *sequence], sequence, strict=False) if piece != before]
    if len(changes) != len(set(changes)):
        raise UserError(
            f"{record.name} cannot be trained in pieces: a backward pass comes back to parameters that it had left. "
            "Train adapters (--lora-rank), or give more --device-memory."
        )
