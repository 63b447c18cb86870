"""Layouts of small stacks, for schedules and simulations: records of awkward sizes, and blocks in pieces."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from fuyou.layout.cutting import cut_blocks
from fuyou.layout.model_layout import ModelLayout, Phase
from fuyou.layout.record import Kind, Precision, Record
from fuyou.layout.record_parts import Piece, PieceOrder, PiecePart, Stage

BF16 = Precision(torch.bfloat16)
WHOLE = PieceOrder((0,), (Stage(0, True, True, True),))
"""The order of a block in one piece, which nobody asks for."""


@dataclass(frozen=True)
class Cut:
    """A block in pieces."""

    order: PieceOrder
    held: frozenset[int] = frozenset()
    """Pieces that are not trained although the block is."""

    @property
    def pieces(self) -> int:
        return 1 + max(self.order.forward)


def step_layout(
    layers: int,
    tied: bool,
    precision: Precision = BF16,
    frozen: bool = False,
    cuts: Mapping[int, Cut] | None = None,
    islands: bool = False,
) -> ModelLayout:
    """Records of a small stack; outer ones are larger, and every record has its own size.

    ``frozen``: all of these are, and there are adapters for the head and for every block but the first of several.
    ``islands``: there are such records next to trained ones, too, of tied outer records for both of their visits.
    ``cuts``: the blocks that are in pieces, each with its own size.
    """
    cuts = {} if cuts is None else cuts
    outer = [("outer", 9000)] if tied else [("embedding", 9000), ("head", 7000)]
    records = [
        Record.build(
            index,
            name,
            Kind.NON_BLOCK,
            precision,
            [((f"{name}.weight",), (size,), True)],
            trainable=not frozen,
        )
        for index, (name, size) in enumerate(outer)
    ]
    for layer in range(layers):
        cut = cuts.get(layer, Cut(WHOLE))
        parameters = [
            ((f"{layer}.{piece}.weight",), (40 + layer + 60 * piece, 50), True) for piece in range(cut.pieces)
        ]
        parameters.append(((f"{layer}.0.bias",), (50,), False))
        held = [names[0] for names, _, _ in parameters if int(names[0].split(".")[1]) in cut.held]
        records.append(
            Record.build(
                len(records),
                f"block {layer}",
                Kind.BLOCK,
                precision,
                parameters,
                trainable=not frozen,
                held=held,
            )
        )
    blocks = tuple((index,) for index in range(len(outer), len(records)))
    if not frozen and not islands:
        return _in_pieces(ModelLayout(tuple(records), 0, len(outer) - 1, blocks, precision), cuts)
    adapted = [layer for layer in range(layers) if layer or layers == 1]
    for name in ("head", *(f"block {layer}" for layer in adapted)):
        size = 30 + len(records)
        records.append(
            Record.build(
                len(records), f"{name} adapters", Kind.ADAPTER, Precision(torch.float32),
                [((f"{name}.a",), (size, 40), True)],
            )
        )  # fmt: skip
    head = blocks[-1][0] + 1
    adapters = tuple(head + 1 + adapted.index(layer) if layer in adapted else None for layer in range(layers))
    embedding = head if islands and tied and not frozen else None
    layout = ModelLayout(tuple(records), 0, len(outer) - 1, blocks, precision, adapters, embedding, head)
    return _in_pieces(layout, cuts)


def _in_pieces(layout: ModelLayout, cuts: Mapping[int, Cut]) -> ModelLayout:
    if not cuts:
        return layout
    pieces: list[tuple[Piece, ...]] = []
    for layer, (index,) in enumerate(layout.blocks):
        names = [slot.name for slot in layout.records[index].parameters]
        count = cuts.get(layer, Cut(WHOLE)).pieces
        pieces.append(
            tuple(
                tuple(PiecePart(name) for name in names if name.startswith(f"{layer}.{piece}."))
                for piece in range(count)
            )
        )
    orders = [cuts.get(layer, Cut(WHOLE)).order for layer in range(len(layout.blocks))]
    return cut_blocks(layout, pieces, orders, 1)


# -- orders of pieces -------------------------------------------------------------------------------------------------


def _order(forward: list[int], recomputed: list[int], backward: list[Stage]) -> PieceOrder:
    """Return the order whose backward pass recomputes and then differentiates; neighbours of one piece are joined."""
    stages = [Stage(piece, True, False, False) for piece in recomputed]
    for stage in backward:
        if stages and stages[-1].piece == stage.piece:
            last = stages.pop()
            stage = Stage(stage.piece, last.recomputes or stage.recomputes, True, last.trains or stage.trains)
        stages.append(stage)
    return PieceOrder(tuple(forward), tuple(stages))


def one_by_one(pieces: int, held: frozenset[int] = frozenset()) -> Cut:
    """A block whose pieces are needed one after the other, as in most families."""
    all_of_them = list(range(pieces))
    return Cut(
        _order(
            all_of_them,
            all_of_them,
            [Stage(one, False, True, one not in held) for one in reversed(all_of_them)],
        ),
        held,
    )


def used_twice(pieces: int) -> Cut:
    """A block that ends with the piece with which it begins, whose gradient comes from both uses."""
    forward = [*range(pieces), 0]
    backward = [Stage(one, False, True, bool(place)) for place, one in enumerate(reversed(forward))]
    return Cut(_order(forward, forward, backward))


def skipping(pieces: int) -> Cut:
    """A block whose last piece need not be computed again, and whose others are not differentiated at once."""
    backward = [Stage(one, False, True, True) for one in reversed(range(pieces))]
    return Cut(_order(list(range(pieces)), list(range(pieces - 1)), backward))


def used_after_its_gradient(pieces: int) -> Cut:
    """A block that needs its last piece once more when the gradient of that has arrived, for other gradients' sake."""
    last = pieces - 1
    backward = [Stage(last, False, True, True), Stage(0, False, True, False), Stage(last, False, True, False)]
    backward += [Stage(one, False, True, True) for one in reversed(range(last))]
    return Cut(_order(list(range(pieces)), list(range(pieces)), backward))


