"""Miniatures of every family keep each structural choice, and are small."""

import pytest
from transformers import (
    DeepseekV3Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    LlamaConfig,
    Mamba2Config,
    PreTrainedConfig,
    Qwen3NextConfig,
)

from common.models.meta_model import build_meta_model
from common.models.miniature import TOKENS, VOCABULARY, miniature


def parameters(config: PreTrainedConfig) -> int:
    return sum(parameter.numel() for parameter in build_meta_model(config).parameters())


@pytest.mark.parametrize("config", [
    LlamaConfig(), DeepseekV3Config(), Gemma3TextConfig(), Gemma4TextConfig(), Mamba2Config(), Qwen3NextConfig(),
], ids=lambda config: config.model_type)  # fmt: skip
def test_small_and_small_again(config: PreTrainedConfig) -> None:
    small = miniature(config)
    assert type(small) is type(config)
    assert parameters(small) < 1.5e6
    again = miniature(small)
    assert again.num_hidden_layers == small.num_hidden_layers
    assert again.hidden_size == small.hidden_size
    assert again.vocab_size == small.vocab_size == VOCABULARY


def test_every_kind_of_layer_stays_in_its_order() -> None:
    config = Gemma3TextConfig()
    small = miniature(config)
    assert set(small.layer_types) == set(config.layer_types)
    assert small.layer_types[0] == config.layer_types[0]
    assert small.layer_types[-1] == config.layer_types[-1]
    assert small.sliding_window < TOKENS / 2


def test_shared_keys_and_values_come_from_layers_that_stay() -> None:
    small = miniature(Gemma4TextConfig(num_kv_shared_layers=10))
    assert 0 < small.num_kv_shared_layers < small.num_hidden_layers
    own = small.layer_types[: -small.num_kv_shared_layers]
    assert set(small.layer_types[-small.num_kv_shared_layers :]) <= set(own)
