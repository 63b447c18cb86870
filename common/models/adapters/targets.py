"""Names of adapted modules, checked against the model (peft leaves out what it does not find, and says nothing), and
copies of weights that are trained next to adapters: ``modules_to_save``, and rows of ``trainable_token_indices``."""

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
from peft import LoraConfig, PeftConfig
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.utils.constants import SEQ_CLS_HEAD_NAMES
from peft.utils.other import ModulesToSaveWrapper, get_pattern_key
from torch import nn
from transformers.pytorch_utils import Conv1D

from common.errors import UserError, did_you_mean


def named_targets(config: PeftConfig) -> set[str]:
    """Return the names that a configuration targets; none if it has a pattern or ``all-linear`` instead."""
    targets = getattr(config, "target_modules", None)
    return set() if targets is None or isinstance(targets, str) else set(targets)


def target_fused_experts(model: nn.Module, config: LoraConfig) -> None:
    """Let names in ``target_modules`` stand for parameters of experts, where no module has such a name.

    Experts that are fused into one parameter ``[experts, rows, columns]`` are no linear layers, so ``peft`` wants them
    among its ``target_parameters``. (Names that these experts had as layers, ``peft`` translates itself, in families
    that it knows.) The configuration is changed in place.
    """
    modules = {name for name, _ in model.named_modules()}
    fused = {name for name, parameter in model.named_parameters() if parameter.ndim == 3}
    meant = {name for name in named_targets(config) if not _ends(modules, name) and _ends(fused, name)}
    if meant:
        config.target_modules = sorted(named_targets(config) - meant)
        config.target_parameters = sorted({*(config.target_parameters or ()), *meant})


def possible_targets(model: nn.Module) -> list[str]:
    """Return the names that linear layers and fused experts have in their modules, sorted."""
    linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D))
    fused = (
        name for name, parameter in model.named_parameters() if parameter.ndim == 3 and "conv" not in name
    )
    return sorted({name.rpartition(".")[2] for name in (*linear, *fused)})


def refuse_unknown_targets(modules: Collection[str], possible: Sequence[str], config: PeftConfig) -> None:
    """Refuse names that no module had before adapters were injected; what ``peft`` has translated is not among them."""
    unknown = sorted(name for name in named_targets(config) if not _ends(modules, name))
    if unknown:
        raise UserError(
            f"No module of the model is called {', '.join(unknown)}, so adapters there would be left out. "
            f"{near_targets(unknown[0], possible)}"
        )


def near_targets(name: str, possible: Sequence[str]) -> str:
    """Return a hint for a name that no module has."""
    hint = did_you_mean(name, possible).strip()
    return (
        f"{hint} Its linear layers are called {', '.join(possible)}: name them with --lora-targets.".strip()
    )


def _ends(names: Collection[str], wanted: str) -> bool:
    return any(name == wanted or name.endswith(f".{wanted}") for name in names)


def refuse_unmatched_parameters(requested: Collection[str], adapted: Collection[str]) -> None:
    """Refuse ``requested`` target parameters that are none of those ``adapted``. To these, ``peft`` adds its
    translations of layers' names, which need not match."""
    for entry in sorted(requested):
        if not _ends(adapted, entry):
            hint = did_you_mean(entry, {name.rpartition(".")[2] for name in adapted})
            raise UserError(
                f"target_parameters: {entry!r} matches no parameter that can have an adapter.{hint}"
            )


def refuse_unknown_copies(modules: Collection[str], config: PeftConfig) -> None:
    """Refuse ``modules_to_save`` that no module is called, which ``peft`` leaves out."""
    # Peft adds all of these
    names = set(getattr(config, "modules_to_save", None) or ()) - set(SEQ_CLS_HEAD_NAMES)
    for name in sorted(names):
        if not any(module.endswith(name) for module in modules):
            raise UserError(f"modules_to_save: no module is called {name!r}.{did_you_mean(name, modules)}")


