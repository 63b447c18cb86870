"""How moments are kept between steps, and made fp32 for a step: as they are, in bf16, or in 8 bits by blocks.

bf16 is rounded stochastically: a mean that decays by less than half a step of bf16 would otherwise never change.
"""

from typing import NamedTuple

import numpy as np
import torch

from fuyou.layout.optimizer_state import ADAMW, BLOCK_ELEMENTS, OPTIMIZERS
from fuyou.optimizer.adam import Update
from fuyou.optimizer.dynamic8 import MOMENT_CODES


class OptimizerStates(NamedTuple):
    """Parameters and what an optimizer keeps of them: flat tensors ``[n]``, which an update changes."""

    parameter: torch.Tensor  # bf16 part of the split master weights, or the fp32 master weights if `low` is None
    low: torch.Tensor | None  # Low 16 bits of the master weights, int16
    moments: tuple[torch.Tensor, ...]  # Running means, in the order of their names: fp32, bf16, or codes, uint8
    scales: tuple[torch.Tensor, ...] = ()  # Scales of codes, fp32 `[n / 128]` for each moment

    @classmethod
    def before_training(
        cls, parameter: torch.Tensor, low: torch.Tensor | None, optimizer: str = ADAMW
    ) -> "OptimizerStates":
        """Return what an optimizer keeps before its first step: moments of zero, in fp32 or in 8 bits."""
        kind, count = OPTIMIZERS[optimizer], parameter.numel()
        dtype = torch.uint8 if kind.blockwise else torch.float32
        scales = tuple(torch.zeros(count // BLOCK_ELEMENTS) for _ in kind.moments if kind.blockwise)
        return cls(parameter, low, tuple(torch.zeros(count, dtype=dtype) for _ in kind.moments), scales)

    def part(self, part: slice) -> "OptimizerStates":
        """Return those of some of the elements."""
        low = None if self.low is None else self.low[part]
        blocks = slice(part.start // BLOCK_ELEMENTS, part.stop // BLOCK_ELEMENTS)
        moments = tuple(moment[part] for moment in self.moments)
        return OptimizerStates(self.parameter[part], low, moments, tuple(scale[blocks] for scale in self.scales))


class Moments:
    """The moments of one range in one step: fp32 copies for the arithmetic, and the way back.

    Args:
        states: any part of the range, for the kind of its moments.
        update: the step.
        stream: number of the range within it, so that stochastic rounding differs between ranges.
    """

    def __init__(self, states: OptimizerStates, update: Update, stream: int):
        self._plain = states.moments[0].dtype == torch.float32
        self._random: list[np.random.SFC64] = []
        if states.moments[0].dtype == torch.bfloat16:
            # One for each moment: with a single one, numbers would depend on where a pass ends.
            self._random = [_random_bits(update, stream, number) for number in range(len(states.moments))]

    def widened(self, states: OptimizerStates, room: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the moments in fp32: themselves, or in ``room``, one tensor ``[>= n]`` for each."""
        if self._plain:
            return list(states.moments)
        wide = [memory[: states.parameter.numel()] for memory in room]
        for number, moment in enumerate(states.moments):
            if self._random:
                wide[number].copy_(moment)
            else:
                MOMENT_CODES[number].decode(moment, states.scales[number], wide[number])
        return wide

    def keep(self, wide: list[torch.Tensor], states: OptimizerStates, scratch: torch.Tensor) -> None:
        """Round what :meth:`widened` has returned, and a step has changed, back to the states.

        Args:
            wide: the moments in fp32.
            states: where they belong.
            scratch: int32 ``[n]``.
        """
        for number, moment in enumerate(() if self._plain else states.moments):
            if self._random:
                stochastic_round(wide[number], moment, scratch, self._random[number])
            else:
                MOMENT_CODES[number].encode(wide[number], moment, states.scales[number])


def _random_bits(update: Update, stream: int, moment: int) -> np.random.SFC64:
    """Return the random numbers that round one moment of one range in one step; a repeated step draws the same.

    They are NumPy's, whose streams are equal in all its versions, at a sixth of the cost of PyTorch's.
    """
    return np.random.SFC64(hash((update.seed, update.step, stream, moment)) & (2**63 - 1))


def stochastic_round(wide: torch.Tensor, narrow: torch.Tensor, scratch: torch.Tensor, source: np.random.SFC64) -> None:
    """Round fp32 ``wide`` to bf16 ``narrow``, up or down with the probability that makes the mean exact.

    This adds 16 random bits below the bf16 mantissa, and truncates. ``wide`` must be finite; ``scratch`` is int32
    ``[n]``.
    """
    count = wide.numel()
    bits = source.random_raw(-(-count // 4)).view(np.int16)[:count]  # four times 16 bits from each number
    scratch.copy_(torch.from_numpy(bits))  # widened with its sign: from -0x8000 on
    scratch.add_(0x8000).add_(wide.view(torch.int32)).bitwise_right_shift_(16)
    narrow.view(torch.int16).copy_(scratch)
