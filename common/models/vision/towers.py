"""Towers: the parts of a model that turn images (or sound) into input of its language model.

Behind a tower stands a projector, which maps its output to the language model's width. Both run before the blocks; they
are frozen unless asked for otherwise, as is usual for fine-tuning.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from common.models.structure import language_model

if TYPE_CHECKING:
    from peft import PeftConfig


@dataclass(frozen=True)
class TowerFreezing:
    """The parts of a vision-language model's towers that are not trained; the names are LLaMA-Factory's."""

    freeze_vision_tower: bool = True
    freeze_multi_modal_projector: bool = True

    def frozen(self, model: PreTrainedModel) -> list[str]:
        """Return the names of the parameters of ``model`` that this freezes."""
        projector = set(projector_parameters(model))
        return [
            name
            for name in tower_parameters(model)
            if (self.freeze_multi_modal_projector if name in projector else self.freeze_vision_tower)
        ]

    def without_adapters(self, config: "PeftConfig", model: PreTrainedModel) -> None:
        """Exclude what this freezes from adapters, unless ``config`` itself excludes modules."""
        frozen = self.frozen(model)
        if frozen and hasattr(config, "exclude_modules") and not config.exclude_modules:
            whole = _whole_modules(frozen, [name for name, _ in model.named_parameters()])
            config.exclude_modules = f"({'|'.join(map(re.escape, whole))})(\\..*)?"


def _whole_modules(chosen: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the outermost modules all of whose parameters (of ``names``) are ``chosen``, sorted."""
    chosen = set(chosen)
    mixed = {prefix for name in names if name not in chosen for prefix in accumulate(name.split("."), "{}.{}".format)}
    found = set()
    for name in chosen:
        prefixes = [prefix for prefix in accumulate(name.split("."), "{}.{}".format) if prefix not in mixed]
        found.add(prefixes[0])
    return sorted(found)


DEFAULT_FREEZING = TowerFreezing()


def tower_parameters(model: PreTrainedModel) -> list[str]:
    """Return the names of all parameters of towers and projectors: neither the language model's nor a head's."""
    _, language = language_model(model)
    if language is model:
        return []
    inside = {id(parameter) for parameter in language.parameters()}
    head = model.get_output_embeddings()
    inside |= {id(parameter) for parameter in head.parameters()} if head is not None else set()
    inputs = {id(parameter) for parameter in model.base_model.parameters()}  # beside it, there are heads
    return [name for name, value in model.named_parameters() if id(value) not in inside and id(value) in inputs]


def projector_parameters(model: PreTrainedModel) -> list[str]:
    """Return those of :func:`tower_parameters` that are in no tower, and what is called a merger in one (Qwen, GLM)."""
    language, _ = language_model(model)
    towers = tuple(
        f"{prefix}."
        for prefix, module in model.named_modules()
        if isinstance(module, PreTrainedModel) and not f"{language}.".startswith(f"{prefix}." if prefix else "")
    )
    return [name for name in tower_parameters(model) if "merger" in name or not name.startswith(towers)]
