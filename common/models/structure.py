"""What the engine has to know about a model: its list of blocks, and what stands outside of it."""

import re

from torch import nn
from transformers import PreTrainedModel

from common.errors import UserError


def find_blocks(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The dotted name of the model's list of blocks, and the list: of all ``ModuleList``s the one with most parameters.

    Raises:
        UserError: there is no such list; it holds less than half of what is neither embedding nor head; a parameter of
            one block is also used elsewhere, so that blocks cannot be updated one by one.
    """
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    # max keeps the first of equals, and named_modules goes from the outside in: experts never win over their block.
    name, blocks = max(lists, key=lambda item: _count(item[1]), default=("", nn.ModuleList()))
    rest = _count(model) - sum(_count(module) for module in _embeddings(model))
    if _count(blocks) * 2 < rest or not len(blocks):
        share = f"its largest, {name!r}, holds {_count(blocks):,}" if lists else "it has none at all"
        raise UserError(
            f"{type(model).__name__} has no list of blocks (nn.ModuleList) with most of its {rest:,} parameters "
            f"outside embeddings and head: {share}. Only models that are a stack of blocks can be streamed."
        )
    _refuse_sharing(model, name, blocks)
    return name, blocks


def parameter_names(model: nn.Module) -> list[tuple[str, ...]]:
    """The names of every parameter, in ``named_parameters()`` order: one, or several if it is tied."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tuple(aliases) for aliases in names.values()]


def stored_names(model: PreTrainedModel) -> dict[str, str]:
    """The name under which transformers initialises and stores a parameter, by each of its names.

    Of a tied parameter's names it is the one that the others are tied to: mostly the input embedding's.
    """
    tied_to = model.all_tied_weights_keys
    return {
        alias: next((tied_to[name] for name in names if name in tied_to), names[0])
        for names in parameter_names(model)
        for alias in names
    }


def fp32_parameters(model: PreTrainedModel) -> list[str]:
    """Names of parameters that their family keeps in fp32 even when the rest of the model is bf16.

    (transformers' ``_keep_in_fp32_modules_strict``: mostly router weights and biases.)
    """
    return [name for name, _ in model.named_parameters() if keeps_fp32(model, name)]


def keeps_fp32(model: PreTrainedModel, name: str) -> bool:
    """Whether the family keeps this parameter or persistent buffer in fp32 whatever dtype the rest has."""
    patterns = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return any(re.search(pattern.replace("*", ".*"), name) for pattern in patterns)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _embeddings(model: PreTrainedModel) -> list[nn.Module]:
    """Input and output embeddings, each parameter in one of them only."""
    modules = [module for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module is not None]
    tied = len(modules) == 2 and modules[0].weight is modules[1].weight
    return modules[:1] if tied else modules


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
