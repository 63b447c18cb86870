"""Small models of real families, by rule."""

from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from common.models.miniature import miniature
from fuyou.model.family import small_model

LACKING: dict[str, dict[str, Any]] = {
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8}
}


def small_config(family: str) -> PreTrainedConfig:
    """The family's default configuration, as a decoder, shrunk."""
    config = AutoConfig.for_model(family, **LACKING.get(family, {}))
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    small = miniature(config)
    small.use_cache = False
    for name, value in small.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(small, name, 0.0)
    return small


def model_of(family: str) -> PreTrainedModel:
    """With values that make every part matter."""
    config = small_config(family)
    return small_model(AutoModelForCausalLM._model_mapping[type(config)], config)
