"""Convert names and layouts of tensors on disk to those in the model, and back.

Checkpoints on the hub and transformers' modules differ: prefixes come and go, old names live on, experts that are
stored one by one are fused in the model. transformers keeps the rules for this (``conversion_mapping``) and applies
them to a whole model at once; here they are applied to one parameter at a time.
"""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)


@dataclass
class Conversion:
    """Tensors on disk that together make one parameter, or (one fused on disk, several in the model) several."""

    target: str
    """Name of the parameter in the model; of several, the first."""

    rule: WeightConverter | None
    """Rule of transformers that makes the parameter; None if the tensor on disk is the parameter."""

    parts: list[tuple[str, str]] = field(default_factory=list)
    """Pairs (pattern of the rule, name on disk), in the order in which they are put together."""

    def convert(self, model: PreTrainedModel, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the parameters, by name in the model. Peak memory: the tensors read and about as much again."""
        if self.rule is None:
            return {self.target: read(self.parts[0][1])}
        rule = copy.deepcopy(self.rule)  # a rule collects the tensors that it is given
        for pattern, name in self.parts:
            rule.add_tensor(self.target, name, pattern, read(name))  # type: ignore[arg-type]  # or a Future
        converted = rule.convert(self.target, model=model, config=model.config)
        if isinstance(converted, tuple):  # transformers 5.0 returns its record of errors, too
            converted = converted[0]
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


def plan_conversions(model: PreTrainedModel, stored: Iterable[str]) -> tuple[list[Conversion], list[str]]:
    """Plan how the tensors on disk become the model's parameters and persistent buffers.

    Names are matched as in ``transformers.core_model_loading.convert_and_load_state_dict_in_model``.

    Returns:
        The conversions, and the names on disk that the model does not use.
    """
    wanted = model.state_dict()
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}

    conversions: dict[str, Conversion] = {}
    unused = []
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = rename_source_key(name, [], [], model.base_model_prefix, wanted)
        if target not in wanted:
            unused.append(name)
            continue
        rule = None if pattern is None else by_pattern[pattern]
        conversion = conversions.setdefault(target, Conversion(target, rule))
        conversion.parts.append((pattern or name, name))
    return list(conversions.values()), unused


def to_disk(model: PreTrainedModel, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return some of a model's parameters (for instance a block's) by the names and in the layouts of a checkpoint.

    Names and layouts are those that ``save_pretrained`` writes. Parameters that are fused on disk but not in the model
    have to come in one call. The results may be views of the arguments.
    """
    return revert_weight_conversion(model, dict(named))
