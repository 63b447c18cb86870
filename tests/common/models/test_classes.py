"""Which class a configuration is built as: what it names, whole, and never one that drops a head."""

import pytest
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config, T5Config

from common.errors import UserError
from common.models.meta_model import build_meta_model
from common.models.presets import load_config
from common.models.structure import find_blocks
from common.models.task_type import TaskType, model_class, task_type_of
from common.models.vision import TowerFreezing, projector_parameters, tower_parameters
from tests.helpers.models.vision_families import FAMILIES
from tests.helpers.models.vision_families import family_config as vision_config


def named(config: PreTrainedConfig, *architectures: str) -> PreTrainedConfig:
    config.architectures = list(architectures)
    return config


@pytest.mark.parametrize(("config", "name", "task"), [
    (LlamaConfig(), "LlamaForCausalLM", TaskType.CAUSAL_LM),
    # As early checkpoints say
    (named(LlamaConfig(), "LLaMAForCausalLM"), "LlamaForCausalLM", TaskType.CAUSAL_LM),
    (named(LlamaConfig(), "LlamaModel"), "LlamaForCausalLM", TaskType.CAUSAL_LM),
    (named(LlamaConfig(), "LlamaForSequenceClassification"), "LlamaForSequenceClassification",
     TaskType.SEQUENCE_CLASSIFICATION),
    (named(Qwen3Config(), "Qwen3ForTokenClassification"), "Qwen3ForTokenClassification", TaskType.TOKEN_CLASSIFICATION),
    (vision_config("qwen3_5"), "Qwen3_5ForConditionalGeneration", TaskType.IMAGE_TEXT_TO_TEXT),
    (named(vision_config("qwen3_5"), "Qwen3_5ForCausalLM"), "Qwen3_5ForCausalLM", TaskType.CAUSAL_LM),
    (vision_config("qwen3_5").text_config, "Qwen3_5ForCausalLM", TaskType.CAUSAL_LM),
    (vision_config("gemma3"), "Gemma3ForConditionalGeneration", TaskType.IMAGE_TEXT_TO_TEXT),
    (vision_config("internvl"), "InternVLForConditionalGeneration", TaskType.IMAGE_TEXT_TO_TEXT),
])  # fmt: skip
def test_class_and_task(config: PreTrainedConfig, name: str, task: TaskType) -> None:
    chosen = model_class(config)
    assert chosen is not None and chosen.__name__ == name
    assert task_type_of(config) is task


def test_a_head_that_would_be_lost_is_rejected() -> None:
    with pytest.raises(
        UserError, match="LlamaForQuestionAnswering, whose head is none of those that can be trained"
    ):
        load_config(named(LlamaConfig(), "LlamaForQuestionAnswering"))
    with pytest.raises(UserError, match="cannot build as a causal language model"):
        load_config(T5Config())


@pytest.mark.parametrize("family", FAMILIES)
def test_towers_are_apart_from_the_language_model(family: str) -> None:
    model = build_meta_model(vision_config(family))
    prefix, blocks = find_blocks(model)
    text = model.config.get_text_config()
    assert len(blocks) == text.num_hidden_layers
    towers, projectors = set(tower_parameters(model)), set(projector_parameters(model))
    assert projectors and projectors < towers
    names = {name for name, _ in model.named_parameters()}
    rest = names - towers
    outside = {name for name in rest if not name.startswith(f"{prefix}.")}
    assert all("embed" in name or "norm" in name or "head" in name or "per_layer" in name for name in outside)
    assert not any(
        part in name for name in rest for part in ("vision", "visual", "projector", "connector", "newline")
    )
    assert set(TowerFreezing().frozen(model)) == towers
    assert set(TowerFreezing(freeze_multi_modal_projector=False).frozen(model)) == towers - projectors
    assert TowerFreezing(False, False).frozen(model) == []
