"""Calls of PyTorch's attention, and which of them end in the math kernel."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class AttentionCalls(TorchFunctionMode):
    """Notes the arguments of each call of PyTorch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.calls.append((args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def takes_math(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **_: Any,
) -> bool:
    """PyTorch 2.11's rules on sm_86, 89, 90, and 120, where cuDNN's kernel is not taken."""
    width, aligned = query.shape[-1], 16 // query.dtype.itemsize
    equal = width == key.shape[-1] == value.shape[-1] and query.dtype.itemsize == 2
    flash = attn_mask is None and equal and (width <= 192 or (224 < width <= 256 and not dropout_p))
    efficient = query.shape[1] == key.shape[1] and width % aligned == value.shape[-1] % aligned == 0
    return not (flash or efficient)
