"""Count the floating-point operations of a token. One multiply-add is two.

Conventions, the usual ones for reporting throughput:

* 6 per parameter and token: 2 forward, 4 backward; a frozen one has no gradient and takes 4. *All* parameters count,
  embeddings, norms and biases included, tied ones once. In a mixture of experts only the experts that a token visits
  count. Towers (of vision-language models) are left out: no token of text passes through them.
* Attention scores and their product with the values: 12 x layers x width x sequence length per token, width being all
  heads together. Causal attention counts as dense, and a sliding window as a full one; linear attention, state
  spaces and convolutions have no scores, and what they compute next to their parameters is left out.
* Model FLOPs leave recomputation out. Hardware FLOPs add a second forward of every block, which is what the
  backward pass of a streamed stack costs; embeddings, head and loss are not recomputed.
"""

import re

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from common.models.structure import find_blocks, first_number, layer_configs
from common.models.vision import tower_parameters

# Kinds of layers, as configurations name them, that do not compare every token with every other one.
_WITHOUT_SCORES = ("linear_attention", "mamba", "mamba2", "conv", "recurrent", "rg_lru", "moe", "mlp")


def model_flops_per_token(model: PreTrainedModel, seq_len: int) -> float:
    """Return the FLOPs of forward and backward per token, in sequences of ``seq_len`` tokens, without recomputation."""
    trained = active_parameters(model, model, trained=True)
    return 4.0 * active_parameters(model, model) + 2 * trained + 3 * _attention_forward(model, seq_len)


def hardware_flops_per_token(model: PreTrainedModel, seq_len: int) -> float:
    """Return the FLOPs per token with the forward of every block done again in the backward pass."""
    _, blocks = find_blocks(model)
    again = 2.0 * active_parameters(model, blocks) + _attention_forward(model, seq_len)
    return model_flops_per_token(model, seq_len) + again


def active_parameters(model: PreTrainedModel, part: nn.Module, trained: bool = False) -> float:
    """Count the parameters of ``part``, a module of ``model``, that one token uses: of routed experts those it visits.

    Args:
        trained: whether to leave out frozen parameters.
    """
    shares = {id(model.get_parameter(name)): share for name, share in visited_shares(model).items()}
    shares |= {id(model.get_parameter(name)): 0.0 for name in tower_parameters(model)}
    return sum(
        parameter.numel() * shares.get(id(parameter), 1.0)
        for parameter in part.parameters()
        if parameter.requires_grad or not trained
    )


def visited_shares(model: PreTrainedModel) -> dict[str, float]:
    """Return the share of each routed expert's parameter that a token uses: experts per token / experts.

    Experts are what lies in a module called ``experts``: a list of modules, or parameters that are fused along their
    first dimension. Fused parameters in modules of other names (GraniteMoE's ``input_linear``) are found by their
    shape, ``[experts, rows, columns]``. Adapters of experts are theirs. Shared experts count whole, as routers do.
    """
    config = model.config.get_text_config()
    experts = (
        first_number(config, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts") or 0
    )
    visited = (
        first_number(config, "num_experts_per_tok", "moe_topk", "moe_top_k", "top_k_experts", "moe_k")
        or experts
    )
    if visited >= experts:
        return {}
    fused = [
        path
        for path, module in model.named_modules()
        if not isinstance(module, nn.Conv1d)
        and any(
            parameter.ndim == 3 and parameter.shape[0] == experts
            for parameter in module.parameters(recurse=False)
        )
    ]
    # An adapter of fused parameters wraps their module: all that the wrapper holds is the experts'.
    inside = tuple(f"{path.partition('.base_layer')[0]}." for path in fused)
    return {
        name: visited / experts
        for name, _ in model.named_parameters()
        if name.startswith(inside) or re.search(r"(^|\.)experts\.", name)
    }


def _attention_forward(model: PreTrainedModel, seq_len: int) -> float:
    """Count scores and weighted values: 2 products of 2 FLOPs x width x seq_len per token and layer with attention."""
    config = model.config.get_text_config()
    layers = layer_configs(config)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(layers)
    attending = (layer for layer, kind in zip(layers, kinds, strict=False) if kind not in _WITHOUT_SCORES)
    return 4.0 * seq_len * sum(_attention_width(layer) for layer in attending)


def _attention_width(layer: PreTrainedConfig) -> float:
    heads = first_number(layer, "num_attention_heads")
    if not heads:
        return 0
    latent = [first_number(layer, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
    if None not in latent:  # multi-head latent attention: DeepSeek-V2's, where head_dim is the rotary part's
        return heads * sum(size for size in latent if size is not None) / 2
    return heads * (first_number(layer, "head_dim") or layer.hidden_size // heads)
