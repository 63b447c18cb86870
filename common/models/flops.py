"""Count the floating-point operations of a token. One multiply-add is two.

Conventions, the usual ones for reporting throughput:

* 6 per parameter and token: 2 forward, 4 backward; a frozen one has no gradient and takes 4. *All* parameters count,
  embeddings, norms and biases included, tied ones once. In a mixture of experts only the experts that a token visits
  count. Towers (of vision-language models) are left out: no token of text passes through them.
* Attention scores and their product with the values: 12 x layers x width x sequence length per token, width being all
  heads together. Causal attention counts as dense, and a sliding window as a full one.
* Model FLOPs leave recomputation out. Hardware FLOPs add a second forward of every block, which is what the
  backward pass of a streamed stack costs; embeddings, head and loss are not recomputed.
"""

import re

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from common.models.meta_model import build_meta_model
from common.models.structure import find_blocks
from common.models.vision.towers import tower_parameters


def model_flops_per_token(model: PreTrainedModel | PreTrainedConfig, seq_len: int) -> float:
    """Return the FLOPs of forward and backward per token, in sequences of ``seq_len`` tokens, without recomputation."""
    model = build_meta_model(model) if isinstance(model, PreTrainedConfig) else model
    trained = active_parameters(model, model, trained=True)
    return 4.0 * active_parameters(model, model) + 2 * trained + 3 * _attention_forward(model, seq_len)


def hardware_flops_per_token(model: PreTrainedModel | PreTrainedConfig, seq_len: int) -> float:
    """Return the FLOPs per token with the forward of every block done again in the backward pass."""
    model = build_meta_model(model) if isinstance(model, PreTrainedConfig) else model
    _, blocks = find_blocks(model)
    again = 2.0 * active_parameters(model, blocks) + _attention_forward(model, seq_len)
    return model_flops_per_token(model, seq_len) + again


def active_parameters(model: PreTrainedModel, part: nn.Module, trained: bool = False) -> float:
    """Count the parameters of ``part``, a module of ``model``, that one token uses: of routed experts those it visits.

    Args:
        trained: whether to leave out frozen parameters.
    """
    config = model.config.get_text_config()
    experts = _first(config, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts") or 0
    visited = _first(config, "num_experts_per_tok", "moe_topk", "moe_top_k", "top_k_experts", "moe_k") or experts
    total, towers = 0.0, {id(model.get_parameter(name)) for name in tower_parameters(model)}
    for name, parameter in part.named_parameters():
        if (trained and not parameter.requires_grad) or id(parameter) in towers:
            continue
        # Fused into one [experts, rows, columns], or a list of modules called "experts".
        fused = parameter.ndim == 3 and parameter.shape[0] == experts
        routed = fused or re.search(r"(^|\.)experts\.\d+\.", name)
        total += parameter.numel() * (visited / experts if routed and experts else 1.0)
    return total


def _attention_forward(model: PreTrainedModel, seq_len: int) -> float:
    """Count scores and weighted values: 2 products of 2 FLOPs x width x seq_len per token and layer with attention."""
    config = model.config.get_text_config()
    # Where layers differ, transformers has a configuration for each.
    layers = getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers
    return 4.0 * seq_len * sum(_attention_width(layer) for layer in layers)


def _attention_width(layer: PreTrainedConfig) -> int:
    heads = _first(layer, "num_attention_heads")
    return heads * (_first(layer, "head_dim") or layer.hidden_size // heads) if heads else 0


def _first(config: PreTrainedConfig, *names: str) -> int | None:
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)
