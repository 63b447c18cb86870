"""A model and a batch to train, as far as memory, communication and computing depend on them."""

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig

from common.errors import UserError
from common.models.flops import active_parameters, model_flops_per_token
from common.models.meta_model import build_meta_model
from common.models.structure import find_blocks
from fcdp.grouping import find_units, whole_units
from fuyou.model.loss.router_loss import find_router_loss


@dataclass(frozen=True)
class Workload:
    """A training step of one rank: ``micro_batches`` times ``micro_batch`` sequences of ``seq_len`` tokens."""

    parameters: float  # number of all parameters, tied ones counted once: Psi
    trainable: float  # number of parameters that have gradients and optimizer states: Psi'
    blocks: int  # number of transformer blocks, which are gathered, reduced and checkpointed one by one
    block_activation_bytes: float = 0.0  # bytes saved for the backward pass per token and block
    hidden_bytes: float = 0.0  # bytes of a block's input per token, which checkpointing keeps
    logits_bytes: float = 0.0  # bytes of the loss per token: logits as they come, in fp32, and their gradient
    forward_flops_per_token: float = 0.0
    weight_flops_per_token: float = 0.0  # FLOPs of the gradients of trainable weights per token
    seq_len: int = 1
    micro_batch: int = 1  # sequences that a rank computes at once
    # what the backward pass gathers no second time: head and final norm, with which it begins
    kept_gathered: float = 0.0
    largest_unit: float = 0.0  # parameters of the largest unit; 0: all are alike
    compute_bytes: float = 2.0  # bytes of one parameter in a gather that is not quantized
    gradient_bytes: float = 2.0  # bytes of one gradient in a reduction that is not quantized
    micro_batches: int = 1  # number of micro-batches that accumulate before the optimizer steps: s in PaRO, M in AMSP
    router_loss: bool = False  # whether the loss has a router loss, which is known once all of a batch has gone forward
    cache_threshold: float = 0.9  # part of device memory up to which an adaptive cache keeps shards there
    deepspeed_states: bool = False  # P, G, and OS take 2, 2, and 12 bytes over their scopes, as the papers count them

    def __post_init__(self) -> None:
        if not 0 < self.trainable <= self.parameters:
            raise UserError(
                f"{self.trainable:,.0f} trainable parameters of {self.parameters:,.0f}: it must be more than 0 and at "
                "most all of them."
            )

    @property
    def tokens(self) -> int:
        return self.seq_len * self.micro_batch

    @property
    def router_passes(self) -> int:
        """Forward passes without a backward pass, in which the router loss of several micro-batches is found."""
        return self.micro_batches if self.router_loss and self.micro_batches > 1 else 0

    @property
    def units(self) -> int:
        """Number of units in which parameters are sent: every block, and embedding and head together."""
        return self.blocks + 1

    @property
    def forward_flops(self) -> float:
        return self.tokens * self.forward_flops_per_token

    def backward_flops(self, checkpointing: bool) -> float:
        """Return the FLOPs of a micro-batch's backward pass: gradients of activations and of trainable weights."""
        again = self.forward_flops_per_token if checkpointing else 0.0
        return self.tokens * (self.forward_flops_per_token + self.weight_flops_per_token + again)

    def activation_bytes(self, checkpointing: bool, blocks: int | None = None) -> float:
        """Return the bytes that one micro-batch saves, with attention that keeps no scores; or those that are left when
        its backward pass has ``blocks`` more to do."""
        left = self.blocks if blocks is None else min(blocks, self.blocks)
        block = self.tokens * self.block_activation_bytes
        saved = left * self.tokens * self.hidden_bytes + block if checkpointing else left * block
        return saved + (self.tokens * self.logits_bytes if blocks is None else 0.0)

    @classmethod
    def of_model(
        cls,
        config: PreTrainedConfig,
        *,
        seq_len: int,
        micro_batch: int = 1,
        micro_batches: int = 1,
        trainable_ratio: float = 1.0,
        dtype_bytes: int = 2,
        cache_threshold: float = 0.9,
        router_loss: str = "auto",
    ) -> "Workload":
        """Return the workload of a Hugging Face model that computes and reduces in ``dtype_bytes`` per number."""
        model = build_meta_model(config)
        _, blocks = find_blocks(model)
        parameters = float(sum(parameter.numel() for parameter in model.parameters()))
        active = active_parameters(model, model)
        kept, largest = _kept_and_largest(model)
        attention = (model_flops_per_token(model, seq_len) - 6.0 * active) / 3
        text = config.get_text_config()
        is_gated = any(name.endswith(("gate_proj", "gate_up_proj")) for name, _ in model.named_modules())
        return cls(
            parameters=parameters,
            trainable=parameters * trainable_ratio,
            blocks=len(list(blocks.children())),
            block_activation_bytes=dtype_bytes / 2 * _block_activation_bytes(text, is_gated),
            hidden_bytes=float(dtype_bytes * text.hidden_size),
            logits_bytes=(dtype_bytes + 4.0 + 4.0) * text.vocab_size,
            forward_flops_per_token=2.0 * active + attention,
            # Scores and weighted values have two inputs: their backward is two forwards, for any trainable part.
            weight_flops_per_token=2.0 * active * trainable_ratio + attention,
            seq_len=seq_len,
            micro_batch=micro_batch,
            kept_gathered=kept,
            largest_unit=largest,
            compute_bytes=float(dtype_bytes),
            gradient_bytes=float(dtype_bytes),
            micro_batches=micro_batches,
            router_loss=find_router_loss(model, router_loss) is not None,
            cache_threshold=cache_threshold,
        )


def _kept_and_largest(model: nn.Module) -> tuple[float, float]:
    """Return the parameters of units that :func:`fcdp.fully_shard` does not reshard after the forward pass, and those
    of the largest unit."""
    units = find_units(model, None)
    sizes = [
        (units[group.unit].keep_after_forward, float(sum(parameter.numel() for parameter in group.registered())))
        for group in whole_units(units)
    ]
    return sum(size for is_kept, size in sizes if is_kept), max(size for _, size in sizes)


def _block_activation_bytes(config: PreTrainedConfig, gated: bool) -> float:
    """Return the bytes per token that one block saves in bf16 (Korthikanti et al., arXiv:2205.05198, section 4.1),
    without dropout masks, in the model's sizes."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    head = getattr(config, "head_dim", None) or hidden // heads
    keys = (getattr(config, "num_key_value_heads", None) or heads) * head
    inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden
    norms, mlp = 2 * hidden, hidden + (4 if gated else 2) * inner
    attention = hidden + heads * head + 2 * keys + heads * head
    return 2.0 * (norms + attention + mlp)
