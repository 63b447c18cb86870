"""Tiny mixtures of experts of the families that people train, beside those in tests/helpers/twin.py."""

from transformers import DeepseekV3Config, GptOssConfig, PreTrainedConfig


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
