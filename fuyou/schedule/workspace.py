"""Device memory that computing takes besides all buffers: an upper estimate, by tokens."""

from collections.abc import Sequence
from fractions import Fraction

from transformers import PreTrainedConfig

from common.models.structure import layer_configs
from common.models.vision import NO_IMAGES
from fuyou.layout.model_layout import ModelLayout
from fuyou.layout.record import Kind
from fuyou.model.loss.cross_entropy import pass_bytes
from fuyou.schedule.batch import Batch

#: Copies of the logits that exist at once, in the compute dtype: themselves, their gradient, and one more in families
#: that pass them through a function (soft capping). What the loss makes in fp32 comes in passes:
#: fuyou/model/loss/cross_entropy.py.
LOGIT_COPIES = 3
#: Upper bound of the bytes that a router's loss takes for each token and expert: logits, their softmax, that in fp32,
#: masked, and a gradient of each, some of which are there at the same time.
ROUTER_BYTES = 32
#: PyTorch's allocator for CUDA splits its memory and reserves more than tensors take: replayed for six families
#: (tests/fuyou/schedule/test_allocator.py), up to a third more than estimated where all experts are trained.
RESERVED = Fraction(4, 3)
#: Workspace that cuBLAS keeps for each thread that multiplies: 32 MiB on Hopper and Blackwell, and less elsewhere.
LIBRARY_WORKSPACE_BYTES = 32 << 20


