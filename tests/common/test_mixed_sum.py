"""Sums in a wider type equal PyTorch's, bit for bit."""

import pytest
import torch

from common.mixed_sum import add_to_wider


@pytest.mark.parametrize(
    "shape", [(), (0,), (1, 700_001), (700_001,), (1031, 513), (3, 400_003), (7, 5, 9001)]
)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equals_pytorch(shape: tuple[int, ...], transposed: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    total = torch.randn(shape, generator=generator)
    values = (
        torch.randn(shape[::-1], generator=generator).to(dtype).permute(tuple(reversed(range(len(shape)))))
    )
    values = values if transposed else values.contiguous()
    expected = total + values
    add_to_wider(total, values)
    assert torch.equal(total, expected)
