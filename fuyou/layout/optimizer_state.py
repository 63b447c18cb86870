"""Formats of optimizer states on SSD: lists of components, which lie one after the other in a chunk.

Layout, buffers, memory plan, simulated traffic, and resharding are computed from these lists. A new optimizer needs an
entry in :data:`OPTIMIZERS`, and its arithmetic in ``fuyou/optimizer/adam.py``.
"""

from dataclasses import dataclass

import torch

from common.errors import UserError, did_you_mean
from fuyou.layout.record_parts import ALIGN_ELEMENTS

# Elements that share a scale where moments have 8 bits. A parameter begins with a block, so none holds values of two:
# what one parameter's moments are rounded to does not depend on another's.
BLOCK_ELEMENTS = ALIGN_ELEMENTS
LOW = "low"  # Name of the component with the low 16 bits of split master weights: the first one, where there is one


@dataclass(frozen=True)
class StateComponent:
    """One component of the optimizer states."""

    name: str
    dtype: torch.dtype
    per: int = 1  # Elements that share one value

    def nbytes(self, elements: int) -> int:
        return -(-elements // self.per) * self.dtype.itemsize


@dataclass(frozen=True)
class OptimizerFormat:
    """State format of an optimizer, and its default betas."""

    moments: tuple[str, ...]  # Names of its running means
    blockwise: bool = False  # Whether they are kept in 8 bits by blocks (:mod:`fuyou.optimizer.moments`)
    betas: tuple[float, float] = (0.9, 0.999)  # Decay of its running means, as its authors have it

    def components(self, split: bool, moment_dtype: torch.dtype) -> tuple[StateComponent, ...]:
        """Return the components in order.

        Args:
            split: whether master weights are split, so that their low 16 bits are among the states.
            moment_dtype: dtype of moments that are not in 8 bits.
        """
        low = (StateComponent(LOW, torch.int16),) if split else ()
        if not self.blockwise:
            return (*low, *(StateComponent(name, moment_dtype) for name in self.moments))
        scales = (StateComponent(scale_of(name), torch.float32, BLOCK_ELEMENTS) for name in self.moments)
        return (*low, *(StateComponent(name, torch.uint8) for name in self.moments), *scales)


def scale_of(moment: str) -> str:
    """Return the name of the component with the scales of an 8-bit moment."""
    return f"{moment} scale"


ADAMW = "adamw"
# All optimizers, by the names that options give them.
OPTIMIZERS = {
    ADAMW: OptimizerFormat(("mean", "variance")),
    "adamw8bit": OptimizerFormat(("mean", "variance"), blockwise=True),
    "lion": OptimizerFormat(("mean",), betas=(0.9, 0.99)),
}


def check_optimizer(name: str, optimizer_dtype: str) -> None:
    """Check that the optimizer exists and supports this moment dtype.

    Raises:
        UserError: if not.
    """
    if name not in OPTIMIZERS:
        raise UserError(f"optimizer is {' or '.join(OPTIMIZERS)}, not {name!r}.{did_you_mean(name, OPTIMIZERS)}")
    if OPTIMIZERS[name].blockwise and optimizer_dtype != "fp32":
        raise UserError(
            f"--optimizer {name} keeps its moments in 8 bits: leave --optimizer-dtype {optimizer_dtype} out."
        )
