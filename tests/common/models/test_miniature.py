"""Miniatures of every family keep each structural choice, and are small."""

import pytest
from transformers import (
    DeepseekV3Config,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    JambaConfig,
    LlamaConfig,
    Mamba2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2MoeConfig,
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


def test_heads_and_widths_keep_their_ratios() -> None:
    small = miniature(
        LlamaConfig(hidden_size=5120, num_attention_heads=40, num_key_value_heads=8, tie_word_embeddings=True)
    )
    assert small.num_attention_heads * small.head_dim == small.hidden_size
    assert small.num_attention_heads > small.num_key_value_heads > 1
    assert small.tie_word_embeddings
    apart = miniature(LlamaConfig(head_dim=256))  # heads wider than the hidden states
    assert apart.num_attention_heads * apart.head_dim > apart.hidden_size


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


def test_dense_and_sparse_layers() -> None:
    small = miniature(DeepseekV3Config())
    assert 0 < small.first_k_dense_replace < small.num_hidden_layers
    assert small.n_routed_experts // small.n_group >= 2
    assert small.topk_group < small.n_group
    assert small.qk_head_dim == small.qk_nope_head_dim + small.qk_rope_head_dim
    sparse = miniature(Qwen2MoeConfig(mlp_only_layers=[3, 5]))
    assert 0 < len(sparse.mlp_only_layers) < sparse.num_hidden_layers


def test_hybrids() -> None:
    assert set(miniature(JambaConfig()).layers_block_type) == set(JambaConfig().layers_block_type)
    small = miniature(Mamba2Config())
    assert small.num_heads * small.head_dim == small.expand * small.hidden_size


def test_factors_of_rotary_dimensions_shrink_with_heads() -> None:
    factors = [1.0 + index / 48 for index in range(48)]
    rope = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "rope_theta": 1e4}
    config = Phi3Config(rope_parameters=rope, original_max_position_embeddings=4096, max_position_embeddings=131072)
    small = miniature(config)
    assert len(small.rope_parameters["long_factor"]) == small.hidden_size // small.num_attention_heads // 2


def test_towers_are_smaller_than_the_language_model() -> None:
    small = miniature(Gemma3Config())
    assert small.vision_config.hidden_size < small.text_config.hidden_size
    assert small.vision_config.image_size % small.vision_config.patch_size == 0
