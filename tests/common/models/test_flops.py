import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from common.models.flops import active_parameters, hardware_flops_per_token, model_flops_per_token
from common.models.meta_model import build_meta_model
from common.models.presets import load_config
from tests.helpers.models.families import FAMILIES, MIXED, family_config

MIXTURES = {
    **{family: {} for family in MIXED},
    # Two kinds of layers, a shared expert, latent attention; the router's groups.
    "deepseek_v3": {
        "num_hidden_layers": 3, "hidden_size": 256, "intermediate_size": 768, "moe_intermediate_size": 192,
        "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 96, "kv_lora_rank": 64,
        "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 80, "n_routed_experts": 8, "n_group": 2,
        "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    },
    "gpt_oss": {"head_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 64},  # biases
    "glm4_moe": {
        "moe_intermediate_size": 96, "n_routed_experts": 4, "num_experts_per_tok": 1, "first_k_dense_replace": 1,
        "head_dim": 64,
    },
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},  # not called experts
}  # fmt: skip
_SIZES = {
    "vocab_size": 199, "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 320, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("family", MIXTURES)
def test_mixtures_agree_with_counted_products(family, balanced):
    """However tokens are routed, each goes to as many experts, and these are what counts."""
    known = family in FAMILIES
    sizes = (
        _SIZES | {"head_dim": 64, "moe_intermediate_size": 96} if known else {**_SIZES, **MIXTURES[family]}
    )
    config = family_config(family, **sizes) if known else AutoConfig.for_model(family, **sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    if not balanced:  # every token has one choice
        with torch.no_grad():
            model.get_input_embeddings().weight.copy_(torch.ones_like(model.get_input_embeddings().weight))
    seq = 32
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(seq)[None]).logits.sum().backward()
    lookup = 6 * model.get_input_embeddings().weight.numel()
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    counted = counter.get_total_flops() / seq + (0 if tied else lookup)
    assert counted == pytest.approx(model_flops_per_token(model, seq), rel=0.01)
    everything = sum(p.numel() for p in model.parameters())
    assert active_parameters(model, model) < 0.95 * everything


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in MIXED])
def test_blocks_agree_with_counted_products(family):
    """Against torch's counter of matrix products; what only we count (norms, biases) is small in a wide model."""
    sizes = {"n_embd": 256} if family == "gpt2" else {"hidden_size": 256, "head_dim": 64}
    sizes |= {"intermediate_size": 768, "ffn_dim": 1024, "word_embed_proj_dim": 256}
    config = family_config(family, **sizes, sliding_window=64)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    seq = 32
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, seq, dtype=torch.long)).logits.sum().backward()
    embedding = model.get_input_embeddings().weight.numel()
    positions = sum(p.numel() for n, p in model.named_parameters() if "embed_positions" in n or "wpe" in n)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    lookup = positions + (0 if tied else embedding)
    assert counter.get_total_flops() / seq + 6 * lookup == pytest.approx(
        model_flops_per_token(model, seq), rel=0.01
    )


def test_gpt3_by_hand():
    model = build_meta_model(load_config("gpt3-13b")[0])
    layers, hidden, vocab, context, seq = 40, 5120, 50257, 2048, 1024
    parameters = layers * (12 * hidden**2 + 13 * hidden) + (vocab + context) * hidden + 2 * hidden
    attention = 12 * layers * hidden * seq
    assert model_flops_per_token(model, seq) == 6 * parameters + attention
    blocks = layers * (12 * hidden**2 + 13 * hidden)
    assert hardware_flops_per_token(model, seq) == 6 * parameters + attention + 2 * blocks + attention / 3
