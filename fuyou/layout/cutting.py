"""Cut blocks' records into pieces, and a parameter's rows into ranges that are read at once."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from common.errors import UserError
from fuyou.layout.frozen_weights import FrozenDtype
from fuyou.layout.model_layout import ModelLayout
from fuyou.layout.record import Record
from fuyou.layout.record_parts import ParameterSlot, Piece, PieceOrder


def cut_blocks(
    layout: ModelLayout, pieces: Sequence[tuple[Piece, ...]], orders: Sequence[PieceOrder], piece_bytes: int
) -> ModelLayout:
    """Return the layout with each block's record cut into its pieces, one record per piece.

    Args:
        pieces: pieces of each block; a block in one piece is not cut.
        orders: order of each block's pieces.
        piece_bytes: the requested size of the largest piece.

    Raises:
        UserError: if two pieces of a block had gradients on the device at the same time, or a piece is never used.
    """
    records: list[Record] = []
    indices: dict[int, int] = {}  # old to new index of records that are not cut
    blocks = {index: layer for layer, (index,) in enumerate(layout.blocks)}
    cut: dict[int, tuple[int, ...]] = {}
    for record in layout.records:
        layer = blocks.get(record.index)
        if layer is None or len(pieces[layer]) == 1:
            indices[record.index] = len(records)
            records.append(replace(record, index=len(records)))
            continue
        _check_order(record, pieces[layer], orders[layer])
        cut[layer] = tuple(range(len(records), len(records) + len(pieces[layer])))
        for number, piece in enumerate(pieces[layer]):
            records.append(_piece_of(record, len(records), f"{record.name}, piece {number}", piece))

    def new_index(index: int | None) -> int | None:
        return None if index is None else indices[index]

    return replace(
        layout,
        records=tuple(record.shared(layout.share) for record in records),
        embedding=indices[layout.embedding],
        head=indices[layout.head],
        blocks=tuple(cut.get(layer) or (indices[index],) for layer, (index,) in enumerate(layout.blocks)),
        block_adapters=tuple(new_index(index) for index in layout.block_adapters),
        embedding_adapter=new_index(layout.embedding_adapter),
        head_adapter=new_index(layout.head_adapter),
        tower=new_index(layout.tower),
        orders=tuple(orders),
        piece_bytes=piece_bytes,
        widened=sum(_compressed_weights(record) for record in layout.records)
        - sum(map(_compressed_weights, records)),
    )


def _piece_of(record: Record, index: int, name: str, piece: Piece) -> Record:
    slots = {slot.names[0]: slot for slot in record.parameters}
    parts = {part.name: part for part in piece}
    whole = [(slots[part.name], part.experts) for part in piece]
    entries = [
        (
            slot.names,
            slot.shape if experts is None else (experts[1] - experts[0], *slot.shape[1:]),
            slot.decay,
        )
        for slot, experts in whole
    ]
    held = [part.name for part in piece if not slots[part.name].trained]
    compressed = {}
    for slot, experts in whole:
        parameter = slot.compressed
        if parameter is not None and experts is not None:
            width = math.prod(slot.shape[1:])
            parameter = parameter.between(experts[0] * width, experts[1] * width)
        if parameter is not None:
            compressed[slot.names[0]] = parameter
    is_compressed = record.frozen is FrozenDtype.CHECKPOINT
    built = Record.build(
        index,
        name,
        record.kind,
        record.precision,
        entries,
        trainable=record.trainable and len(held) < len(piece),
        frozen=FrozenDtype.PLAIN if is_compressed and not compressed else record.frozen,
        held=held,
        wide=[part.name for part in piece if slots[part.name].wide],
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


def _compressed_weights(record: Record) -> int:
    return sum(slot.numel for slot in record.parameters if slot.compressed is not None)


def _check_order(record: Record, pieces: Sequence[Piece], order: PieceOrder) -> None:
    names = {slot.names[0] for slot in record.parameters if slot.trained} if record.trainable else set()
    trained = [index for index, piece in enumerate(pieces) if any(part.name in names for part in piece)]
    never = set(trained) - (set(order.forward) & {stage.piece for stage in order.backward})
    if never:
        raise UserError(
            f"{record.name} cannot be trained in pieces: {pieces[min(never)][0].name} is a separate piece, and no "
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


SPAN_ELEMENTS = 4 << 20  # Elements that are read at once, unless a single row (an expert) has more
# Upper bound of the bytes that one of these takes: its value, at most fp32, and half a row more where a checkpoint has
# experts in two parts.
BYTES_PER_ELEMENT = 6


def row_spans(slot: ParameterSlot) -> list[tuple[int, int]]:
    """Return the ranges in which a parameter's rows are read, as rows of the whole parameter."""
    start = 0 if slot.experts is None else slot.experts[0]
    rows = slot.shape[0]
    step = max(1, SPAN_ELEMENTS // max(1, slot.numel // rows))
    return [(start + first, start + min(first + step, rows)) for first in range(0, rows, step)]


def filling_bytes(records: Iterable[Record]) -> int:
    """Return the peak bytes of values in memory while a store is filled from a source that reads rows."""
    return BYTES_PER_ELEMENT * max(
        min(slot.numel, max(SPAN_ELEMENTS, slot.numel // slot.shape[0]))
        for record in records
        for slot in record.parameters
        if slot.shape
    )


def whole_elements(records: Iterable[Record], reads_rows: Callable[[str], bool]) -> int:
    """Return the peak elements of parameters that a source must read whole while a store is filled.

    If some experts are in one record and some in the next, their parameter stays in memory until the last.

    Args:
        reads_rows: whether the source reads rows of the parameter with this name.
    """
    most = 0
    for record in records:
        whole = [
            slot for slot in record.parameters if not reads_rows(slot.names[0]) and slot.compressed is None
        ]
        cut = sum(
            slot.numel // slot.shape[0] * slot.all_experts for slot in whole if slot.experts is not None
        )
        most = max(most, cut + max((slot.numel for slot in whole if slot.experts is None), default=0))
    return most
