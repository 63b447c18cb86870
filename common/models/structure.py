"""The structure of a model: its list of blocks, and what stands outside of it."""

import re
from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from common.errors import UserError


def layer_configs(config: PreTrainedConfig) -> Sequence[PreTrainedConfig]:
    """Return the configuration of each layer, in order: in some families layers differ (Gemma 4: heads' widths)."""
    return getattr(config, "per_layer_config", None) or [config] * (
        getattr(config, "num_hidden_layers", None) or 1
    )


def first_number(config: PreTrainedConfig, *names: str) -> int | None:
    """Return the first of the attributes called ``names`` that is an integer."""
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)


def find_blocks(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Return the dotted name of the model's list of blocks, and the list: the ``ModuleList`` with most parameters, in a
    vision-language model that of its language model.

    The model is refused if the list holds less than half of what is neither embedding nor head, or if a parameter of
    one block is also used elsewhere, so that blocks cannot be updated one by one.
    """
    prefix, language = language_model(model)
    lists = [
        (name, module)
        for name, module in language.named_modules(prefix=prefix)
        if isinstance(module, nn.ModuleList)
    ]
    # max keeps the first of equals, and named_modules goes from the outside in: experts never win over their block.
    name, blocks = max(lists, key=lambda item: _count(item[1]), default=("", nn.ModuleList()))
    outside = {id(parameter) for module in _embeddings(model) for parameter in module.parameters()}
    rest = sum(parameter.numel() for parameter in language.parameters() if id(parameter) not in outside)
    if _count(blocks) * 2 < rest or not len(blocks):
        share = f"its largest, {name!r}, holds {_count(blocks):,}" if lists else "it has none at all"
        raise UserError(
            f"{type(model).__name__} has no list of blocks (nn.ModuleList) with most of its {rest:,} parameters "
            f"outside embeddings and head: {share}. Only models that are a stack of blocks can be streamed."
        )
    _refuse_sharing(model, name, blocks)
    _refuse_layer_drop(language)
    return name, blocks


def language_model(model: PreTrainedModel) -> tuple[str, PreTrainedModel]:
    """Return the dotted name and the module of the part that reads text: the whole model, as a rule, and of a model
    that takes images or sound as well the outermost part that is made from the configuration's text part."""
    text = type(model.config.get_text_config())
    if text is not type(model.config):
        for name, module in model.named_modules():
            if isinstance(module, PreTrainedModel) and module is not model and type(module.config) is text:
                return name, module
    return "", model


def parameter_names(model: nn.Module) -> list[tuple[str, ...]]:
    """Return the names of every parameter, in ``named_parameters()`` order: one, or several if it is tied."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tuple(aliases) for aliases in names.values()]


def stored_names(model: PreTrainedModel) -> dict[str, str]:
    """Return the name under which transformers initialises and stores a parameter, by each of its names.

    For a tied parameter it is the name that the others are tied to: mostly the input embedding's.
    """
    tied_to = model.all_tied_weights_keys
    groups = parameter_names(model)
    stored = [next((tied_to[name] for name in names if name in tied_to), names[0]) for names in groups]
    return {alias: name for name, names in zip(stored, groups, strict=True) for alias in names}


# Of the names of parameters that do not decay, as transformers' Trainer has them.
_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def decayed_parameters(model: nn.Module) -> set[str]:
    """Return all names of the parameters that transformers' Trainer decays: no LayerNorm's, no norms, no biases."""
    norms = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.LayerNorm))
    names = (name for name, _ in model.named_parameters(remove_duplicate=False))
    return {name for name in names if not name.startswith(norms) and not _UNDECAYED.search(name.lower())}


def fp32_parameters(model: PreTrainedModel) -> list[str]:
    """Return the names of parameters that their family keeps in fp32 in any model: mostly router weights and biases.

    A family names them in ``_keep_in_fp32_modules_strict``, or builds them in fp32 in a model of another dtype.
    """
    built_fp32 = torch.float32 if model.dtype != torch.float32 else None
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.dtype == built_fp32 or keeps_fp32(model, name)
    ]


def keeps_fp32(model: PreTrainedModel, name: str) -> bool:
    """Return whether the family keeps this parameter or persistent buffer in fp32 for any dtype of the rest."""
    patterns = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return any(re.search(pattern.replace("*", ".*"), name) for pattern in patterns)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _embeddings(model: PreTrainedModel) -> list[nn.Module]:
    modules = [
        module
        for module in (model.get_input_embeddings(), model.get_output_embeddings())
        if module is not None
    ]
    tied = len(modules) == 2 and modules[0].weight is modules[1].weight
    return modules[:1] if tied else modules


def _refuse_layer_drop(model: PreTrainedModel) -> None:
    for name in ("layerdrop", "decoder_layerdrop"):
        if rate := getattr(model.config, name, 0):
            raise UserError(
                f"{type(model).__name__} has {name} = {rate} in its config.json: blocks would be left out at random, "
                "and they are streamed in order. Set it to 0."
            )


def _refuse_sharing(model: PreTrainedModel, prefix: str, blocks: nn.ModuleList) -> None:
    owners: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        inside = name.startswith(f"{prefix}.")
        owner = name.removeprefix(f"{prefix}.").partition(".")[0] if inside else "outside"
        if owners.setdefault(id(parameter), owner) != owner:
            others = next(names for names in parameter_names(model) if name in names)
            raise UserError(
                f"{type(model).__name__} uses one parameter in several blocks ({' = '.join(others[:3])}). "
                "Blocks that share parameters cannot be streamed and updated one by one."
            )
