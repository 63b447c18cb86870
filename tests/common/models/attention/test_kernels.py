"""Kernels of attention: the same with gradients and without, and the one that the device takes in plans."""

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig
from transformers.integrations import sdpa_attention

from common.models.attention.kernels import KERNELS, AttentionKernels

CPU = torch.device("cpu")
LLAMA = LlamaConfig(hidden_size=512, num_attention_heads=2, num_hidden_layers=2, attention_dropout=0.1)
FLASH, EFFICIENT = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
CUDNN, MATH = SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH


def test_what_is_switched_on_at_first_is_what_is_taken() -> None:
    with sdpa_kernel([MATH]):
        only = AttentionKernels(LLAMA, torch.float32, CPU)
    assert only.backends == (MATH,)
    query = torch.randn(1, 2, 16, 8)
    with only.pinned():
        assert torch._fused_sdp_choice(query, query, query) == MATH.value
    assert torch._fused_sdp_choice(query, query, query) == FLASH.value
    assert only.taken("cpu", [query] * 3, None, True) is MATH


class GeForce:
    """A GPU on which the flash kernel takes no mask, and no heads wider than 192 where gradients are wanted."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []

    def choice(
        self,
        query: Any,
        _: Any,
        __: Any,
        mask: Any = None,
        dropout: float = 0.0,
        causal: bool = False,
        **___: Any,
    ) -> int:
        self.seen.append((query.shape[-1], dropout))
        wide = query.shape[-1] > 192 and query.requires_grad and torch.is_grad_enabled()
        if mask is None and not wide and torch.backends.cuda.flash_sdp_enabled():
            return FLASH.value
        return EFFICIENT.value if torch.backends.cuda.mem_efficient_sdp_enabled() else MATH.value


@pytest.mark.parametrize(("heads", "expected"), [(2, EFFICIENT), (4, FLASH)])
def test_a_kernel_for_one_of_the_passes_is_left_out(
    heads: int, expected: SDPBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = GeForce()
    monkeypatch.setattr(torch, "_fused_sdp_choice", gpu.choice)
    config = LlamaConfig(**{**LLAMA.to_dict(), "num_attention_heads": heads, "head_dim": 512 // heads})
    chosen = AttentionKernels(config, torch.bfloat16, CPU)
    assert gpu.seen and set(gpu.seen) == {(512 // heads, 0.1)}
    query = torch.randn(1, 2, 16, 512 // heads, requires_grad=True)
    taken = []
    for grad in (False, True):
        with torch.set_grad_enabled(grad), chosen.pinned():
            taken.append(SDPBackend.__members__[expected.name].value == gpu.choice(query, query, query))
    assert taken == [True, True]
    assert chosen.taken("cpu", [query] * 3, None, True) is expected
    assert chosen.taken("cpu", [query] * 3, torch.ones(16, 16, dtype=torch.bool), False) is EFFICIENT


def test_a_device_that_is_elsewhere() -> None:
    here = AttentionKernels(LLAMA, torch.bfloat16, CPU)
    query, wide = (
        torch.empty(1, 2, 4096, width, dtype=torch.bfloat16, device="meta") for width in (128, 288)
    )
    mask = torch.empty(1, 1, 4096, 4096, dtype=torch.bool, device="meta")
    assert here.taken("cuda", [query] * 3, None, True) is FLASH
    assert here.taken("cuda", [query.float()] * 3, None, True) is EFFICIENT
    assert here.taken("cuda", [wide] * 3, None, True) is EFFICIENT
    assert here.taken("cuda", [query] * 3, mask, False) is EFFICIENT
    seen = {here.taken(name, [query] * 3, None, True) for name in KERNELS}
    assert seen == {FLASH, EFFICIENT, CUDNN}


@pytest.mark.skipif(
    not hasattr(sdpa_attention, "create_position_bias_mask"),
    reason="transformers has no learnt biases of attention",
)
@pytest.mark.parametrize("learns", [False, True])
def test_a_learnt_bias_is_added_by_the_same_kernel_with_gradients_and_without(learns: bool) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 32, 16, dtype=torch.bfloat16) for _ in range(3))
    bias = torch.randn(1, 2, 32, 32, dtype=torch.bfloat16)
    module = torch.nn.Module()
    results = []
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            given = bias.clone().requires_grad_(learns)
            attended, _ = sdpa_attention.sdpa_attention_forward(
                module, query, key, value, None, position_bias=given
            )
            results.append(attended.detach())
            if gradients and learns:
                attended.float().sum().backward()
                assert given.grad is not None and given.grad.abs().max() > 0
    assert torch.equal(*results)
