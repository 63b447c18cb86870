"""Blocks in pieces: how a block that is larger than the device is cut, and in which order its pieces are needed.

A piece is whole parameters of a block, in the order of their first use, or a range of experts of all parameters that
hold one matrix per expert. A dense matrix is never cut: the gradient of its input would be added up in another order.
"""

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass(frozen=True)
class PiecePart:
    """A parameter of a block, or a range of its experts."""

    name: str  # First name of the parameter in the model
    experts: tuple[int, int] | None = None  # `[first, last)` of its first dimension; None: all of it


Piece = tuple[PiecePart, ...]  # What is cut from a block: its parts are on the device at the same time


@dataclass(frozen=True)
class Stage:
    """The part of a block's backward pass during which one piece is on the device."""

    piece: int  # Index of the piece in the block
    recomputes: bool  # Whether forward operators run that use the piece
    differentiates: bool  # Whether backward operators run that use the piece
    trains: bool  # Whether gradients of the piece's parameters arrive


@dataclass(frozen=True)
class PieceOrder:
    """The order in which a block's pieces are needed, for one micro-batch."""

    forward: tuple[int, ...]  # Pieces of the forward pass: a piece may come again
    backward: tuple[Stage, ...]  # Stages of the backward pass, which begins with the forward pass once more
    # Bytes, for each token, that a forward pass keeps at most while it waits for its next piece.
    between_bytes: int = field(default=0, compare=False)

    def holds_gradient(self, trained: Collection[int]) -> tuple[bool, ...]:
        """Return, for each stage of the backward pass, whether the gradient of its piece is on the device.

        It is there from the first gradient that arrives (if none does, from the piece's last stage, which ends it) to
        the last stage that uses the piece: only then may the piece be updated.

        Args:
            trained: indices of the pieces that are trained.
        """
        holds = [False] * len(self.backward)
        for piece in trained:
            places = [place for place, stage in enumerate(self.backward) if stage.piece == piece]
            first = next((place for place in places if self.backward[place].trains), places[-1] if places else 0)
            for place in places:
                holds[place] = place >= first
        return tuple(holds)
