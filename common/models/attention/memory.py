"""Memory that grows with the square of a row's length: masks, and scores where attention is computed one product at a
time."""

import math
from dataclasses import dataclass

from transformers import PreTrainedConfig

from common.models.structure import layer_configs

# Bytes that a block's forward and backward pass hold at once for each score `[H, S, S]` where attention is "eager".
# Measured on a CPU with gpt-oss, BLOOM, Gemma 2 and GPT-J: 14 to 19 in fp32, 17 to 25 in bf16.
_EAGER_BYTES = 25
# The same where it is because keys and values differ in width (DeepSeek-V3), measured: 12; and bytes for each element
# of queries: fp32 copies, and the same scaled, of queries and keys.
_UNEQUAL_BYTES, _UNEQUAL_COPIES = 14, 16
_MASK_BYTES = 8  # Bytes for each element of a mask `[S, S]` that a kernel is given; measured with Gemma 3 in bf16: 6.2
_WINDOWS = ("sliding_window", "attention_chunk_size", "local_attention", "window_size")


@dataclass(frozen=True)
class AttentionMemory:
    """Memory that attention takes for a row of ``S`` tokens."""

    eager_heads: int = 0  # Number of heads whose scores are computed one product at a time; 0 with a kernel
    window: int = 0  # Number of tokens that a token of some layers sees; 0: all, in every layer
    width: int = 4  # Bytes of an element in the compute dtype
    unequal_heads: int = 0  # Number of heads whose keys and values differ in width, which no CPU kernel takes
    key_width: int = 0  # Width of such a head's keys

    @staticmethod
    def of(config: PreTrainedConfig, width: int) -> "AttentionMemory":
        """Return what a model of this configuration takes, as transformers will compute its attention."""
        text = config.get_text_config()
        eager = text._attn_implementation == "eager"
        layers = layer_configs(text)
        heads = max(getattr(layer, "num_attention_heads", None) or 0 for layer in layers) if eager else 0
        unequal, keys = (0, 0) if eager else max((_unequal_heads(layer) for layer in layers), key=math.prod)
        windows = [getattr(text, name, None) for name in _WINDOWS]
        window = min((one for one in windows if isinstance(one, int) and one > 0), default=0)
        return AttentionMemory(heads, window, width, unequal, keys)

    def mask_bytes(self, seq_len: int, padded: bool = False) -> int:
        """Return the bytes of the masks that are held from the forward to the backward pass.

        Args:
            padded: whether a mask of padding is given: kernels are then given one of all pairs of tokens.
        """
        windowed = 0 < self.window < seq_len
        if self.eager_heads:
            return (1 + windowed) * self.width * seq_len**2
        return (padded + windowed) * seq_len**2  # boolean; there is none for what is merely causal

    def workspace_bytes(self, seq_len: int, cpu: bool = True, padded: bool = False) -> int:
        """Return the bytes that computing one block takes.

        Args:
            padded: whether a mask of padding is given.
        """
        if self.eager_heads:
            return self.eager_heads * _EAGER_BYTES * seq_len**2
        if self.unequal_heads and cpu:
            return self.unequal_heads * seq_len * (_UNEQUAL_BYTES * seq_len + _UNEQUAL_COPIES * self.key_width)
        return (padded or 0 < self.window < seq_len) * _MASK_BYTES * seq_len**2


def _unequal_heads(layer: PreTrainedConfig) -> tuple[int, int]:
    """Return the number of heads, and the width of their keys, if their values have another width (multi-head latent
    attention); otherwise zeros."""
    rotated, values = getattr(layer, "qk_rope_head_dim", None), getattr(layer, "v_head_dim", None)
    if not isinstance(rotated, int) or not isinstance(values, int):
        return 0, 0
    keys = rotated + (getattr(layer, "qk_nope_head_dim", None) or 0)
    return (0, 0) if keys == values else (layer.num_attention_heads, keys)


NO_ATTENTION = AttentionMemory()
