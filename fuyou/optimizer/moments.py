"""Storage of master weights and moments between steps.

fp32 master weights are split into a bf16 part, ``high``, that the model computes with, and 16 more bits, ``low``.
``high`` is the master weight rounded to bf16, half away from zero: ``(bits + 0x8000) >> 16``. Nearest-even could not be
undone with 16 bits (an even ``high`` would have 65,537 preimages). ``low`` is the signed difference ``bits - (high <<
16)``. Both together take 4 bytes instead of the 6 of an fp32 master weight and its bf16 copy.

Next to 8-bit moments, ``low`` has 8 bits: master weights are rounded to 24 bits first. Both are after FlashOptim (arXiv
2602.23349), with blocks of 128 elements that share an fp32 scale.
"""

from typing import NamedTuple

import numpy as np
import torch

from fuyou.layout.record_parts import ADAMW, BLOCK_ELEMENTS, MOMENTS


def split(master: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
    """Split ``master`` into two parts, from which :func:`join` rebuilds the same bits, or the first 24 of them.

    Finite values that round beyond the largest bf16 get an infinite ``high`` (as ``master.bfloat16()`` would) and are
    still rebuilt exactly. A NaN stays a NaN in ``high`` and after :func:`join`, with another payload.

    Args:
        master: fp32 ``[n]``, not changed.
        high: bf16 ``[n]``, written.
        low: int16 or int8 ``[n]``, written.
    """
    master = master.clone()
    # A NaN with a small payload would round to infinity, one with a large payload to -0.
    master[master.isnan()] = float("nan")
    split_in_place(master, high, low)


def split_in_place(master: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
    """Do :func:`split` in half the time. ``master`` is overwritten; its NaNs must come from arithmetic.

    Such NaNs are quiet and have nothing in their lower 16 bits, so they need no rounding. Only NaNs from elsewhere (a
    weight file) can have other payloads.
    """
    bits = master.view(torch.int32)
    width = 8 * low.dtype.itemsize
    if width == 8:
        bits.add_(0x80).bitwise_right_shift_(8)
    # A cast keeps the lowest bits. Those of the difference are those of ``bits``: ``high`` has none there.
    low.copy_(bits)
    bits.add_(1 << (width - 1)).bitwise_right_shift_(width)
    high.view(torch.int16).copy_(bits)


def join(
    high: torch.Tensor, low: torch.Tensor, master: torch.Tensor, scratch: torch.Tensor | None = None
) -> None:
    """Rebuild fp32 master weights: ``bits = (high << 16) + low``, or ``(high << 16) + (low << 8)``.

    Args:
        high: bf16 ``[n]``.
        low: int16 or int8 ``[n]``.
        master: fp32 ``[n]``, written.
        scratch: int32 ``[n]``; allocated if not given.
    """
    if scratch is None:
        scratch = torch.empty(master.numel(), dtype=torch.int32)
    master.copy_(high)  # widening appends 16 zero bits
    # Not ``add_(low)``: operands of different widths take a slow path.
    scratch.copy_(low)
    if low.dtype == torch.int8:
        scratch.bitwise_left_shift_(8)
    master.view(torch.int32).add_(scratch)


class MomentCode:
    """Eight bits for numbers between a block's largest magnitude and its negative, finer where most of them are.

    Args:
        signed: whether numbers are means, stored as ``2x / (1 + |x|)``; or variances, stored as square roots, of which
            none above 0 is rounded to 0: an update divides by it.
    """

    def __init__(self, signed: bool):
        self.signed = signed
        codes = np.arange(256, dtype=np.uint8)
        levels = codes.view(np.int8) / 127 if signed else codes / 255
        self.values = (levels / (2 - np.abs(levels)) if signed else levels**2).astype(np.float32)  # by code

    def encode(self, wide: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """Round fp32 ``wide`` ``[n]`` to ``codes`` uint8 ``[n]`` and ``scales`` fp32 ``[n / 128]``."""
        blocks = wide.view(-1, BLOCK_ELEMENTS)
        torch.amax(blocks.abs(), 1, out=scales)
        quotients = (blocks / torch.where(scales > 0, scales, 1.0).unsqueeze(1)).view(-1).numpy()
        if self.signed:
            levels = np.rint(2 * quotients / (1 + np.abs(quotients)) * np.float32(127))
        else:
            levels = np.maximum(np.rint(np.sqrt(quotients) * np.float32(255)), quotients > 0)
        codes.numpy()[:] = levels.astype(np.int32)

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, wide: torch.Tensor) -> None:
        """Undo :meth:`encode`, up to rounding, into ``wide``."""
        np.take(self.values, codes.numpy(), out=wide.numpy(), mode="clip")
        wide.view(-1, BLOCK_ELEMENTS).mul_(scales.unsqueeze(1))


MOMENT_CODES = (MomentCode(signed=True), MomentCode(signed=False))  # The codes of mean and variance


class OptimizerStates(NamedTuple):
    """Parameters and their optimizer states: flat tensors ``[n]``, which an update changes."""

    # Bf16 part of the split master weights, or the fp32 master weights if `low` is None
    parameter: torch.Tensor
    low: torch.Tensor | None  # Low bits of the master weights, int16 or int8
    moments: tuple[torch.Tensor, ...]  # Running means, in the order of their names: fp32, or codes, uint8
    scales: tuple[torch.Tensor, ...] = ()  # Scales of codes, fp32 `[n / 128]` for each moment

    @classmethod
    def before_training(
        cls, parameter: torch.Tensor, low: torch.Tensor | None, optimizer: str = ADAMW
    ) -> "OptimizerStates":
        """Return the states before the first step: moments of zero, in fp32 or in 8 bits."""
        blockwise = optimizer != ADAMW
        count = parameter.numel()
        dtype = torch.uint8 if blockwise else torch.float32
        scales = tuple(torch.zeros(count // BLOCK_ELEMENTS) for _ in MOMENTS if blockwise)
        return cls(parameter, low, tuple(torch.zeros(count, dtype=dtype) for _ in MOMENTS), scales)

    def part(self, part: slice) -> "OptimizerStates":
        low = None if self.low is None else self.low[part]
        blocks = slice(part.start // BLOCK_ELEMENTS, part.stop // BLOCK_ELEMENTS)
        moments = tuple(moment[part] for moment in self.moments)
        return OptimizerStates(
            self.parameter[part], low, moments, tuple(scale[blocks] for scale in self.scales)
        )
