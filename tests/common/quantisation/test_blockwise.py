"""Block quantisation: error bounds, sizes, and the same values as a plain twin."""

import pytest
import torch

from common.quantisation import BLOCK, Bits, dequantise, quantise, quantised_nbytes


def twin(values: list[float], largest: int) -> list[float]:
    """One block, element by element, in double precision."""
    scale = max(map(abs, values)) / largest
    return [round(value / scale) * scale if scale else 0.0 for value in values]


@pytest.mark.parametrize(("bits", "largest"), [(8, 127), (4, 7)])
@pytest.mark.parametrize("count", [1, 199, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_element_is_within_half_a_step_of_its_own_block(
    bits: Bits, largest: int, count: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(count)
    # Blocks of very different size: each has to have a scale of its own.
    tensor = (torch.randn(count) * 10.0 ** (torch.arange(count) // BLOCK * 3 - 3)).to(dtype)
    packed = quantise(tensor, bits)
    back = dequantise(packed, count, bits)
    assert back.shape == (count,)
    assert packed.dtype == torch.uint8 and packed.shape == (quantised_nbytes(count, bits),)
    for start in range(0, count, BLOCK):
        block, found = tensor[start : start + BLOCK].float(), back[start : start + BLOCK]
        bound = block.abs().max() / largest / 2
        assert (block - found).abs().max() <= bound * 1.0001
        expected = torch.tensor(twin(block.tolist(), largest))
        # Where a value lies on the border of two steps, fp32 and double may round differently: one step, rarely.
        differ = (found - expected).abs() > bound * 0.01
        assert differ.float().mean() <= 0.01


def test_bytes_are_a_half_and_a_quarter_of_bf16_plus_scales() -> None:
    count = 64 * BLOCK
    assert quantised_nbytes(count, 8) == count + 64 * 4
    assert quantised_nbytes(count, 4) == count // 2 + 64 * 4


@pytest.mark.parametrize("bits", [8, 4])
def test_extremes_signs_and_order(bits: Bits) -> None:
    largest = 127 if bits == 8 else 7
    steps = torch.arange(-largest, largest + 1, dtype=torch.float32).repeat(18)[:BLOCK]
    assert torch.equal(dequantise(quantise(steps, bits), BLOCK, bits), steps), "whole steps come back as they are"


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_denormals_and_what_is_not_finite(bits: Bits) -> None:
    def there_and_back(tensor: torch.Tensor) -> torch.Tensor:
        return dequantise(quantise(tensor, bits), tensor.numel(), bits)

    assert not there_and_back(torch.zeros(3)).any()
    assert not there_and_back(torch.full((BLOCK,), 1e-45)).any(), "no infinite steps"
    assert there_and_back(torch.tensor([1e-35, 0.0])).tolist() == pytest.approx([1e-35, 0.0])
    for bad in (torch.inf, -torch.inf, torch.nan):
        spoilt = torch.ones(2 * BLOCK)
        spoilt[3] = bad
        back = there_and_back(spoilt)
        assert back[:BLOCK].isnan().all()
        assert torch.equal(back[BLOCK:], torch.ones(BLOCK)), "other blocks know nothing of it"


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_travel_by_themselves_and_into_given_places(bits: Bits) -> None:
    torch.manual_seed(0)
    rows = torch.randn(2, 3, 300).bfloat16()
    out = torch.zeros(2, 3, 1 + quantised_nbytes(300, bits) // 4, dtype=torch.float32).view(torch.uint8)[..., 4:]
    assert quantise(rows, bits, out=out) is out
    for i in range(2):
        for j in range(3):
            alone = dequantise(quantise(rows[i, j], bits), 300, bits)
            assert torch.equal(dequantise(out, 300, bits)[i, j], alone)


@pytest.mark.parametrize("bits", [8, 4])
def test_an_empty_tensor_stays_empty(bits: Bits) -> None:
    assert dequantise(quantise(torch.empty(0), bits), 0, bits).shape == (0,)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_same_numbers_give_the_same_bytes_alone_and_in_rows(bits: Bits) -> None:
    torch.manual_seed(0)
    rows = torch.randn(9, 3 * BLOCK + 7)
    rows[:, BLOCK : 2 * BLOCK] = 0.0
    together = quantise(rows, bits)
    assert all(torch.equal(quantise(row, bits), found) for row, found in zip(rows, together, strict=True))
