"""In which order a block's pieces are needed: learnt by running it without values."""

from collections.abc import Sequence
from dataclasses import replace

from fuyou.layout.pieces import Piece, PieceOrder, Stage
from fuyou.model.streamed_model import StreamedModel
from fuyou.pieces.meta_block import cut_off_layer, learn
from fuyou.pieces.recording import only_piece, record
from fuyou.pieces.run import Use


def find_order(stack: StreamedModel, layer: int, pieces: Sequence[Piece]) -> PieceOrder:
    """Find the order in which a block's pieces are needed in the forward pass and in the backward pass.

    What is trained is what requires gradients in ``stack.model``. Pieces of experts are in the order even if no token
    may come to them: a pass skips what it does not need. Blocks of one structure share one run.

    Raises:
        UserError: the block cannot be cut in pieces, or not in these.
    """
    inside = tuple(tuple((cut_off_layer(stack, layer, part.name), part.experts) for part in piece) for piece in pieces)
    return learn(stack, layer, ("order", inside), lambda: _order(stack, layer, pieces))


def _order(stack: StreamedModel, layer: int, pieces: Sequence[Piece]) -> PieceOrder:
    passes = [record(stack, layer, pieces, backward) for backward in (False, True)]
    forward, backward = (_stages([(only_piece(needed, pieces), use) for needed, use in one.uses]) for one in passes)
    if not all(one.complete for one in passes):
        for index, piece in enumerate(pieces):
            trains = any(stack.model.get_parameter(part.name).requires_grad for part in piece)
            if index not in {stage.piece for stage in forward}:
                _insert_forward(forward, Stage(index, True, False, False))
            if index not in {stage.piece for stage in backward}:
                _insert_backward(backward, Stage(index, True, True, trains))
    return PieceOrder(tuple(stage.piece for stage in forward), tuple(backward), passes[0].between_bytes)


def _stages(uses: Sequence[tuple[int, Use]]) -> list[Stage]:
    stages: list[Stage] = []
    for piece, use in uses:
        if not stages or stages[-1].piece != piece:
            stages.append(Stage(piece, False, False, False))
        last = stages[-1]
        stages[-1] = replace(
            last,
            recomputes=last.recomputes or use is Use.FORWARD,
            differentiates=last.differentiates or use is Use.BACKWARD,
            trains=last.trains or use is Use.GRADIENT,
        )
    return stages


def _insert_forward(stages: list[Stage], new: Stage) -> None:
    earlier = [place for place, stage in enumerate(stages) if stage.piece == new.piece - 1]
    stages.insert(earlier[0] + 1 if earlier else 0, new)


def _insert_backward(stages: list[Stage], new: Stage) -> None:
    recomputing = replace(new, differentiates=False, trains=False)
    places = [place for place, stage in enumerate(stages) if stage.piece == new.piece - 1]
    if not places:
        stages.append(replace(new, recomputes=False))
        stages.insert(0, recomputing)
    elif len(places) == 1:  # the last one of the recomputation is the first one of the backward pass
        place = places[0]
        before = stages[place]
        stages[place : place + 1] = [
            replace(before, differentiates=False, trains=False),
            new,
            replace(before, recomputes=False),
        ]
    else:
        stages.insert(places[-1], replace(new, recomputes=False))
        stages.insert(places[0] + 1, recomputing)