CUTS = (one_by_one, used_twice, skipping, used_after_its_gradient)
"""Ways in which a block may need its pieces, two at least."""


# -- what a step computes, from the orders alone ----------------------------------------------------------------------


@dataclass(frozen=True)
class Computation:
    """One micro-batch of a visit, as it should be."""

    phase: Phase
    layer: int | None
    record: int
    micro: int
    begins: bool
    """Whether it takes the input of its pass."""
    ends: bool
    """Whether it makes the output of its pass."""
    adds_to: tuple[int, ...] = ()
    """Records whose gradients it adds to."""


def computations(
    layout: ModelLayout, micro: int, train: bool, own_loss: bool = False, reference: bool = False,
    together: int | None = None,
) -> Iterator[Computation]:  # fmt: skip
    """Yield all computations of a step, in order; with a loss of the caller's own, and maybe a reference.

    ``together``: micro-batches that go forward through a block in pieces together.
    """
    layers, trained = len(layout.blocks), frozenset(layout.trainable)
    forward = range(micro * (2 if reference else 1))

    def trained_of(*records: int | None) -> tuple[int, ...]:
        return tuple(index for index in records if index in trained)

    for m in forward:
        yield Computation(Phase.EMBED_FORWARD, None, layout.embedding, m, True, True)
    for layer, records in enumerate(layout.blocks):
        pieces = layout.orders[layer].forward if len(records) > 1 else (0,)
        size = together if together and len(pieces) > 1 else len(forward)
        for group in (forward[first : first + size] for first in range(0, len(forward), size)):
            for place, piece in enumerate(pieces):
                for m in group:
                    ends = place == len(pieces) - 1
                    yield Computation(Phase.BLOCK_FORWARD, layer, records[piece], m, not place, ends)
    for m in forward if own_loss or not train else ():
        yield Computation(Phase.HEAD_EVAL, layers, layout.head, m, True, True)
    if not train:
        return
    for m in range(micro):
        yield Computation(
            Phase.HEAD, layers, layout.head, m, True, True, trained_of(layout.head, layout.head_adapter)
        )
    last = 0 if layout.embedding in trained else min(_trained_layers(layout), default=layers)
    for layer in reversed(range(last, layers)):
        yield from _block_backward(layout, layer, micro)
    if layout.embedding in trained:
        adds_to = trained_of(layout.embedding, layout.embedding_adapter)
        for m in range(micro):
            yield Computation(Phase.EMBED_BACKWARD, None, layout.embedding, m, True, True, adds_to)


def _trained_layers(layout: ModelLayout) -> list[int]:
    trained = frozenset(layout.trainable)
    adapters = layout.block_adapters or [None] * len(layout.blocks)
    return [layer for layer, block in enumerate(layout.blocks) if trained & {*block, adapters[layer]}]


def _block_backward(layout: ModelLayout, layer: int, micro: int) -> Iterator[Computation]:
    records, trained = layout.blocks[layer], frozenset(layout.trainable)
    adapter = layout.block_adapters[layer] if layout.block_adapters else None
    stages = layout.orders[layer].backward if len(records) > 1 else WHOLE.backward

    def computation(place: int, m: int) -> Computation:
        record, ends = records[stages[place].piece], place == len(stages) - 1
        begun = any(stage.trains for stage in stages[: place + 1] if stage.piece == stages[place].piece)
        adds_to = [record] * (record in trained and begun) + [adapter] * (adapter is not None)
        return Computation(Phase.BLOCK_BACKWARD, layer, record, m, not place, ends, tuple(adds_to))

    if trained & set(records):  # the gradient of each piece is complete before that of the next begins
        yield from (computation(place, m) for place in range(len(stages)) for m in range(micro))
    else:  # the insides of one micro-batch at a time
        yield from (computation(place, m) for m in range(micro) for place in range(len(stages)))
