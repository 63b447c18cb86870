"""Cutting a model's blocks: which parameters go together, and in which order the pieces are needed."""

from collections.abc import Sequence
from dataclasses import replace

from common.errors import UserError
from common.models.adapters.memory import AdapterMemory, adapter_memory
from fuyou.layout.cutting import cut_blocks
from fuyou.layout.model_layout import ModelLayout
from fuyou.layout.pieces import Piece
from fuyou.model.streamed_model import StreamedModel
from fuyou.pieces.division import divide
from fuyou.pieces.meta_block import unchanged
from fuyou.pieces.order import find_order


def in_pieces(stack: StreamedModel, shape: ModelLayout, piece_bytes: int) -> ModelLayout:
    """Return the layout of a model whose blocks are cut into pieces of at most ``piece_bytes``, in the compute dtype.

    Args:
        stack: the model.
        shape: its records, with each block in one.
        piece_bytes: largest size; a matrix that is larger is a piece of its own.

    Raises:
        UserError: this family's blocks cannot be cut, or they are compiled.
    """
    if shape.compiled:
        raise UserError("Compiled blocks cannot be in pieces: leave --compile out.")
    pieces, orders = [], []
    with unchanged(stack):
        for layer, (index,) in enumerate(shape.blocks):
            record = shape.records[index]
            sizes = {slot.name: slot.numel * record.precision.parameter_bytes for slot in record.parameters}
            cut = divide(stack, layer, piece_bytes, sizes, sizes.__getitem__)
            pieces.append(cut)
            orders.append(find_order(stack, layer, cut))
    adapters = (adapter_memory(block, largest_share(cut)) for block, cut in zip(stack.blocks, pieces, strict=True))
    return replace(cut_blocks(shape, pieces, orders, piece_bytes), block_adapter_memory=AdapterMemory.most(adapters))


def largest_share(pieces: Sequence[Piece]) -> float | None:
    """Return the largest fraction of a mixture's experts that is in one piece; None: the block is not cut."""
    if len(pieces) == 1:
        return None
    ranged = [(part.name, *part.experts) for piece in pieces for part in piece if part.experts is not None]
    experts = {name: last for name, _, last in sorted(ranged, key=lambda one: one[2])}
    return max(((last - first) / experts[name] for name, first, last in ranged), default=1.0)