def refuse_copies_by_the_way(modules: Collection[str], config: LoraConfig) -> None:
    """Refuse ``modules_to_save`` that are the end of another module's name: ``peft`` trains ``input_layernorm`` for
    ``norm``, too."""
    for name in sorted(set(config.modules_to_save or ()) - set(SEQ_CLS_HEAD_NAMES)):
        other = next((each for each in modules if each.endswith(name) and not _ends([each], name)), None)
        if other is not None:
            raise UserError(
                f"modules_to_save: peft would train {other} for {name!r}, too. Write whole names, with what comes "
                "before them where others end alike (model.norm)."
            )


def refuse_unmatched(names: Collection[str], adapted: Collection[str], config: LoraConfig) -> None:
    """Refuse entries of a configuration that match nothing, which ``peft`` ignores, and patterns whose order counts,
    which it does not keep.

    Args:
        names: those of the model's modules and parameters, before adapters were injected.
        adapted: those of the modules and parameters that have adapters.
    """
    for field, name in itertools.product(_PATTERNS, adapted):
        entries = getattr(config, field)
        first, saved_first = (get_pattern_key(order, name) for order in (entries, sorted(entries)))
        if first != saved_first:
            raise UserError(
                f"{field}: {first!r} and {saved_first!r} both match {name}. peft takes the first, but saves them in "
                "alphabetical order, so the saved adapter would take the other: let no two match one module."
            )
    for field, entry in unmatched_entries(names, adapted, config):
        if field == "layers_to_transform":
            raise UserError(f"{field}: the model has no layer {entry}.")
        known = adapted if field.endswith("_pattern") else names
        hint = did_you_mean(str(entry), {name.rpartition(".")[2] for name in known})
        what = "module with an adapter" if field in _PATTERNS else "module"
        if field in _PATTERNS and any(get_pattern_key([str(entry)], name) != name for name in adapted):
            what = f"{what} that no earlier entry matches"
            hint = ""
        raise UserError(f"{field}: {entry!r} matches no {what}.{hint}")


_PATTERNS = ("rank_pattern", "alpha_pattern")


def unmatched_entries(
    names: Collection[str], adapted: Collection[str], config: LoraConfig
) -> Iterator[tuple[str, str | int]]:
    """Yield the fields and entries that match nothing by the rules of ``peft``; see :func:`refuse_unmatched`."""
    for field in _PATTERNS:
        entries = getattr(config, field)
        taken = {get_pattern_key(entries, name) for name in adapted}
        yield from ((field, entry) for entry in entries if entry not in taken)
    excluded = config.exclude_modules
    if isinstance(excluded, str):
        if excluded and not any(re.fullmatch(excluded, name) for name in names):
            yield "exclude_modules", excluded
    else:
        yield from (("exclude_modules", entry) for entry in sorted(excluded or ()) if not _ends(names, entry))
    chosen = _chosen_layers(config)
    layers = _layers_of(names, config) if chosen else set()
    yield from (("layers_to_transform", layer) for layer in sorted(chosen - layers))


def refuse_overlooked(adapted: Collection[str], experts: Collection[str], config: LoraConfig) -> None:
    """Refuse exclusions and layers that ``peft`` overlooks, and says nothing.

    It compares an excluded name with a module's own, not with those of what the module is in, and lets neither decide
    about parameters; and in chosen layers it leaves out a target that is in none of them.

    Args:
        adapted: names of the modules and parameters that have adapters.
        experts: those of them that are parameters.
        config: of the adapters.
    """
    advice = "Name what to adapt in full instead, in target_modules or target_parameters, as {} is here."
    for name in adapted:
        parts = name.split(".")
        paths = (".".join(parts[: end + 1]) for end in range(len(parts)))
        if path := next((path for path in paths if _is_excluded(path, config)), None):
            raise UserError(
                f"exclude_modules: {path} is excluded, and peft would adapt {name} in it all the same. "
                f"{advice.format(name)}"
            )
    chosen = _chosen_layers(config)
    for name in experts if chosen else ():
        if not chosen & _layers_of([name], config) and name not in (config.target_parameters or ()):
            raise UserError(
                f"layers_to_transform: peft would adapt {name} all the same. {advice.format(name)}"
            )
    copied = set(config.modules_to_save or ())
    for target in sorted(named_targets(config) - copied) if chosen else ():
        if not _ends(adapted, target):
            raise UserError(
                f"layers_to_transform: no {target!r} is in these layers, so it would be left out. Name it in full "
                "(model.embed_tokens), or take it out of target_modules."
            )


