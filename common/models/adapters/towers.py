"""What adapters train of a vision-language model's towers."""

from collections.abc import Iterable
from itertools import accumulate
from typing import Any

from peft import LoraConfig, PeftConfig
from peft.tuners.tuners_utils import check_target_module_exists
from torch import nn
from transformers import PreTrainedModel

from common.models.adapters.default_targets import exclude_modules, settle_targets
from common.models.vision import TowerFreezing, projector_parameters


def adapt_towers(model: PreTrainedModel, config: PeftConfig, freezing: TowerFreezing) -> None:
    """Let adapters of ``config`` train the parts of towers that ``freezing`` does not freeze, and only these.

    What is frozen is excluded, unless ``config`` itself excludes modules. A module of the projector that gets no
    adapter (that of Gemma 3 has no linear layer) is trained itself, as one of ``modules_to_save``.
    """
    frozen = freezing.frozen(model)
    names = [name for name, _ in model.named_parameters()]
    settings: Any = config
    excludes = bool(getattr(config, "exclude_modules", None))
    settle_targets(model, config)
    if frozen and isinstance(config, LoraConfig) and not excludes:
        exclude_modules(config, _whole_modules(frozen, names))
    if freezing.freeze_multi_modal_projector:
        return
    saved = [
        path
        for path in _whole_modules(projector_parameters(model), names)
        for path in _called_modules(model, path)
        if not _is_adapted(settings, model, path)
    ]
    settings.modules_to_save = [*(settings.modules_to_save or ()), *saved] or None


def _called_modules(model: PreTrainedModel, path: str) -> list[str]:
    """Return ``path``, or in its place what is in a list of modules; nothing if it is a parameter."""
    modules = dict(model.named_modules())
    if isinstance(modules.get(path), nn.ModuleList):
        return [f"{path}.{name}" for name, _ in modules[path].named_children()]
    return [path] if path in modules else []


def _is_adapted(config: Any, model: PreTrainedModel, path: str) -> bool:
    """Return whether a layer of the module at ``path`` gets an adapter."""
    layers = [
        f"{path}.{name}".rstrip(".")
        for name, part in model.get_submodule(path).named_modules()
        if isinstance(part, nn.Linear)
    ]
    if config.target_modules == "all-linear":
        return bool(layers)
    return any(check_target_module_exists(config, layer) for layer in layers)


def _whole_modules(chosen: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the outermost modules all of whose parameters (of ``names``) are ``chosen``, sorted."""
    chosen = set(chosen)
    mixed = {
        prefix
        for name in names
        if name not in chosen
        for prefix in accumulate(name.split("."), "{}.{}".format)
    }
    prefixes = (accumulate(name.split("."), "{}.{}".format) for name in chosen)
    return sorted({next(prefix for prefix in longer if prefix not in mixed) for longer in prefixes})
