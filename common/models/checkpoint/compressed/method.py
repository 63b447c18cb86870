"""A method of compression, and what it finds in a checkpoint's files: which tensors belong together."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from common.errors import FinetuneError
from common.models.checkpoint.compressed.tensors import Component, CompressedTensor
from common.models.checkpoint.shards import Shards, StoredTensor

FLOAT_CODES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
"""Kind of codes of tensors that hold one number in a byte, by their dtype."""


@dataclass(frozen=True)
class FoundTensor:
    """A compressed tensor that was found in the files."""

    tensor: CompressedTensor
    names: dict[str, str]
    """Names of its components in the files, by their roles."""
    beside: tuple[str, ...] = ()
    """Names of tensors that are useless without it: shapes, scales of activations."""


class Method(Protocol):
    """A method of compressing checkpoints."""

    name: str
    """Name in config.json: ``quant_method``."""

    def find(self, shards: Shards) -> Iterator[tuple[str, FoundTensor]]:
        """Find every compressed tensor, by the name that it would have if it were a plain one.

        Raises:
            FinetuneError, UserError: components do not fit together, or their format is not supported.
        """
        ...


def even_blocks(name: str, rows: int, columns: int, grid: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns of a block where all are equally large, from the grid of scales.

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
    """Describe a tensor of the files as a component."""
    return Component(role, stored.dtype, stored.shape)


def checked(found: FoundTensor, name: str, shards: Shards) -> FoundTensor:
    """Return ``found``, if its components fit together.

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
