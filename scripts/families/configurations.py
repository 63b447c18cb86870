"""A small configuration of every family: transformers' defaults, shrunk by rule, with what a default lacks."""

from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from common.models.miniature import miniature

_HEADS = {"head_dim": 128}
LACKING: dict[str, dict[str, Any]] = {
    # Defaults that no model can be built from.
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8}},
    "deepseek_v2": {"num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "dots1": {
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
    },
    "hunyuan_v1_dense": _HEADS,
    "hunyuan_v1_moe": _HEADS,
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "ministral": _HEADS,
    "nemotron": {"num_key_value_heads": 8},
    "xmod": {"default_language": "en_XX"},
    # Defaults that leave out what the family is there for.
    "gemma4": {"text_config": {"num_kv_shared_layers": 10}},
    "gemma4_text": {"num_kv_shared_layers": 10},
}
_QSA = {
    "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}  # fmt: skip
LACKING |= {"qwen4_exp_text": _QSA, "qwen4_exp": {"text_config": _QSA}}


def small_config(name: str, dropout: bool = True) -> PreTrainedConfig:
    """Return the miniature of a family's default configuration, as a causal decoder.

    Args:
        name: in transformers' mapping.
        dropout: as the default has it; False: none, for what draws its random numbers in another order.
    """
    config_class = CONFIG_MAPPING[name]
    config = config_class(**LACKING.get(name, {}))
    if "is_decoder" in config.to_dict() and not config.is_encoder_decoder:
        config.is_decoder = True
    small = miniature(config)
    if not dropout:
        for part in _parts(small):
            for field, value in part.to_dict().items():
                if "drop" in field and isinstance(value, float):
                    setattr(part, field, 0.0)
    small.use_cache = False
    small.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]]
    return small


def _parts(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    nested = [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
    return [config, *(part for child in nested for part in _parts(child))]
