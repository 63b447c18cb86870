"""What adapters are planned to take is enough for what PyTorch allocates for them, and not many times as much."""

from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, PeftConfig, get_peft_model
from torch import nn

from common.models.adapters.memory import adapter_memory
from fuyou.pieces.recording import LiveBytes

NAMES = ["first", "second", "third"]


def allocated(inputs: int, outputs: int, tokens: int, dtype: torch.dtype, config: PeftConfig | None) -> int:
    """Most bytes at once of forward and backward passes through layers that all see the same input."""
    layers = nn.ModuleDict({name: nn.Linear(inputs, outputs, bias=False, dtype=dtype) for name in NAMES})
    layers.requires_grad_(False)
    if config is not None:
        get_peft_model(layers, config)
        for parameter in layers.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    hidden = torch.ones(tokens, inputs, dtype=dtype, requires_grad=True)
    with LiveBytes() as seen:
        torch.stack([layers[name](hidden).sum() for name in NAMES]).sum().backward()
    return seen.most


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("inputs", "outputs", "tokens"), [(256, 768, 4), (768, 256, 4), (128, 128, 2048)])
@pytest.mark.parametrize("make", [
    lambda: LoraConfig(r=8, target_modules=NAMES), lambda: LoraConfig(r=8, target_modules=NAMES, lora_dropout=0.1),
    lambda: LoraConfig(r=8, target_modules=NAMES, use_dora=True),
], ids=["lora", "dropout", "dora"])  # fmt: skip
def test_enough(
    make: Callable[[], PeftConfig], inputs: int, outputs: int, tokens: int, dtype: torch.dtype
) -> None:
    taken = allocated(inputs, outputs, tokens, dtype, make()) - allocated(
        inputs, outputs, tokens, dtype, None
    )
    layers = nn.ModuleDict({name: nn.Linear(inputs, outputs, bias=False, dtype=dtype) for name in NAMES})
    get_peft_model(layers, make())
    planned = adapter_memory(layers)
    total = planned.fixed + tokens * planned.per_token
    # What is as large as an adapter is in the plan as its gradient.
    assert taken <= total + 2 * 4 * 2 * 8 * (inputs + outputs)
    if dtype is torch.bfloat16:  # in fp32 nothing need be copied
        assert total <= 3 * taken


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("layer", ["embed", "head"])
@pytest.mark.parametrize(
    "how", [{"modules_to_save": []}, {"trainable_token_indices": {}}], ids=["whole", "rows"]
)
def test_enough_for_embeddings(how: dict, layer: str, dtype: torch.dtype) -> None:
    config = LoraConfig(
        target_modules=["other"],
        **{key: [layer] if value == [] else {layer: [1, 5]} for key, value in how.items()},
    )
    makes = {
        "embed": lambda: nn.Embedding(2000, 64, dtype=dtype),
        "head": lambda: nn.Linear(64, 2000, bias=False, dtype=dtype),
    }
    model = nn.ModuleDict({layer: makes[layer](), "other": nn.Linear(2, 2)}).requires_grad_(False)
    get_peft_model(model, config)
    given = torch.arange(8) if layer == "embed" else torch.ones(8, 64, dtype=dtype)
    with LiveBytes() as seen:
        model[layer](given).sum().backward()
    planned = adapter_memory(model[layer])
    assert seen.most <= planned.fixed + 8 * planned.per_token + 8 * 2000 * dtype.itemsize  # and its output
    assert planned.fixed <= 12 * 2000 * 64 + 1
