"""Adapters next to towers: what is frozen gets none, and a projector that is not frozen is trained in some way."""

import pytest
from transformers import AutoConfig

from common.errors import UserError
from common.models.adapters.adapters import Adapters
from common.models.adapters.options import ALL_LINEAR, DENSE_LINEAR, AdapterOptions
from common.models.adapters.towers import adapt_towers
from common.models.meta_model import build_meta_model
from common.models.vision import TowerFreezing, projector_parameters
from tests.helpers.models.families import family_config
from tests.helpers.models.vision_families import FAMILIES


@pytest.mark.parametrize("targets", [DENSE_LINEAR, ALL_LINEAR, "q_proj"])
@pytest.mark.parametrize("family", ["gemma3", "llava", "qwen3_vl"])
def test_a_projector_that_is_not_frozen_is_trained(family: str, targets: str) -> None:
    """Gemma 3's has no linear layer, and q_proj is in none: peft then trains the whole module."""
    model = build_meta_model(AutoConfig.for_model(family, **FAMILIES[family]))
    modules = {name.rpartition(".")[0] for name in projector_parameters(model)}
    config = AdapterOptions(2, targets=(targets,)).peft_config()
    adapt_towers(model, config, TowerFreezing(freeze_multi_modal_projector=False))
    trained = Adapters(model, config, 0, draw=False).trainable_names
    names = [name.replace(".modules_to_save.default", "") for name in trained if "language_model" not in name]
    assert names and all(any(name.startswith(f"{module}.") for module in modules) for name in names)
    assert bool(config.modules_to_save) is not (targets != "q_proj" and family != "gemma3")


def test_text_has_no_projector() -> None:
    model = build_meta_model(family_config("llama"))
    with pytest.raises(UserError, match="LlamaForCausalLM has no such part"):
        TowerFreezing(freeze_multi_modal_projector=False).frozen(model)
