import pytest
import torch
from torch import nn
from transformers import AutoConfig, Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from common.errors import UserError
from common.models.meta_model import build_meta_model
from common.models.structure import decayed_parameters, find_blocks, fp32_parameters, parameter_names
from scripts.families.configurations import small_config
from tests.helpers.models.families import FAMILIES, family_config

BLOCKS = {"gpt2": "transformer.h", "opt": "model.decoder.layers", "gpt_neox": "gpt_neox.layers"}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_and_the_rest_are_the_whole_model(family, tied):
    model = build_meta_model(family_config(family, tie_word_embeddings=tied))
    name, blocks = find_blocks(model)
    assert name == BLOCKS.get(family, "model.layers") and len(blocks) == 3
    outer = [names for names in parameter_names(model) if not names[0].startswith(f"{name}.")]
    inside = {f"{name}.{inner}" for inner, _ in blocks.named_parameters()}
    outside = [alias for names in outer for alias in names]
    everything = {alias for alias, _ in model.named_parameters(remove_duplicate=False)}
    assert (
        len(outside) == len(set(outside))
        and inside.isdisjoint(outside)
        and inside | set(outside) == everything
    )
    assert sum(model.get_parameter(names[0]).numel() for names in outer) + sum(
        p.numel() for p in blocks.parameters()
    ) == sum(p.numel() for p in model.parameters())
    assert sum(len(names) == 2 for names in outer) == tied
    for first, *others in outer:
        assert all(model.get_parameter(alias) is model.get_parameter(first) for alias in others)


def test_a_single_block_wins_over_what_is_inside_it():
    model = build_meta_model(family_config("llama", num_hidden_layers=1))
    model.model.layers[0].mlp = nn.ModuleList([model.model.layers[0].mlp])
    model.model.layers[0].self_attn = None
    assert find_blocks(model)[0] == "model.layers"


def test_shared_parameters_are_rejected():
    model = build_meta_model(family_config("llama"))
    model.model.layers[2].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    with pytest.raises(UserError, match=r"layers\.0\.mlp\.up_proj\.weight = model\.layers\.2"):
        find_blocks(model)


def test_blocks_that_are_left_out_at_random_are_rejected():
    with pytest.raises(UserError, match=r"OPTForCausalLM has layerdrop = 0\.02 .*Set it to 0"):
        find_blocks(build_meta_model(family_config("opt", layerdrop=0.02)))


def test_a_model_without_blocks_is_rejected():
    model = build_meta_model(family_config("llama"))
    model.model.layers = nn.Sequential(*model.model.layers)
    with pytest.raises(UserError, match="none at all"):
        find_blocks(model)
    model.model.small = nn.ModuleList([nn.Linear(3, 3)])
    with pytest.raises(UserError, match=r"'model\.small', holds 12"):
        find_blocks(model)


def test_parameters_that_stay_fp32():
    config = AutoConfig.for_model(
        "ernie4_5_moe", vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, moe_intermediate_size=16, moe_num_experts=4, moe_k=2, moe_layer_start_index=0,
    )  # fmt: skip
    model = build_meta_model(config, dtype=torch.bfloat16)
    assert "model.layers.1.mlp.gate.weight" in fp32_parameters(model)
    assert not any("q_proj" in name or "gate_proj" in name for name in fp32_parameters(model))
    assert fp32_parameters(build_meta_model(family_config("llama"))) == []


# Of two sorts of parameters that are no matrices: those that are neither norms nor biases decay, and the others not.
CURIOUS = ("gpt_oss", "mamba2", "qwen3_next", "dbrx", "phi4_multimodal", "xlstm")
CANNOT_BE_BUILT = {"gemma3n", "gemma4_assistant", "gemma4_unified_assistant", "musicgen", "musicgen_melody"}


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in CURIOUS else pytest.mark.slow)
        for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if name not in CANNOT_BE_BUILT
    ],
)
def test_what_decays_is_what_decays_with_the_trainer(family: str) -> None:
    model = build_meta_model(small_config(family), dtype=torch.float32)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert decayed_parameters(model) == names & set(Trainer.get_decay_parameter_names(None, model))