def _is_excluded(path: str, config: LoraConfig) -> bool:
    """Return whether ``exclude_modules`` says that a module or a parameter has no adapter."""
    excluded = config.exclude_modules
    if isinstance(excluded, str):
        return bool(excluded and re.fullmatch(excluded, path))
    return any(_ends([path], entry) for entry in excluded or ())


def _chosen_layers(config: LoraConfig) -> set[int]:
    chosen = config.layers_to_transform
    return {chosen} if isinstance(chosen, int) else set(chosen or ())


def _layers_of(names: Iterable[str], config: LoraConfig) -> set[int]:
    """Return the numbers of the layers that modules and parameters are in."""
    given = config.layers_pattern or []
    # As in peft.tuners.tuners_utils.check_target_module_exists: the first number in a name is its layer's.
    patterns = [rf"(?:^|.*?\.){each}\.(\d+)\." for each in ([given] if isinstance(given, str) else given)]
    layers = set[int]()
    for name in names:
        matches = (re.match(pattern, name) for pattern in patterns or [r".*?\.[^.]*\.(\d+)\."])
        layers.update(int(match[1]) for match in matches if match)
    return layers


def trained_copies(model: nn.Module) -> dict[str, tuple[str, list[int] | None]]:
    """Return what trained parameters begin as copies of: a parameter's name, and its rows; None: all of them."""
    stored = model.state_dict().keys()
    copies: dict[str, tuple[str, list[int] | None]] = {}
    for path, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            if any(f"{path}.{name}" in stored for name, _ in module.named_buffers()):
                raise UserError(
                    f"modules_to_save: {path} has a buffer next to its weights, which is not trained: leave it out."
                )
            for adapter, copy in module.modules_to_save.items():
                for name, _ in copy.named_parameters():
                    copies[f"{path}.modules_to_save.{adapter}.{name}"] = (
                        f"{path}.original_module.{name}",
                        None,
                    )
        elif isinstance(module, TrainableTokensLayer):
            for adapter, rows in module.token_indices.items():
                layer = module.get_base_layer()
                head = path.removesuffix(".token_adapter")
                if isinstance(layer, ModulesToSaveWrapper):
                    raise UserError(
                        f"trainable_token_indices: modules_to_save trains all of {head}: leave one of both out."
                    )
                if getattr(layer, "bias", None) is not None:
                    raise UserError(
                        f"trainable_token_indices: {head} has a bias, which peft leaves out where it trains rows: name "
                        "modules in modules_to_save instead."
                    )
                words = layer.get_parameter("weight").shape[0]
                if beyond := [row for row in rows if not 0 <= row < words]:
                    raise UserError(f"trainable_token_indices: the model has no token {beyond[0]}.")
                # To restore the rows, which is not done here; a buffer has to have values.
                original = module.trainable_tokens_original
                original[adapter] = torch.full_like(original[adapter], torch.nan, device="cpu")
                copies[f"{path}.trainable_tokens_delta.{adapter}"] = f"{path}.base_layer.weight", rows
    return copies


def separate_tied_rows(model: nn.Module) -> set[str]:
    """Give tied modules whose rows are trained as one parameter a collection each, and return the modules' names."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, TrainableTokensLayer)}
    tied = {name: layer for name, layer in layers.items() if layer.tied_adapter is not None}
    for layer in tied.values():
        layer.trainable_tokens_delta = nn.ParameterDict(layer.trainable_tokens_delta)
    originals = {id(layer.tied_adapter) for layer in tied.values()}
    return {*tied, *(name for name, layer in layers.items() if id(layer) in originals)}
