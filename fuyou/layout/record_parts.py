"""Parts of a record: its parameters, pieces of a block, and the chunks that are updated at once.

A piece is a set of whole parameters of a block, in the order of their first use, or a range of experts of all
parameters that hold one matrix per expert. A dense matrix is never cut: the gradient of its input would be summed in
another order.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from common.memory.buffers import round_up

if TYPE_CHECKING:  # transformers is behind it, which the optimizer process can do without
    from common.models.checkpoint.compressed.parameters import CompressedParameter


@dataclass(frozen=True)
class PiecePart:
    """A parameter of a block, or a range of its experts."""

    name: str  # First name of the parameter in the model
    experts: tuple[int, int] | None = None  # `[first, last)` of its first dimension; None: all of it


Piece = tuple[PiecePart, ...]  # What is cut from a block: its parts are on the device at the same time


@dataclass(frozen=True)
class Stage:
    """Part of a block's backward pass during which one piece is on the device."""

    piece: int  # Index of the piece in the block
    recomputes: bool  # Whether forward operators run that use the piece
    differentiates: bool  # Whether backward operators run that use the piece
    trains: bool  # Whether gradients of the piece's parameters arrive


@dataclass(frozen=True)
class PieceOrder:
    """Order in which a block's pieces are needed, for one micro-batch."""

    forward: tuple[int, ...]  # Pieces of the forward pass: a piece may come again
    backward: tuple[Stage, ...]  # Stages of the backward pass, which begins with the forward pass once more
    between_bytes: int = field(default=0, compare=False)  # Peak bytes per token between two pieces

    def holds_gradient(self, trained: Collection[int]) -> tuple[bool, ...]:
        """Return, for each stage of the backward pass, whether its piece's gradient is on the device.

        It is from the first gradient that arrives (or from the piece's last stage) to the last stage that uses the
        piece, after which the piece may be updated.

        Args:
            trained: indices of the trained pieces.
        """
        holds = [False] * len(self.backward)
        for piece in trained:
            uses = [index for index, stage in enumerate(self.backward) if stage.piece == piece]
            first = next((index for index in uses if self.backward[index].trains), uses[-1] if uses else 0)
            for index in uses:
                holds[index] = index >= first
        return tuple(holds)


# Every parameter starts on a multiple of this many elements: 256 bytes in bf16, enough for any vector unit and for
# bit-reproducible BLAS, and no chunk ever ends in a scalar tail.
ALIGN_ELEMENTS = 128


@dataclass(frozen=True)
class ParameterSlot:
    """Position of one parameter in its record."""

    names: tuple[str, ...]  # Name in the model, and then the names of parameters tied to it
    shape: tuple[int, ...]
    offset: int  # First element within the record
    decay: bool  # Whether weight decay applies; of a frozen parameter, whether it is a matrix
    trained: bool = True  # Whether gradients flow to it, if its record is trained
    compressed: "CompressedParameter | None" = None  # Storage in the checkpoint's bytes, if any
    experts: tuple[int, int] | None = None  # `[first, last)` of the parameter's experts, in a piece
    all_experts: int = 0  # Number of the parameter's experts, where :attr:`experts` is given
    activity: float = 1.0  # Fraction of the tokens that it is multiplied with, on average
    wide: bool = False  # Whether it is fp32 in a record of bf16, where each number takes two elements

    @property
    def name(self) -> str:
        return (
            self.names[0] if self.experts is None else f"{self.names[0]}[{self.experts[0]}:{self.experts[1]}]"
        )

    @property
    def part(self) -> PiecePart:
        return PiecePart(self.names[0], self.experts)

    def taken_from(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the part of the whole ``parameter`` that is in the record."""
        return parameter if self.experts is None else parameter[self.experts[0] : self.experts[1]]

    @property
    def numel(self) -> int:
        """Return how many numbers the parameter has."""
        return math.prod(self.shape)

    @property
    def span(self) -> int:
        """Return how many elements of the record it takes."""
        return self.numel * (2 if self.wide else 1)

    def stored_nbytes(self, dtype: torch.dtype) -> int:
        """Return the bytes in a record of the checkpoint's bytes, or in ``dtype`` if not compressed."""
        nbytes = self.span * dtype.itemsize if self.compressed is None else self.compressed.nbytes
        return round_up(nbytes, ALIGN_ELEMENTS)


@dataclass(frozen=True)
class Chunk:
    """Range ``[start, stop)`` of a record's elements that is updated at once, all decayed or none."""

    start: int
    stop: int
    decay: bool


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Return whether a frozen parameter is stored in fewer bits, if others are: not biases and norm gains."""
    return len(shape) > 1 and not name.endswith("bias")


# Elements that share a scale where moments have 8 bits. A parameter begins with a block, so none holds values of two:
# what one parameter's moments are rounded to does not depend on another's.
BLOCK_ELEMENTS = ALIGN_ELEMENTS
# Name of the component with the low bits of split master weights: the first one, where there is one
LOW = "low"


@dataclass(frozen=True)
class StateComponent:
    """One component of the optimizer states."""

    name: str
    dtype: torch.dtype
    per: int = 1  # Elements that share one value

    def nbytes(self, elements: int) -> int:
        return -(-elements // self.per) * self.dtype.itemsize


MOMENTS = ("mean", "variance")  # Names of the components with AdamW's running means


ADAMW = "adamw"
ADAMW_8BIT = "adamw8bit"  # Moments have 8 bits, and split master weights 24 (:mod:`fuyou.optimizer.moments`)


def state_components(optimizer: str, split: bool) -> tuple[StateComponent, ...]:
    """Return the components of an optimizer's states in order: low bits of split master weights, then moments."""
    if optimizer == ADAMW:
        low = torch.int16
        moments = [StateComponent(name, torch.float32) for name in MOMENTS]
    else:
        low = torch.int8
        moments = [StateComponent(name, torch.uint8) for name in MOMENTS]
        moments += [StateComponent(scale_of(name), torch.float32, BLOCK_ELEMENTS) for name in MOMENTS]
    return (*((StateComponent(LOW, low),) if split else ()), *moments)


def scale_of(moment: str) -> str:
    """Return the name of the component with the scales of an 8-bit moment."""
    return f"{moment} scale"
