"""fp32 master weights survive their split into two 16-bit parts, bit for bit."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from fuyou.optimizer.moments import join, split, split_in_place

INFINITY = 0x7F80_0000


def parts(bits: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``high``, ``low`` and what they join to, for masters with these ``uint32`` bits."""
    master = torch.from_numpy(bits.astype(np.uint32).view(np.float32).copy())
    high, low = torch.empty(len(bits), dtype=torch.bfloat16), torch.empty(len(bits), dtype=torch.int16)
    split(master, high, low)
    joined = torch.full((len(bits),), -1.0)
    join(high, low, joined)
    return high, low, joined


def nearest(bits: np.ndarray) -> np.ndarray:
    """Nearest bf16, ties away from zero, in float64: bits ``uint16`` of every value that is not a NaN.

    Both neighbours are compared as numbers; beyond the largest bf16 the next "number" is 2**128, which is infinity.
    """

    def magnitude(high: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            value = (high.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return np.where(high == INFINITY >> 16, 2.0**128, value)

    sign, size = bits & 0x8000_0000, bits & 0x7FFF_FFFF
    below = size >> 16
    above = np.minimum(below + 1, INFINITY >> 16)
    value = size.astype(np.uint32).view(np.float32).astype(np.float64)
    up = magnitude(above) - value <= value - magnitude(below)
    result = np.where(size == INFINITY, INFINITY >> 16, np.where(up, above, below))
    return (result | sign >> 16).astype(np.uint16)


def check(bits: np.ndarray) -> None:
    bits = bits.astype(np.uint32)
    high, _, joined = parts(bits)
    is_nan = (bits & 0x7FFF_FFFF) > INFINITY
    assert np.array_equal(joined.numpy().view(np.uint32)[~is_nan], bits[~is_nan])
    assert bool(high[torch.from_numpy(is_nan)].isnan().all()) and bool(
        joined[torch.from_numpy(is_nan)].isnan().all()
    )
    rounded = high.view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(rounded[~is_nan], nearest(bits[~is_nan]))
    check_in_place(bits[~is_nan], high[torch.from_numpy(~is_nan)])


def check_in_place(bits: np.ndarray, expected: torch.Tensor) -> None:
    master = torch.from_numpy(bits.view(np.float32).copy())
    high, low = torch.empty(len(bits), dtype=torch.bfloat16), torch.empty(len(bits), dtype=torch.int16)
    split_in_place(master, high, low)
    joined = torch.empty(len(bits))
    join(high, low, joined)
    assert np.array_equal(joined.numpy().view(np.uint32), bits)
    assert torch.equal(high.view(torch.int16), expected.view(torch.int16))


AWKWARD = [
    0x0000_0000, 0x8000_0000,  # both zeros
    0x0000_0001, 0x8000_0001, 0x007F_FFFF, 0x0080_0000, 0x807F_FFFF,  # subnormals, and the smallest normal number
    0x0000_7FFF, 0x0000_8000, 0x0000_8001,  # around the tie below the smallest bf16
    0x3F80_0000, 0x3F80_7FFF, 0x3F80_8000, 0x3F80_8001, 0x3F81_8000, 0xBF80_8000, 0xBF81_8000,  # ties, even and odd
    0x3FFF_8000, 0x3FFF_FFFF,  # carries into the exponent
    0x7F7F_0000, 0x7F7F_7FFF, 0x7F7F_8000, 0x7F7F_FFFF, 0xFF7F_8000, 0xFF7F_FFFF,  # rounds to infinity, or just not
    0x7F80_0000, 0xFF80_0000,  # infinities
    0x7F80_0001, 0x7F80_7FFF, 0x7FC0_0000, 0x7FFF_7FFF, 0x7FFF_8000, 0x7FFF_FFFF, 0xFF80_0001, 0xFFFF_FFFF,  # NaNs
]  # fmt: skip


def test_awkward_values_together_and_alone() -> None:
    check(np.array(AWKWARD))
    for bits in AWKWARD:
        check(np.array([bits]))


@given(st.lists(st.integers(0, 2**32 - 1) | st.sampled_from(AWKWARD), min_size=1, max_size=200))
def test_any_bits(bits: list[int]) -> None:
    check(np.array(bits))


def test_every_high_part_with_random_low_parts() -> None:
    """Subnormals included: nothing may flush them to zero."""
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    generator = np.random.default_rng(1)
    for _ in range(4):
        check(high | generator.integers(0, 1 << 16, 1 << 16, dtype=np.uint32))
