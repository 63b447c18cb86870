"""Adapters go where they are named: into experts that are fused into parameters, too; and nowhere else."""

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedConfig

from common.errors import UserError
from common.models.adapters.adapters import Adapters
from common.models.adapters.options import AdapterOptions
from common.models.meta_model import build_meta_model
from tests.helpers.models.families import family_config
from tests.helpers.models.mixtures import MIXTURES, mixture_config


def adapted(config: PreTrainedConfig, *targets: str, **options: float) -> Adapters:
    return Adapters(build_meta_model(config), AdapterOptions(4, targets=targets, **options).peft_config(), 0)


@pytest.mark.parametrize("fused", [["gate_up_proj", "down_proj"], ["experts.down_proj"]])
@pytest.mark.parametrize("family", MIXTURES)
def test_fused_experts_have_separate_names(family: str, fused: list[str]) -> None:
    """They are what peft adapts as target_parameters, which --lora-targets need not say."""
    config = mixture_config(family)
    attention = "q_b_proj" if family == "deepseek_v3" else "q_proj"
    found = adapted(config, attention, *fused)
    real = AutoModelForCausalLM.from_config(config)
    options = {"target_modules": [attention], "target_parameters": fused}
    twin = get_peft_model(real, LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **options))
    expected = {
        name: value for name, value in twin.get_base_model().named_parameters() if value.requires_grad
    }
    assert set(found.names) == expected.keys()
    layers = 2 if family == "deepseek_v3" else 3
    assert sum("experts" in name for name in found.names) == 2 * len(fused) * layers
    assert all(found.model.get_parameter(name).shape == value.shape for name, value in expected.items())


def test_names_that_nothing_has_are_rejected() -> None:
    with pytest.raises(UserError, match=r"called k_prog, so .* Did you mean 'k_proj'"):
        adapted(family_config("llama"), "q_proj", "k_prog")
    with pytest.raises(UserError, match=r"gate_proj, up_proj, so .*down_proj, gate_up_proj, k_proj"):
        adapted(mixture_config("gpt_oss"), "gate_proj", "up_proj", "down_proj")
    with pytest.raises(UserError, match=r"Did you mean 'q_a_proj'|Did you mean 'q_b_proj'"):
        adapted(mixture_config("deepseek_v3"), "q_proj")
    assert len(adapted(family_config("llama"), "self_attn.q_proj", "k_proj").names) == 2 * 2 * 3


def test_what_fused_experts_cannot_have_is_reported() -> None:
    for options in ({"dropout": 0.1}, {"dora": True}):
        with pytest.raises(UserError, match=r"experts are fused .* leave it out, or name other layers"):
            adapted(mixture_config("qwen3_moe"), "all-linear", **options)
        assert adapted(mixture_config("qwen3_moe"), "q_proj", **options).names
