"""The layers that have adapters where nobody names any: a decision of this program, the same for all families.

``dense-linear`` means the linear layers that every token passes: attention's, and those of dense feed-forward networks;
of a classifier its head, too, which is new. Routed experts are most of a mixture's weights: adapters there are many
times larger, are written to the drives in every step, and are seldom wanted. They, and routers, are adapted by
``all-linear`` or by name.
"""

import re
from collections.abc import Collection, Iterable, Iterator

from peft import LoraConfig, PeftConfig
from peft.tuners import tuners_utils
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from common.errors import UserError
from common.models.adapters.options import ALL_LINEAR, DENSE_LINEAR
from common.models.adapters.targets import possible_targets

_ROUTER = re.compile(r"gate(?!_proj)|router")


def settle_targets(model: PreTrainedModel, config: PeftConfig) -> None:
    """Replace ``dense-linear`` in a configuration by names, and leave grouped layers out of ``all-linear``.

    The configuration is changed in place: it then adapts the same layers when ``peft`` reads it.

    Raises:
        UserError: the model has no layer that ``dense-linear`` stands for, or a grouped layer is named.
    """
    if not isinstance(config, LoraConfig):
        return
    targets = config.target_modules
    grouped = _grouped_layers(model)
    if targets == DENSE_LINEAR:
        names, left_out = _dense_names(model)
        config.target_modules = names
        exclude_modules(config, left_out)
    elif targets == ALL_LINEAR:
        exclude_modules(
            config, [*grouped, *(path for path, _ in model.named_modules() if _is_refused(path, model))]
        )
    elif isinstance(targets, list | set) and (
        named := [path for path in grouped if _ends_with_any(path, targets)]
    ):
        raise UserError(
            f"{named[0]} multiplies each group of its inputs by weights that are the group's alone, which peft has no "
            "adapters for: leave it out of the targets."
        )


def exclude_modules(config: LoraConfig, paths: Iterable[str]) -> None:
    """Exclude modules, with all that is in them, in addition to those that the configuration excludes."""
    patterns = sorted({re.sub(r"\d+", r"\\d+", re.escape(path)) for path in paths})
    before = config.exclude_modules
    if not patterns:
        return
    if before and not isinstance(before, str):
        patterns += [rf"(.*\.)?{re.escape(name)}" for name in sorted(before)]
        before = None
    pattern = f"({'|'.join(patterns)})(\\..*)?"
    config.exclude_modules = f"{before}|{pattern}" if before else pattern


def has_routed_experts(model: nn.Module) -> bool:
    return any(True for _ in _expert_holders(model))


def _dense_names(model: PreTrainedModel) -> tuple[list[str], list[str]]:
    """Return the last names of dense linear layers, and the paths of others that have the same ones."""
    grouped = set(_grouped_layers(model))
    holders = set(_expert_holders(model))
    # Not that of a classifier, which is new: nothing else would train it
    head = model.get_output_embeddings()
    dense: list[str] = []
    others: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.Linear | Conv1D):
            continue
        is_dense = path not in grouped and module is not head and not _is_routed(path, holders)
        is_dense = is_dense and not _is_refused(path, model)
        (dense if is_dense else others).append(path)
    names = {_end(path) for path in dense}
    names = {name for name in names if not _stands_for_experts(name, model)}
    if not names:
        raise UserError(
            f"This {type(model).__name__} has no dense linear layers that peft can adapt without its experts: name "
            f"layers with --lora-targets. They are called {', '.join(possible_targets(model))}."
        )
    return sorted(names), [path for path in others if _end(path) in names]


def _grouped_layers(model: nn.Module) -> list[str]:
    """Return the paths of linear layers that multiply each group of inputs by other weights."""
    linear = ((path, module) for path, module in model.named_modules() if isinstance(module, nn.Linear))
    return [path for path, module in linear if any("groups" in name for name in vars(module))]


def _expert_holders(model: nn.Module) -> Iterator[str]:
    """Yield the paths of the modules in which routed experts are, next to their routers.

    Experts are a list of modules called ``experts``, or parameters ``[experts, rows, columns]``.
    """
    for path, module in model.named_modules():
        parameters = module.named_parameters(recurse=False)
        is_fused = any(value.ndim == 3 and "conv" not in f"{path}.{name}" for name, value in parameters)
        if is_fused or _last(path) == "experts":
            yield path.rpartition(".")[0]


def _is_routed(path: str, holders: Collection[str]) -> bool:
    """Return whether a layer is a routed expert's or a router's."""
    parts = path.split(".")
    for depth, part in enumerate(parts):
        is_expert_or_router = part == "experts" or _ROUTER.search(part) is not None
        if is_expert_or_router and ".".join(parts[:depth]) in holders:
            return True
    return False


def _stands_for_experts(name: str, model: PreTrainedModel) -> bool:
    """Return whether ``peft`` takes a name for that of experts, as it does in families where these had the name."""
    config = LoraConfig(target_modules=[name])
    try:
        convert_peft_config_for_transformers(config, model, None)
    except ValueError:  # other names of the experts are missing
        return True
    return bool(config.target_parameters)


def _is_refused(path: str, model: PreTrainedModel) -> bool:
    """Return whether ``peft`` refuses to adapt a layer, as those that kernels of Mamba read past their modules."""
    check = getattr(tuners_utils, "_check_lora_target_modules_mamba", None)
    try:
        if check is not None:
            check(LoraConfig(), model, _last(path))
    except ValueError:
        return True
    return False


def _ends_with_any(path: str, names: Iterable[str]) -> bool:
    return any(path == name or path.endswith(f".{name}") for name in names)


def _end(path: str) -> str:
    """Return the last name of a path, with the one before it if that is a number, which blocks have, too (CTRL)."""
    before, _, last = path.rpartition(".")
    return f"{_last(before)}.{last}" if last.isdigit() and before else last


def _last(path: str) -> str:
    return path.rpartition(".")[2]