class Workspace:
    """The memory that one model computes in."""

    def __init__(self, layout: ModelLayout, config: PreTrainedConfig, cpu: bool):
        self._layout = layout
        self._text = config.get_text_config()
        self._cpu = cpu
        self._width = layout.precision.parameter_bytes
        self._elements = activation_elements_per_token(config)
        # What any saves: the gated ones of most families, 4 times
        self._feed_forward = 2 * _active_width(self._text)
        self._chosen = getattr(self._text, "num_experts_per_tok", None) or 0

    def nbytes(self, batch: Batch, columns: int) -> int:
        """Return the peak bytes.

        Args:
            columns: tokens of each row that go through the head at once.
        """
        layout = self._layout
        width = self._width
        images = layout.image_memory if layout.images else NO_IMAGES
        # Gradients that are not in their record's sum yet: of one parameter, twice.
        block = self._block(batch)
        gradients = 2 * layout.sizes[Kind.BLOCK].trained_parameter_nbytes
        past = self._past(batch) if batch.chunks > 1 else 0
        if past:
            # A feed-forward network is not there while a block attends, and in its backward pass has gradients
            wide = batch.micro_tokens * self._feed_forward * width
            past = max(past - wide if layout.key_memory().attends_first else past, wide)
        fragments = gradients and self._chosen and not self._cpu
        reserved = int((block + gradients) * RESERVED) + past if fragments else 0
        return max(
            block + max(gradients + past, self._head(batch, columns)),
            reserved,
            batch.micro_tokens * images.working * width,  # blocks do not run meanwhile
        )

    def _head(self, batch: Batch, columns: int) -> int:
        layout = self._layout
        width = self._width
        tokens = columns * batch.micro_rows
        vocabulary = self._text.vocab_size
        logits = tokens * vocabulary * LOGIT_COPIES * width
        logits += pass_bytes(tokens, vocabulary, "cpu" if self._cpu else "cuda", bool(batch.loss.outputs))
        # On the device: a chunk's outputs, or their gradients, in parts
        logits += tokens * batch.loss.outputs * 2 * 4
        # An outer gradient is made, transposed or summed on the way, and added to the flat buffer: measured on a CPU,
        # three times its size at once.
        head = logits + 3 * layout.sizes[Kind.NON_BLOCK].trained_parameter_nbytes
        return (
            head + tokens * layout.non_block_adapter_memory.per_token + layout.non_block_adapter_memory.fixed
        )

    def _block(self, batch: Batch) -> int:
        layout = self._layout
        adapting = self._layout.block_adapter_memory
        streams = max(1, layout.hidden_size // self._text.hidden_size)
        per_token = streams * self._elements * self._width
        per_token += ROUTER_BYTES * layout.router_experts + adapting.per_token
        attention = layout.attention.workspace_bytes(batch.seq_len, self._cpu, layout.padded)
        fixed = adapting.fixed + (batch.micro_rows * attention if batch.chunks == 1 else 0)
        if layout.orders:
            return self._passes(batch, per_token, fixed)
        return int(batch.micro_tokens * (per_token + layout.expert_output_bytes)) + fixed

    def _past(self, batch: Batch) -> int:
        """Return the bytes that a chunk takes for the tokens before it, none of which the head meets."""
        keys = self._layout.key_memory()
        length = batch.seq_len
        dense = keys.pairs * batch.columns * length
        return length * keys.computing + (
            dense or self._layout.attention.chunk_bytes(batch.columns, length, self._cpu)
        )

    def _passes(self, batch: Batch, per_token: float, fixed: int) -> int:
        """Return the bytes of the running passes through a block in pieces.

        The block's input and the gradient of its output are copied, for use beyond the part that begins a pass. Experts
        compute range by range: this is enough if half of all rows (pairs of a token and an expert) are in one range.
        Besides there are gradients of all rows. None of that exists while a linear layer computes with its adapter.
        """
        hidden = self._text.hidden_size * self._width
        experts = expert_width(self._text) * self._width
        in_experts = 2 * self._chosen * hidden + 2 * experts
        in_adapter = self._layout.block_adapter_memory.passing_per_token
        per_token += 2 * (1 + self._chosen) * hidden - 2 * experts - min(in_experts, in_adapter)
        pass_nbytes = int(batch.micro_tokens * per_token)
        library = 0 if self._cpu else LIBRARY_WORKSPACE_BYTES  # each pass has a thread
        if self._layout.sizes[Kind.BLOCK].trained_elements:
            return batch.micro_batches * (pass_nbytes + library) + fixed  # a backward pass of all together
        between = max(order.between_bytes for order in self._layout.orders)
        return (
            pass_nbytes
            + (batch.together - 1) * batch.micro_tokens * between
            + batch.together * library
            + fixed
        )


def expert_width(text: PreTrainedConfig) -> int:
    """Return the width of all feed-forward networks that are active for a token; 0 without experts."""
    active = getattr(text, "num_experts_per_tok", None)
    return (
        active * (getattr(text, "moe_intermediate_size", None) or _feed_forward_width(text)) if active else 0
    )


def activation_elements_per_token(config: PreTrainedConfig) -> float:
    """Return an upper estimate of the elements that one block's forward pass saves per token.

    Norms (which many families compute and save in fp32) and residuals: 11 hidden sizes; attention: 9 times the width of
    all queries, which in most families is another hidden size; the feed-forward network: 4 times its width, per active
    expert. Measured on a CPU (small models in bf16): 75 to 97% of it.
    """
    text = config.get_text_config()
    hidden = text.hidden_size
    return 11 * hidden + 9 * _widest(text) + 4 * _active_width(text)


def _active_width(text: PreTrainedConfig) -> int:
    return expert_width(text) or _feed_forward_width(text)


def _widest(text: PreTrainedConfig) -> int:
    return max(text.hidden_size, *map(_query_width_in, layer_configs(text)))


def _feed_forward_width(text: PreTrainedConfig) -> int:
    width = (
        getattr(text, "intermediate_size", None)
        or getattr(text, "ffn_dim", None)
        or getattr(text, "n_inner", None)
    )
    # Some have one for each layer
    return max(width) if isinstance(width, Sequence) else width or 4 * text.hidden_size


def _query_width_in(layer: PreTrainedConfig) -> int:
    latent = getattr(layer, "qk_nope_head_dim", None)  # multi-head latent attention
    head = latent + layer.qk_rope_head_dim if latent else getattr(layer, "head_dim", None)
    heads = getattr(layer, "num_attention_heads", None)
    return heads * head if isinstance(heads, int) and isinstance(head, int) else 0
