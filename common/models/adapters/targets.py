"""Names of adapted modules, checked against the model: ``peft`` leaves out what it does not find, and says nothing."""

from collections.abc import Collection, Sequence

from peft import LoraConfig, PeftConfig
from torch import nn
from transformers.pytorch_utils import Conv1D

from common.errors import UserError, did_you_mean


def named_targets(config: PeftConfig) -> set[str]:
    """Return the names that a configuration targets; none if it has a pattern or ``all-linear`` instead."""
    targets = getattr(config, "target_modules", None)
    return set() if targets is None or isinstance(targets, str) else set(targets)


def target_fused_experts(model: nn.Module, config: PeftConfig) -> None:
    """Let names in ``target_modules`` stand for parameters of experts, where no module has such a name.

    Experts that are fused into one parameter ``[experts, rows, columns]`` are no linear layers, so ``peft`` wants them
    among its ``target_parameters``. (Names that these experts had as layers, ``peft`` translates itself, in families
    that it knows.) The configuration is changed in place.
    """
    if not isinstance(config, LoraConfig):
        return
    modules = {name for name, _ in model.named_modules()}
    fused = {name for name, parameter in model.named_parameters() if parameter.ndim == 3}
    meant = {name for name in named_targets(config) if not _ends(modules, name) and _ends(fused, name)}
    if meant:
        config.target_modules = sorted(named_targets(config) - meant)
        config.target_parameters = sorted({*(config.target_parameters or ()), *meant})


def possible_targets(model: nn.Module) -> list[str]:
    """Return the names that linear layers and fused experts have in their modules, sorted."""
    linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D))
    fused = (name for name, parameter in model.named_parameters() if parameter.ndim == 3 and "conv" not in name)
    return sorted({name.rpartition(".")[2] for name in (*linear, *fused)})


def refuse_unknown_targets(modules: Collection[str], possible: Sequence[str], config: PeftConfig) -> None:
    """Refuse a configuration with names that no module has.

    Args:
        modules: names of the model's modules before adapters were injected.
        possible: from :func:`possible_targets`, also.
        config: after ``peft`` has injected it: what it has translated is no longer among ``target_modules``.

    Raises:
        UserError: there is such a name.
    """
    unknown = sorted(name for name in named_targets(config) if not _ends(modules, name))
    if unknown:
        raise UserError(
            f"No module of the model is called {', '.join(unknown)}, so adapters there would be left out. "
            f"{near_targets(unknown[0], possible)}"
        )


def near_targets(name: str, possible: Sequence[str]) -> str:
    """Return a hint for a name that no module has."""
    hint = did_you_mean(name, possible).strip()
    return f"{hint} Its linear layers are called {', '.join(possible)}: name them with --lora-targets.".strip()


def _ends(names: Collection[str], wanted: str) -> bool:
    return any(name == wanted or name.endswith(f".{wanted}") for name in names)
