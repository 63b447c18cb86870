"""Adapters and frozen towers, as the settings ask for them."""

from pathlib import Path
from typing import TYPE_CHECKING

from cli.options.settings import Settings

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel

    from common.models.adapters.options import SavedAdapter
    from common.models.vision import TowerFreezing

ADAPTER_CONFIG = "adapter_config.json"
"""Name of the adapters' file: ``common.models.adapters.adapters`` has it, too, and takes long to import."""


def peft_config_of(settings: Settings) -> "PeftConfig | None":
    """Return the adapters' configuration for ``peft``; None where all weights are trained.

    Raises:
        UserError: what was typed, the file of ``--peft-config`` or the directory of ``--adapter`` cannot be used.
        FinetuneError: the weights of ``--adapter`` are damaged.
    """
    if not settings.trains_adapters:
        return None
    if (saved := saved_adapter_of(settings)) is not None:
        return saved.config()
    from common.models.adapters.options import ALL_LINEAR, AdapterOptions, load_peft_config

    if settings.peft_config is not None:
        return load_peft_config(settings.peft_config)
    assert settings.lora_rank is not None
    targets = settings.lora_targets or (ALL_LINEAR,)
    return AdapterOptions(settings.lora_rank, settings.lora_alpha, settings.lora_dropout, targets).peft_config()


def saved_adapter_of(settings: Settings) -> "SavedAdapter | None":
    """Return the adapters to begin with; None: they are new, or there are none.

    Raises:
        UserError, FinetuneError: see :func:`peft_config_of`.
    """
    if settings.adapter is None:
        return None
    from common.models.adapters.options import SavedAdapter

    return SavedAdapter(settings.adapter)


def adapter_digest(settings: Settings) -> str | None:
    """Return a hash of the adapters to begin with, wherever they lie; None: see :func:`saved_adapter_of`."""
    saved = saved_adapter_of(settings)
    return None if saved is None else saved.digest


def adapters_of(settings: Settings) -> "PeftConfig | Path | None":
    """Return the adapters as the engine and the trainer take them.

    Raises:
        UserError, FinetuneError: see :func:`peft_config_of`.
    """
    return peft_config_of(settings) if settings.adapter is None else settings.adapter.expanduser()


def towers_of(settings: Settings) -> "TowerFreezing":
    """Return which towers of a vision-language model are frozen."""
    from common.models.vision import TowerFreezing

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
    names = Adapters(model, config, settings.seed, draw=False, saved=saved_adapter_of(settings)).trainable_names
    return sum(model.get_parameter(name).numel() for name in names)
