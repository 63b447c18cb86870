"""Copies of weights that are trained next to adapters: ``modules_to_save``, and rows of ``trainable_token_indices``."""

from collections.abc import Collection

from peft import PeftConfig
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.utils.constants import SEQ_CLS_HEAD_NAMES
from peft.utils.other import ModulesToSaveWrapper
from torch import nn

from common.errors import UserError, did_you_mean


def refuse_unknown_copies(modules: Collection[str], config: PeftConfig) -> None:
    """Refuse ``modules_to_save`` that no module is called, which ``peft`` leaves out.

    Raises:
        UserError: there is such a name.
    """
    names = set(getattr(config, "modules_to_save", None) or ()) - set(SEQ_CLS_HEAD_NAMES)  # peft adds all of these
    for name in sorted(names):
        if not any(module.endswith(name) for module in modules):
            raise UserError(f"modules_to_save: no module is called {name!r}.{did_you_mean(name, modules)}")


def trained_copies(model: nn.Module) -> dict[str, tuple[str, list[int] | None]]:
    """Return what trained parameters begin as copies of: a parameter's name, and its rows; None: all of them.

    Raises:
        UserError: a module with values that are read but not trained is copied.
    """
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
                    copies[f"{path}.modules_to_save.{adapter}.{name}"] = f"{path}.original_module.{name}", None
        elif isinstance(module, TrainableTokensLayer):
            for adapter, rows in module.token_indices.items():
                copies[f"{path}.trainable_tokens_delta.{adapter}"] = f"{path}.base_layer.weight", rows
    return copies


def separate_tied_rows(model: nn.Module) -> set[str]:
    """Return the names of modules with a tied weight of which the same rows are trained, as one parameter.

    Each gets its own collection, so that the parameter has a name in every module that uses it.
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, TrainableTokensLayer)}
    tied = {name: layer for name, layer in layers.items() if layer.tied_adapter is not None}
    for layer in tied.values():
        layer.trainable_tokens_delta = nn.ParameterDict(layer.trainable_tokens_delta)
    originals = {id(layer.tied_adapter) for layer in tied.values()}
    return {*tied, *(name for name, layer in layers.items() if id(layer) in originals)}
