"""The parts of a record: the places of its parameters, and the chunks in which it is updated."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from common.memory.buffers import round_up
from fuyou.layout.pieces import PiecePart

if TYPE_CHECKING:  # transformers is behind it, which the optimizer process can do without
    from common.models.checkpoint.compressed import CompressedParameter

# Every parameter starts on a multiple of this many elements: 256 bytes in bf16, enough for any vector unit and for
# bit-reproducible BLAS, and no chunk ever ends in a scalar tail.
ALIGN_ELEMENTS = 128


@dataclass(frozen=True)
class ParameterSlot:
    """The place of one parameter in its record."""

    names: tuple[str, ...]  # Name in the model, and then the names of parameters tied to it
    shape: tuple[int, ...]
    offset: int  # First element within the record
    decay: bool  # Whether weight decay applies
    trained: bool = True  # Whether gradients flow to it, if its record is trained
    # How it is stored if its record is stored in the checkpoint's own bytes; None: in the compute dtype.
    compressed: "CompressedParameter | None" = None
    # `[first, last)` of the parameter's experts, if only these are in the record, a piece of a block.
    experts: tuple[int, int] | None = None
    all_experts: int = 0  # Number of the parameter's experts, where :attr:`experts` is given
    # Fraction of the tokens that it is multiplied with: of an expert, those that are routed to it on average.
    activity: float = 1.0

    @property
    def name(self) -> str:
        """Name under which it is known everywhere: the first one, and the experts if these are not all."""
        return self.names[0] if self.experts is None else f"{self.names[0]}[{self.experts[0]}:{self.experts[1]}]"

    @property
    def part(self) -> PiecePart:
        """The parameter, or the range of its experts, as a part of a piece."""
        return PiecePart(self.names[0], self.experts)

    def taken_from(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return what is in the record of the whole ``parameter``."""
        return parameter if self.experts is None else parameter[self.experts[0] : self.experts[1]]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def stored_nbytes(self, dtype: torch.dtype) -> int:
        """Return its bytes in a record that is stored in the checkpoint's own bytes, and otherwise in ``dtype``."""
        nbytes = self.numel * dtype.itemsize if self.compressed is None else self.compressed.nbytes
        return round_up(nbytes, ALIGN_ELEMENTS)


@dataclass(frozen=True)
class Chunk:
    """A range of a record that is updated at once: ``[start, stop)`` in elements, all decayed or none."""

    start: int
    stop: int
    decay: bool


def wants_decay(name: str, shape: Sequence[int]) -> bool:
    """Return whether weight decay applies: to matrices, but not to biases and gains of norms (all one-dimensional)."""
    return len(shape) > 1 and not name.endswith("bias")
