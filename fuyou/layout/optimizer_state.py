"""What an optimizer keeps of each parameter on SSD: a list of components, which lie one after the other in a chunk.

All that depends on the optimizer's format (places on SSD, buffers, memory plan, simulated traffic, resharding) is
computed from these lists. Adding an optimizer is an entry in :data:`OPTIMIZERS`, and its arithmetic in
``fuyou/optimizer/rules.py``.
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
    """One kind of value that is kept of the parameters."""

    name: str
    dtype: torch.dtype
    per: int = 1  # Elements that share one value

    def nbytes(self, elements: int) -> int:
        """Return the bytes of the values of so many elements."""
        return -(-elements // self.per) * self.dtype.itemsize


@dataclass(frozen=True)
class OptimizerFormat:
    """An optimizer as far as its states are concerned, and the defaults that differ from AdamW's."""

    moments: tuple[str, ...]  # Names of its running means
    blockwise: bool = False  # Whether they are kept in 8 bits by blocks (:mod:`fuyou.optimizer.dynamic8`)
    betas: tuple[float, float] = (0.9, 0.999)  # Decay of its running means, as its authors have it

    def components(self, split: bool, moment_dtype: torch.dtype) -> tuple[StateComponent, ...]:
        """Return what is kept, in order.

        Args:
            split: whether master weights are split, so that their low 16 bits are among the states.
            moment_dtype: dtype of moments, where they are not in 8 bits.
        """
        low = (StateComponent(LOW, torch.int16),) if split else ()
        if not self.blockwise:
            return (*low, *(StateComponent(name, moment_dtype) for name in self.moments))
        scales = (StateComponent(scale_of(name), torch.float32, BLOCK_ELEMENTS) for name in self.moments)
        return (*low, *(StateComponent(name, torch.uint8) for name in self.moments), *scales)


def scale_of(moment: str) -> str:
    """Return the name of the component with the scales of a moment in 8 bits."""
    return f"{moment} scale"


ADAMW = "adamw"
# All optimizers, by the names that options give them.
OPTIMIZERS = {
    ADAMW: OptimizerFormat(("mean", "variance")),
    "adamw8bit": OptimizerFormat(("mean", "variance"), blockwise=True),
    "lion": OptimizerFormat(("mean",), betas=(0.9, 0.99)),
}


def check_optimizer(name: str, optimizer_dtype: str) -> None:
    """Refuse an optimizer that there is not, or that has no moments of this dtype.

    Raises:
        UserError: so it is.
    """
    if name not in OPTIMIZERS:
        raise UserError(f"optimizer is {' or '.join(OPTIMIZERS)}, not {name!r}.{did_you_mean(name, OPTIMIZERS)}")
    if OPTIMIZERS[name].blockwise and optimizer_dtype != "fp32":
        raise UserError(
            f"--optimizer {name} keeps its moments in 8 bits: leave --optimizer-dtype {optimizer_dtype} out."
        )
