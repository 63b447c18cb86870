"""Which adapters the command line asks for."""

from typing import TYPE_CHECKING

from cli.options.settings import Settings

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel

    from common.models.vision.towers import TowerFreezing

ADAPTER_CONFIG = "adapter_config.json"
"""As in ``common.models.adapters.adapters``, which takes long to import."""


def peft_config_of(settings: Settings) -> "PeftConfig | None":
    """The adapters' configuration for ``peft``; None where all weights are trained.

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
    """What of a vision-language model is frozen."""
    from common.models.vision.towers import TowerFreezing

    return TowerFreezing(settings.train_vision != "all", settings.train_vision is None)


def trainable_parameters(settings: Settings, model: "PreTrainedModel") -> int:
    """How many numbers are trained when ``model``, which is on the meta device and changed, is given its adapters.

    Raises:
        UserError: they do not fit the model.
    """
    from common.models.adapters.adapters import Adapters

    config = peft_config_of(settings)
    assert config is not None
    towers_of(settings).without_adapters(config, model)
    names = Adapters(model, config, settings.seed).trainable_names
    return sum(model.get_parameter(name).numel() for name in names)
