"""Adapters that nobody has named are on attention and dense feed-forward layers, in every family."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import check_target_module_exists
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
)

from common.errors import UserError
from common.models.adapters.adapters import Adapters
from common.models.adapters.default_targets import exclude_modules
from common.models.adapters.options import AdapterOptions
from common.models.meta_model import build_meta_model
from common.models.miniature import miniature
from tests.helpers.models.families import FAMILIES, family_config
from tests.helpers.models.mixtures import MIXTURES, mixture_config
from tests.helpers.models.small_models import small_config

DENSE = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def adapted(config: PreTrainedConfig, *targets: str) -> Adapters:
    options = AdapterOptions(4, targets=targets) if targets else AdapterOptions(4)
    return Adapters(build_meta_model(config), options.peft_config(), 0)


def places(adapters: Adapters) -> set[str]:
    """Return the paths of adapted modules and fused experts."""
    return {name.partition(".lora_")[0] for name in adapters.names}


def test_a_dense_model_has_them_in_all_its_blocks_linear_layers() -> None:
    default = adapted(family_config("llama"))
    assert default.names == adapted(family_config("llama"), "all-linear").names
    assert set(default.config.target_modules) == DENSE
    assert default.config.exclude_modules is None
    assert default.where == ", ".join(sorted(DENSE))


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_has_them_on_heads_routers_or_experts(family: str) -> None:
    default = adapted(family_config(family))
    parts = [place.split(".") for place in places(default)]
    assert parts
    assert not any({"experts", "router", "gate", "lm_head", "embed_out"} & set(part) for part in parts)


@pytest.mark.parametrize("family", MIXTURES)
def test_routed_experts_have_them_only_where_they_are_named(family: str) -> None:
    default = adapted(mixture_config(family))
    assert places(default) and not any(".experts" in place for place in places(default))
    assert "(--lora-targets all-linear adapts routed experts, too)" in default.where
    experts = adapted(mixture_config(family), "gate_up_proj", "down_proj")
    assert any(".experts" in place for place in places(experts))
    assert "adapts routed experts" not in experts.where


@pytest.mark.parametrize("family", MIXTURES)
def test_peft_reads_the_saved_configuration_as_the_same_layers(family: str, tmp_path: Path) -> None:
    default = adapted(mixture_config(family))
    default.config.save_pretrained(str(tmp_path))
    config = LoraConfig.from_pretrained(tmp_path)
    config.inference_mode = False
    real = get_peft_model(AutoModelForCausalLM.from_config(mixture_config(family)), config)
    trained = {name for name, value in real.get_base_model().named_parameters() if value.requires_grad}
    assert trained == set(default.names)


class Experts(nn.Module):
    """Experts that are modules, next to a dense layer of the same names."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.ModuleDict({"up_proj": nn.Linear(16, 16)}) for _ in range(2))
        self.shared = nn.ModuleDict({"up_proj": nn.Linear(16, 16)})
        self.gate = nn.Linear(16, 2)


def test_names_that_experts_share_with_dense_layers_leave_the_experts_out() -> None:
    model = build_meta_model(family_config("gpt2"))
    with torch.device("meta"):
        for block in model.transformer.h:
            block.mixture = Experts()
    adapters = Adapters(model, AdapterOptions(4).peft_config(), 0)
    mixture = {place.partition(".mixture.")[2] for place in places(adapters) if ".mixture." in place}
    assert mixture == {"shared.up_proj"}


def test_a_classifiers_head_has_them() -> None:
    """It is new, and nothing else would train it."""
    config = family_config("llama")
    model = AutoModelForSequenceClassification.from_config(config)
    adapters = Adapters(model, AdapterOptions(4).peft_config(), 0)
    assert "score" in places(adapters)


@pytest.mark.parametrize("targets", [(), ("all-linear",)])
def test_layers_that_peft_refuses_are_left_out(targets: tuple[str, ...]) -> None:
    have = places(adapted(small_config("falcon_mamba"), *targets))
    assert have and not any(path.endswith(("out_proj", "conv1d")) for path in have)


def test_layers_in_a_sequence_are_not_called_by_their_number_alone() -> None:
    have = places(adapted(small_config("ctrl")))
    assert {
        "transformer.h.0.ffn.0",
        "transformer.h.0.ffn.2",
        "transformer.h.0.multi_head_attention.Wq",
    } <= have


def test_grouped_layers_are_left_out_and_refused_by_name() -> None:
    config = miniature(CONFIG_MAPPING["deepseek_v4"]())
    for targets in ((), ("all-linear",)):
        assert not any("o_a_proj" in place for place in places(adapted(config, *targets)))
    with pytest.raises(UserError, match=r"o_a_proj multiplies each group .* leave it out of the targets"):
        adapted(config, "q_a_proj", "o_a_proj")


def test_exclusions_add_up() -> None:
    config = LoraConfig(target_modules=["up"], exclude_modules=["a"])
    exclude_modules(config, ["layers.3.b"])
    exclude_modules(config, ["c"])
    reached = [name for name in ("a.up", "x.a", "layers.1.b.up", "layers.up", "c.up", "d.up")
               if check_target_module_exists(config, name) and name.endswith("up")]  # fmt: skip
    assert reached == ["layers.up", "d.up"]
