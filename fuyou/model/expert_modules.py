"""The modules of a block that hold a mixture's experts, by transformers' common interface."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from fuyou.model.blocks.looped import INTERFACE
from fuyou.model.blocks.weightless import on_meta
from fuyou.model.streamed_model import StreamedModel

_SAME = 3
_WIDER = 4
"""Outputs of all experts that a whole block's backward pass holds at once, in the compute dtype, or in that of the
routers' weights where that is wider. Measured on a CPU with small Mixtral, Qwen3-MoE, gpt-oss and DeepSeek-V3: 1.4 to
2.6, and 3.2."""


def expert_modules(stack: StreamedModel, layer: int) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a block, with their full names, whose experts can be cut in ranges."""
    for name, module in stack.blocks[layer].named_modules(prefix=f"{stack.block_prefix}.{layer}"):
        if all(hasattr(module, attribute) for attribute in INTERFACE):
            yield name, module


def expert_output_bytes(stack: StreamedModel) -> int:
    """Return the bytes, for each token, of outputs of experts while a whole block computes; 0 if there are none.

    Each token's experts have their own outputs, which are weighted before they are added up.
    """
    for layer in range(len(stack.blocks)):
        for name, module in expert_modules(stack, layer):
            parameter = next(module.parameters())
            width = parameter.dtype.itemsize
            text = stack.model.config.get_text_config()
            chosen = getattr(text, "num_experts_per_tok", None) or 1
            wider = _weights_dtype(stack, layer, name).itemsize
            elements = chosen * text.hidden_size
            return int(elements * (_SAME * width if wider <= width else _WIDER * wider))
    return 0


def _weights_dtype(stack: StreamedModel, layer: int, name: str) -> torch.dtype:
    """Return the dtype of what a router multiplies outputs of experts by; fp32 where that is not found out."""
    dtypes: list[torch.dtype] = []

    def forward(hidden: torch.Tensor, _: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        dtypes.append(weights.dtype)
        return torch.empty_like(hidden)

    block = stack.blocks[layer]
    module = stack.model.get_submodule(name)
    # A family's code may fail in any way without values.
    with contextlib.suppress(Exception), on_meta(block), torch.no_grad():
        hidden, args, kwargs = stack.meta_calls[layer]
        module.forward = forward  # type: ignore[method-assign]
        block(hidden, *args, **kwargs)
    return dtypes[0] if dtypes else torch.float32
