"""Memory of attention: masks, and scores where attention is computed one product at a time, which grow with the square
of a row's length; and what a chunk of a row takes."""

import math
from dataclasses import dataclass

from transformers import PreTrainedConfig

from common.models.attention.tiles import KEYS, SCORES
from common.models.structure import first_number, layer_configs

# Bytes that a block's forward and backward pass hold at once for each score `[H, S, S]` where attention is "eager".
# Measured on a CPU with gpt-oss, BLOOM, Gemma 2 and GPT-J: 14 to 19 in fp32, 17 to 25 in bf16.
_EAGER_BYTES = 25
# The same where it is because keys and values differ in width (DeepSeek-V3), measured: 12; and bytes for each element
# of queries: fp32 copies, and the same scaled, of queries and keys.
_UNEQUAL_BYTES = 14
_UNEQUAL_COPIES = 16
# Bytes for each element of a mask `[S, S]` that a kernel is given; measured with Gemma 3 in bf16: 6.2
_MASK_BYTES = 8
# What a chunk takes, measured on a CPU at most: fp32 values of each query, sums and results; keys and values of a tile,
# copies and gradients; and where products compute scores, fp32 values of each score of a tile.
_CHUNK_QUERIES = 3
_CHUNK_KEYS = 2
_CHUNK_SCORES = 4
_WINDOWS = ("sliding_window", "attention_chunk_size", "local_attention", "window_size")


@dataclass(frozen=True)
class AttentionMemory:
    """Memory that attention takes for a row of ``S`` tokens."""

    eager_heads: int = 0  # Number of heads whose scores are computed one product at a time; 0 with a kernel
    window: int = 0  # Number of tokens that a token of some layers sees; 0: all, in every layer
    width: int = 4  # Bytes of an element in the compute dtype
    unequal_heads: int = 0  # Number of heads whose keys and values differ in width, which no CPU kernel takes
    key_width: int = 0  # Width of a head's keys
    value_width: int = 0
    heads: int = 0  # Number of heads of queries
    groups: int = 0  # Number of heads of keys and values
    capped: bool = False  # Whether scores have a soft cap, which no kernel has

    @staticmethod
    def of(config: PreTrainedConfig, width: int) -> "AttentionMemory":
        """Return what a model of this configuration takes, as transformers will compute its attention."""
        text = config.get_text_config()
        eager = text._attn_implementation == "eager"
        layers = layer_configs(text)
        heads, groups, keys, values = max((head_sizes(layer) for layer in layers), key=math.prod)
        sizes = [getattr(text, name, None) for name in _WINDOWS]
        window = min((size for size in sizes if isinstance(size, int) and size > 0), default=0)
        unequal = keys != values and not eager
        capped = bool(getattr(text, "attn_logit_softcapping", None))
        return AttentionMemory(
            heads if eager else 0, window, width, heads if unequal else 0, keys, values, heads, groups, capped
        )

    def mask_bytes(self, seq_len: int, padded: bool = False) -> int:
        """Return the bytes of the masks that are held from the forward to the backward pass; ``padded``: with one of
        padding."""
        windowed = 0 < self.window < seq_len
        if self.eager_heads:
            return (1 + windowed) * self.width * seq_len**2
        return (padded + windowed) * seq_len**2  # boolean; there is none for what is merely causal

    def workspace_bytes(self, seq_len: int, cpu: bool = True, padded: bool = False) -> int:
        """Return the bytes that computing one block takes; arguments as in :meth:`mask_bytes`."""
        if self.eager_heads:
            return self.eager_heads * _EAGER_BYTES * seq_len**2
        if self.unequal_heads and cpu:
            return (
                self.unequal_heads * seq_len * (_UNEQUAL_BYTES * seq_len + _UNEQUAL_COPIES * self.key_width)
            )
        masks = (padded or 0 < self.window < seq_len) * _MASK_BYTES * seq_len**2
        return masks if cpu else max(masks, self._tile_scores(seq_len, seq_len, cpu))  # of packed documents

    def chunk_bytes(self, queries: int, keys: int, cpu: bool = True) -> int:
        """Return the bytes that attention of a chunk of a row of ``keys`` tokens takes in one block.

        Gradients of all keys and values come in addition; see :mod:`common.models.attention.chunked`.
        """
        widest = max(self.key_width, self.value_width)
        seen = min(keys, self.window + queries) if self.window else keys
        results = _CHUNK_QUERIES * queries * self.heads * widest * 4
        if self.window and self.width == 2:
            results += seen * self.groups * (self.key_width + self.value_width) * 4  # sums of gradients
        tile = _CHUNK_KEYS * (seen if self.window else min(KEYS, keys)) * self.heads * 2 * widest * self.width
        return results + max(tile, self._tile_scores(queries, keys, cpu))

    def _tile_scores(self, queries: int, keys: int, cpu: bool) -> int:
        """Return the bytes of scores where products compute them: with a soft cap, and in fp32 on CUDA."""
        products = self.capped or (self.width > 2 and not cpu)
        return products * _CHUNK_SCORES * min(max(SCORES, queries), queries * keys) * self.heads * 4


def head_sizes(layer: PreTrainedConfig) -> tuple[int, int, int, int]:
    """Return the number of a layer's heads, those of its keys, and the widths of a head's keys and values."""

    def size(name: str) -> int:
        return first_number(layer, name) or 0

    heads = size("num_attention_heads")
    if size("qk_rope_head_dim") and size("v_head_dim"):  # multi-head latent attention
        return heads, heads, size("qk_rope_head_dim") + size("qk_nope_head_dim"), size("v_head_dim")
    width = size("head_dim") or size("hidden_size") // max(heads, 1)
    return heads, size("num_key_value_heads") or heads, width, width


NO_ATTENTION = AttentionMemory()
