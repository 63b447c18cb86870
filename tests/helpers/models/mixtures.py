"""Small mixtures of experts, of every kind that matters: fused and transposed experts, biases, shared experts."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3Config, GptOssConfig, PreTrainedConfig

_COMMON = {
    "vocab_size": 211, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "num_experts_per_tok": 2,
}  # fmt: skip
MIXTURES: dict[str, dict] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"head_dim": 16, "moe_intermediate_size": 32, "num_experts": 8},
    # The first layer is dense, every other one has a shared expert; the router's corrections are a buffer.
    "deepseek_v3": {
        "moe_intermediate_size": 32, "num_key_value_heads": 4, "n_routed_experts": 8, "n_shared_experts": 1,
        "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 16,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    },
    # Experts are [in, out], and have biases.
    "gpt_oss": {
        "head_dim": 16, "num_local_experts": 4, "sliding_window": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
}  # fmt: skip


def mixture_config(family: str, **changes: object) -> PreTrainedConfig:
    return AutoConfig.for_model(family, **{**_COMMON, **MIXTURES[family], **changes})


def save_mixtures(root: Path, names: Sequence[str] = tuple(MIXTURES), **changes: object) -> Path:
    """Save models with random weights, each in its own folder; returns ``root``. ``changes``: of the configurations."""
    for name in names:
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(mixture_config(name, **changes))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)  # biases and routers too
        model.save_pretrained(root / name)
    return root


def mixture_configs() -> dict[str, PreTrainedConfig]:
    """Three layers each; DeepSeek's first one is dense."""
    common = {
        "vocab_size": 211, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    return {
        "deepseek-v3": DeepseekV3Config(
            **common | {"num_key_value_heads": 4}, moe_intermediate_size=24, n_routed_experts=8, num_experts_per_tok=2,
            n_shared_experts=1, n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16,
            qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        ),
        "gpt-oss": GptOssConfig(
            **common | {"intermediate_size": 32}, head_dim=16, num_local_experts=4, num_experts_per_tok=2,
            sliding_window=8, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    }  # fmt: skip
