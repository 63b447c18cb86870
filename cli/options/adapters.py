"""Adapters and frozen towers, as the settings ask for them."""

from typing import TYPE_CHECKING

from cli.options.settings import Settings

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel

    from common.models.vision.towers import TowerFreezing

ADAPTER_CONFIG = "adapter_config.json"
"""Name of the adapters' file: ``common.models.adapters.adapters`` has it, too, and takes long to import."""


def peft_config_of(settings: Settings) -> "PeftConfig | None":
    """Return the adapters' configuration for ``peft``; None where all weights are trained.

    Raises:
        UserError: what was typed, or the file of ``--peft-config``, cannot be used.
    """
    if not settings.trains_adapters:
        return None
    from common.models.adapters.options import ALL_LINEAR, AdapterOptions, load_peft_config

    if settings.peft_config is not None:
        return load_peft_config(settings.peft_config)
    assert settings.lora_rank is not None
    targets = settings.lora_targets or (ALL_LINEAR,)
    return AdapterOptions(settings.lora_rank, settings.lora_alpha, settings.lora_dropout, targets).peft_config()


def towers_of(settings: Settings) -> "TowerFreezing":
    """Return which towers of a vision-language model are frozen."""
    from common.models.vision.towers import TowerFreezing

    return TowerFreezing(settings.train_vision != "all", settings.train_vision is None)


def trainable_parameters(settings: Settings, model: "PreTrainedModel") -> int:
    """Count the numbers that are trained once ``model`` has its adapters. It is on the meta device, and is changed.

    Raises:
        UserError: they do not fit the model.
    """
    from common.models.adapters.adapters import Adapters

    config = peft_config_of(settings)
    assert config is not None
    towers_of(settings).without_adapters(config, model)
    names = Adapters(model, config, settings.seed, draw=False).trainable_names
    return sum(model.get_parameter(name).numel() for name in names)
