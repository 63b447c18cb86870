"""How quantised rows lie: the scales of a row's blocks, then their values."""

from typing import Literal

import torch

Bits = Literal[8, 4]

BLOCK = 256  # Number of elements that share a scale
LARGEST = {8: 127.0, 4: 7.0}  # Value that a block's largest magnitude becomes, by bits
SMALLEST = 1e-36  # Largest magnitude of a block, up to which it becomes zeros: it has no reciprocal in fp32
SCALE_BYTES = 4


def quantised_nbytes(count: int, bits: Bits) -> int:
    """Return the bytes that a row of ``count`` elements takes; its last block is padded with zeros."""
    return blocks_of(count) * (SCALE_BYTES + BLOCK * bits // 8)


def blocks_of(count: int, block: int = BLOCK) -> int:
    """Return the blocks of a row of ``count`` elements."""
    return -(-count // block)


def parts_of(payload: torch.Tensor, blocks: int, block_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of scales, ``fp32 [..., blocks]``, and values, ``uint8 [..., blocks, block_bytes]``."""
    border = blocks * SCALE_BYTES
    return payload[..., :border].view(torch.float32), payload[..., border:].unflatten(-1, (blocks, block_bytes))
