"""Small mixtures of experts with a router loss."""

from typing import Any

from transformers import GptOssConfig, PreTrainedConfig

from tests.helpers.twin import tiny_configs


def config_of(family: str, **fields: Any) -> PreTrainedConfig:
    """Of a mixture of experts whose router loss weighs so heavily that nothing can hide behind it."""
    if family == "gpt-oss":
        config: PreTrainedConfig = GptOssConfig(
            vocab_size=211, hidden_size=48, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"], bos_token_id=1, eos_token_id=2,
            pad_token_id=0,
        )  # fmt: skip
    else:
        config = tiny_configs()[family]
    for name, value in {"output_router_logits": True, "router_aux_loss_coef": 0.5, **fields}.items():
        setattr(config, name, value)
    return config
