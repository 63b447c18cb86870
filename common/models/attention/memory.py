"""Memory that grows with the square of a row's length: masks, and scores where attention is computed one product at a
time."""

from dataclasses import dataclass

from transformers import PreTrainedConfig

_EAGER_BYTES = 25
"""Bytes that a block's forward and backward pass hold at once for each score ``[H, S, S]`` where attention is "eager".
Measured on a CPU with gpt-oss, BLOOM, Gemma 2 and GPT-J: 14 to 19 in fp32, 17 to 25 in bf16."""
_MASK_BYTES = 8
"""Bytes for each element of a mask ``[S, S]`` that a kernel is given; measured with Gemma 3 in bf16: 6.2."""
_WINDOWS = ("sliding_window", "attention_chunk_size", "local_attention", "window_size")


@dataclass(frozen=True)
class AttentionMemory:
    """Memory that attention takes for a row of ``S`` tokens."""

    eager_heads: int = 0
    """Number of heads whose scores are computed one product at a time; 0: a kernel computes them in pieces."""
    window: int = 0
    """Number of tokens that a token of some layers sees; 0: all, in every layer."""
    width: int = 4
    """Bytes of an element in the compute dtype."""

    @staticmethod
    def of(config: PreTrainedConfig, width: int) -> "AttentionMemory":
        """Return what a model of this configuration takes, as transformers will compute its attention."""
        text = config.get_text_config()
        eager = text._attn_implementation == "eager" and bool(getattr(text, "num_attention_heads", 0))
        windows = [getattr(text, name, None) for name in _WINDOWS]
        window = min((one for one in windows if isinstance(one, int) and one > 0), default=0)
        return AttentionMemory(text.num_attention_heads if eager else 0, window, width)

    def mask_bytes(self, seq_len: int) -> int:
        """Return the bytes of the masks that are held from the forward to the backward pass."""
        windowed = 0 < self.window < seq_len
        if self.eager_heads:
            return (1 + windowed) * self.width * seq_len**2
        return windowed * seq_len**2  # boolean; without a window there is none

    def workspace_bytes(self, seq_len: int) -> int:
        """Return the bytes that computing one block takes."""
        if self.eager_heads:
            return self.eager_heads * _EAGER_BYTES * seq_len**2
        return (0 < self.window < seq_len) * _MASK_BYTES * seq_len**2


NO_ATTENTION = AttentionMemory()
