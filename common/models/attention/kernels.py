"""Which of PyTorch's kernels attention takes: settled once, for the forward pass and for its recomputation.

PyTorch chooses a kernel at each call: by shapes and dtypes, by what the caller has switched on, and on some GPUs by
whether gradients are wanted (the flash kernel has no backward pass for heads wider than 192 on GeForce cards). A block
is computed once without gradients and once with them. Both must take the same kernel: kernels round differently, and
with dropout in attention they would drop different values. Not run on a GPU yet.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedConfig
from transformers.integrations import sdpa_attention

from common.hardware import kernels_of
from common.models.attention.memory import head_sizes
from common.models.attention.varlen import takes_flash
from common.models.structure import layer_configs

_TOKENS = 128  # Tokens of the example that PyTorch decides about
_WIDEST_FLASH = 256  # Widest heads of CUDA's flash kernel
_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")

# CUDA's kernels that do a whole call of attention, by the names of their operators.
KERNELS: dict[str, SDPBackend] = {
    str(packet.default): backend
    for backend, packet in (
        (SDPBackend.FLASH_ATTENTION, torch.ops.aten._scaled_dot_product_flash_attention),
        (SDPBackend.EFFICIENT_ATTENTION, torch.ops.aten._scaled_dot_product_efficient_attention),
        (SDPBackend.CUDNN_ATTENTION, torch.ops.aten._scaled_dot_product_cudnn_attention),
    )
}


_shares_heads = sdpa_attention.use_gqa_in_sdpa


def shares_heads(mask: torch.Tensor | None, key: torch.Tensor, *value: torch.Tensor) -> bool:
    """Return whether attention is to be given keys of fewer heads than queries; replaces transformers' function:
    without flash attention only CUDA's math kernel takes them, whose scores of all pairs of tokens are in no plan."""
    width = key.shape[-1]
    has_flash = (
        takes_flash(key, key) and not 192 < width <= 224 and all(each.shape[-1] == width for each in value)
    )
    return (has_flash or kernels_of(key.device) != "cuda") and _shares_heads(mask, key, *value)


sdpa_attention.use_gqa_in_sdpa = shares_heads  # type: ignore[assignment]


_bias_mask = getattr(sdpa_attention, "create_position_bias_mask", None)  # None in earlier versions


def bias_mask(bias: torch.Tensor, *others: Any) -> torch.Tensor:
    """Return the mask of a learnt bias, as one that wants a gradient in every pass; replaces transformers' function:
    some kernels have no gradient of masks, and are left for those without (Inkling)."""
    assert _bias_mask is not None
    mask: torch.Tensor = _bias_mask(bias, *others)
    return mask if mask.requires_grad else mask.detach().requires_grad_()


if _bias_mask is not None:
    sdpa_attention.create_position_bias_mask = bias_mask  # type: ignore[assignment]


class AttentionKernels:
    """The kernels that attention may take in a run: for a configuration, a dtype of hidden states, and a device."""

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device):
        self._device = device
        self._is_pinned = False
        switched_on = tuple(backend for backend, enabled in _SWITCHES.items() if enabled())
        # What is switched on now, without what PyTorch would take in only one of the two passes.
        self.backends = switched_on or (SDPBackend.MATH,)
        heads = set()
        for layer in layer_configs(config.get_text_config()):
            count, _, width, _ = head_sizes(layer)
            dropout = next((value for name in _DROPOUT if (value := getattr(layer, name, None))), 0.0)
            if count and width:
                heads.add((width, float(dropout)))
        for width, dropout in sorted(heads):
            self._settle(width, dropout, dtype)

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """Let attention take these kernels only while the context is open, and no others."""
        if self._is_pinned:  # PyTorch's context takes 10 us
            yield
            return
        self._is_pinned = True
        try:
            with sdpa_kernel(list(self.backends)):
                yield
        finally:
            self._is_pinned = False

    def taken(
        self, device: str, parts: Sequence[torch.Tensor], mask: torch.Tensor | None, causal: bool
    ) -> SDPBackend:
        """Return the kernel that a call of attention takes on a device: that device decides, if it is the model's.

        Args:
            device: ``"cpu"`` or ``"cuda"``, or a name of :data:`KERNELS`: what was seen to be taken there.
            parts: query, key and value, ``[B, H, S, D]`` each, on any device.
            mask: ``[.., S, S]``, if there is one.
            causal: whether attention is causal without a mask.
        """
        if device in KERNELS:
            return KERNELS[device]
        if device == self._device.type:
            tokens = [min(part.shape[2], _TOKENS) for part in parts]
            with _disable_current_modes():  # the question is no part of what is traced
                given = [
                    self._empty(part, count, part.shape[3]) for part, count in zip(parts, tokens, strict=True)
                ]
                hides = None if mask is None else self._empty(mask, *tokens[:2])
                return self._asked(given, hides, 0.0, causal, True)
        query, _, value = parts
        if device == "cpu":
            return SDPBackend.FLASH_ATTENTION if query.shape[-1] == value.shape[-1] else SDPBackend.MATH
        narrow = query.dtype.itemsize == 2 and query.shape[-1] <= _WIDEST_FLASH
        return SDPBackend.FLASH_ATTENTION if mask is None and narrow else SDPBackend.EFFICIENT_ATTENTION

    def _settle(self, width: int, dropout: float, dtype: torch.dtype) -> None:
        """Leave out what would be taken without gradients and not with them, by heads of this width."""
        parts = [torch.empty(1, 1, _TOKENS, width, dtype=dtype, device=self._device)] * 3
        for mask in (None, torch.ones(_TOKENS, _TOKENS, dtype=torch.bool, device=self._device)):
            while len(self.backends) > 1:
                without, with_them = (
                    self._asked(parts, mask, dropout, mask is None, gradients) for gradients in (False, True)
                )
                if without is with_them or without not in self.backends:
                    break
                self.backends = tuple(backend for backend in self.backends if backend is not without)

    def _asked(
        self,
        parts: Sequence[torch.Tensor],
        mask: torch.Tensor | None,
        dropout: float,
        causal: bool,
        gradients: bool,
    ) -> SDPBackend:
        query, key, value = (part.detach().requires_grad_(gradients) for part in parts)
        shared = query.shape[1] != key.shape[1]
        with self.pinned(), torch.set_grad_enabled(gradients):
            return _NUMBERS[
                torch._fused_sdp_choice(query, key, value, mask, dropout, causal, enable_gqa=shared)
            ]

    def _empty(self, like: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        return torch.empty((*like.shape[:-2], rows, columns), dtype=like.dtype, device=self._device)


_NUMBERS = {backend.value: backend for backend in SDPBackend.__members__.values()}
_SWITCHES = {
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
}
