"""What is found in the files of a compressed checkpoint: which tensors belong together."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from common.errors import FinetuneError
from common.models.checkpoint.compressed.tensors import Component, CompressedTensor
from common.models.checkpoint.shards import Shards, StoredTensor

#: Kinds of codes by the dtype of tensors that hold one number in a byte.
FLOAT_CODES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


@dataclass(frozen=True)
class FoundTensor:
    """A compressed tensor in the files."""

    tensor: CompressedTensor
    names: dict[str, str]
    """Of its components in the files, by their roles."""
    beside: tuple[str, ...] = ()
    """Names of what is of no use without it: shapes, scales of activations."""


class Method(Protocol):
    """A way of writing checkpoints."""

    name: str
    """As ``quant_method`` in config.json."""

    def find(self, shards: Shards) -> Iterator[tuple[str, FoundTensor]]:
        """Every compressed tensor, by the name that it would have if it were a plain one.

        Raises:
            FinetuneError, UserError: components do not fit together, or are written in a way that is not known here.
        """
        ...


def even_blocks(name: str, rows: int, columns: int, grid: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a block where all are equally large, from the grid of scales.

    Raises:
        FinetuneError: they cannot be equally large.
    """
    if not (grid[0] and grid[1]) or rows % grid[0] or columns % grid[1]:
        raise FinetuneError(
            f"{name} of shape {[rows, columns]} has scales of shape {list(grid)}, and the quantization_config in "
            "config.json does not say which blocks they are for."
        )
    return rows // grid[0], columns // grid[1]


def component(role: str, stored: StoredTensor) -> Component:
    """A tensor of the files in its role."""
    return Component(role, stored.dtype, stored.shape)


def checked(found: FoundTensor, name: str, shards: Shards) -> FoundTensor:
    """``found``, if its components fit together.

    Raises:
        FinetuneError: they do not.
    """
    problem = found.tensor.problem()
    if problem is not None:
        file = shards.tensors[found.names["codes"]].file
        raise FinetuneError(
            f"{file}: {name} cannot be read: {problem}. config.json and weights do not belong together."
        )
    return found
