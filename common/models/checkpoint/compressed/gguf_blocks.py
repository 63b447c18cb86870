"""Decode the blocks of GGUF types: a few scales, and codes of 1 to 8 bits, side by side in the bytes of each block.

Results are those of ``gguf.quants.dequantize``, bit for bit and on any device: scales have 16 bits, and their products
with codes are exact in fp32. At most the sum with a minimum is rounded, and a fused multiply-add rounds it alike.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BlockFormat:
    """Format of a block: numbers of the same row that lie side by side."""

    numbers: int
    nbytes: int
    decode: Callable[[torch.Tensor], torch.Tensor]  # From ``uint8 [..., nbytes]`` to ``fp32 [..., numbers]``

    def row_nbytes(self, columns: int) -> int | None:
        """Return the bytes of a row; None if it is not whole blocks."""
        blocks, rest = divmod(columns, self.numbers)
        return None if rest else blocks * self.nbytes


def _words(data: torch.Tensor) -> torch.Tensor:
    """Return every two bytes as an integer: a view would need aligned memory."""
    # By steps: of pairs, PyTorch 2.13 compiles wrong scales for dynamic shapes.
    return data[..., ::2].to(torch.int16) | data[..., 1::2].to(torch.int16) << 8


def _halves(data: torch.Tensor) -> torch.Tensor:
    return _words(data).view(torch.float16).float()


def _bfloat16(data: torch.Tensor) -> torch.Tensor:
    return _words(data).view(torch.bfloat16).float()


def _float32(data: torch.Tensor) -> torch.Tensor:
    words = _words(data).to(torch.int32)
    return (words[..., ::2] & 0xFFFF | words[..., 1::2] << 16).view(torch.float32)


def _codes(data: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    """Return the codes in bytes: of every ``width`` bytes the lowest bits first, then the next ones."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device).unsqueeze(-1)
    return (data.unflatten(-1, (-1, 1, width)) >> shifts & (1 << bits) - 1).flatten(-3)


def _scaled(
    numbers: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor | None = None
) -> torch.Tensor:
    """Return numbers times the scales, fp32 ``[..., groups]``, of their groups, and subtract the groups' minimums."""
    products = numbers.unflatten(-1, (scales.shape[-1], -1)) * scales.unsqueeze(-1)
    return (products if minimums is None else products - minimums.unsqueeze(-1)).flatten(-2)


def _q8_0(block: torch.Tensor) -> torch.Tensor:
    return _scaled(block[..., 2:].view(torch.int8), _halves(block[..., :2]))


def _q4_0(block: torch.Tensor) -> torch.Tensor:
    return _scaled(_codes(block[..., 2:], 4, 16).to(torch.int8) - 8, _halves(block[..., :2]))


def _q4_1(block: torch.Tensor) -> torch.Tensor:
    return _scaled(_codes(block[..., 4:], 4, 16), _halves(block[..., :2]), -_halves(block[..., 2:4]))


def _five_bits(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    return _codes(low, 4, 16) | _codes(high, 1, 1) << 4


def _q5_0(block: torch.Tensor) -> torch.Tensor:
    return _scaled(_five_bits(block[..., 6:], block[..., 2:6]).to(torch.int8) - 16, _halves(block[..., :2]))


def _q5_1(block: torch.Tensor) -> torch.Tensor:
    numbers = _five_bits(block[..., 8:], block[..., 4:8])
    return _scaled(numbers, _halves(block[..., :2]), -_halves(block[..., 2:4]))


def _q2_k(block: torch.Tensor) -> torch.Tensor:
    scales = block[..., :16]
    factors = _halves(block[..., 80:82]) * (scales & 0xF)
    least = _halves(block[..., 82:]) * (scales >> 4)
    return _scaled(_codes(block[..., 16:80], 2, 32), factors, least)


def _q3_k(block: torch.Tensor) -> torch.Tensor:
    scales = _codes(block[..., 96:104], 4, 8) | _codes(block[..., 104:108], 2, 4) << 4
    factors = _halves(block[..., 108:]) * (scales.to(torch.int8) - 32)
    high = _codes(block[..., :32], 1, 32) ^ 1
    return _scaled(_codes(block[..., 32:96], 2, 32).to(torch.int8) - (high << 2).to(torch.int8), factors)


def _scales_and_minimums(block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and minimums of the 8 groups of a Q4_K or Q5_K block, which have 6 bits each."""
    scales, least, both = block[..., 4:16].unflatten(-1, (3, 1, 4)).unbind(-3)
    # Of two halves; concatenating takes a kernel
    is_first = torch.arange(2, device=block.device).unsqueeze(-1) == 0
    scales = torch.where(is_first, scales & 0x3F, both & 0xF | scales >> 2 & 0x30).flatten(-2)
    least = torch.where(is_first, least & 0x3F, both >> 4 | least >> 2 & 0x30).flatten(-2)
    return _halves(block[..., :2]) * scales, _halves(block[..., 2:4]) * least


def _q4_k(block: torch.Tensor) -> torch.Tensor:
    return _scaled(_codes(block[..., 16:], 4, 32), *_scales_and_minimums(block))


def _q5_k(block: torch.Tensor) -> torch.Tensor:
    numbers = _codes(block[..., 48:], 4, 32) | _codes(block[..., 16:48], 1, 32) << 4
    return _scaled(numbers, *_scales_and_minimums(block))


def _q6_k(block: torch.Tensor) -> torch.Tensor:
    numbers = _codes(block[..., :128], 4, 64) | _codes(block[..., 128:192], 2, 32) << 4
    factors = _halves(block[..., 208:]) * block[..., 192:208].view(torch.int8)
    return _scaled(numbers.to(torch.int8) - 32, factors)


BLOCKS = {
    "F32": BlockFormat(1, 4, _float32),
    "F16": BlockFormat(1, 2, _halves),
    "BF16": BlockFormat(1, 2, _bfloat16),
    "Q8_0": BlockFormat(32, 34, _q8_0),
    "Q4_0": BlockFormat(32, 18, _q4_0),
    "Q4_1": BlockFormat(32, 20, _q4_1),
    "Q5_0": BlockFormat(32, 22, _q5_0),
    "Q5_1": BlockFormat(32, 24, _q5_1),
    "Q2_K": BlockFormat(256, 84, _q2_k),
    "Q3_K": BlockFormat(256, 110, _q3_k),
    "Q4_K": BlockFormat(256, 144, _q4_k),
    "Q5_K": BlockFormat(256, 176, _q5_k),
    "Q6_K": BlockFormat(256, 210, _q6_k),
}
"""Formats of blocks by the names that GGUF has for them."""
