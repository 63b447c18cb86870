"""Training some experts of a mixture, whose parameters hold all experts along their first dimension.

Such a parameter ``[E, ...]`` stays whole and frozen. Beside it, its module has a trained parameter ``[K, ...]`` with
the rows of the K chosen experts, and computes with the frozen parameter after these rows have taken their places. So
gradients, moments and updates exist for these rows alone (ESFT, Wang et al. 2024, arXiv:2407.01906).
"""

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn

from common.errors import UserError
from common.models.checkpoint.sources import WeightSource
from common.models.experts import expert_modules

PREFIX = "chosen_"
"""Beginning of the names that rows of chosen experts have in their module, before the name of the whole parameter."""
INDEX = "chosen_experts"
"""Buffer of the module that holds the numbers of the chosen experts, int64 ``[K]``, ascending."""


def row_names(module: nn.Module) -> dict[str, str]:
    """Return the names of a module's parameters of chosen experts, by the names of the whole parameters."""
    if not has_chosen_experts(module):
        return {}
    return {name.removeprefix(PREFIX): name for name in module._parameters if name.startswith(PREFIX)}


def has_chosen_experts(module: nn.Module) -> bool:
    """Return whether a module of experts has parameters of chosen ones. Where its attribute ``_disable_adapters`` is
    True, as in modules of peft, it computes without them."""
    return INDEX in module._buffers


def chosen_numbers(module: nn.Module) -> tuple[int, ...]:
    """Return the numbers of a module's chosen experts, ascending, without looking at the device."""
    numbers: tuple[int, ...] = module.__dict__["_chosen_numbers"]
    return numbers


def experts_per_chosen(model: nn.Module) -> dict[str, float]:
    """Return the number of all experts for each chosen one, by the names of the parameters of chosen experts."""
    return {
        f"{path}.{row}": module.get_parameter(whole).shape[0] / module.get_parameter(row).shape[0]
        for path, module in model.named_modules()
        for whole, row in row_names(module).items()
    }


def whole_name(rows: str) -> str:
    """Return the name of the whole parameter that belongs to one of chosen experts."""
    path, _, name = rows.rpartition(".")
    return f"{path}.{name.removeprefix(PREFIX)}"


def chosen_rows(model: nn.Module) -> list[nn.Parameter]:
    """Return all parameters of chosen experts in a model: each repeats rows of a frozen one."""
    return [module.get_parameter(name) for module in model.modules() for name in row_names(module).values()]


class ChosenExperts:
    """Parameters of chosen experts that have been added to a model; everything else in it is frozen.

    Args:
        model: changed in place, and used from then on.
        share: part of the experts of each layer to choose, more than 0 and at most 1. It is rounded down, and at least
            one: how many there are does not depend on which they are.

    Attributes:
        model: the model with the additional parameters, which are fp32 whatever the model computes in, as adapters are.
        share: as above.
        counts: number of chosen experts, and of all, by the name of each module of experts.

    Raises:
        UserError: the share is out of range, or the model has no experts that are fused into parameters.
    """

    def __init__(self, model: nn.Module, share: float) -> None:
        check_share(share)
        self.model, self.share = model, share
        modules = expert_modules(model)
        if not modules:
            raise UserError(
                f"Only some experts are to be trained, and {type(model).__name__} has none that are fused into "
                "parameters: leave --train-experts out, or take adapters (--lora-rank)."
            )
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        self.counts = {name: (chosen_count(count, share), count) for name, (_, count) in modules.items()}
        self._modules = {name: module for name, (module, _) in modules.items()}
        for name, module in self._modules.items():
            _add_rows(module, *self.counts[name])
        self.whole_names = {
            f"{path}.{row}": f"{path}.{whole}"
            for path, module in self._modules.items()
            for whole, row in row_names(module).items()
        }
        """Name of the frozen parameter that the rows of each trained one belong to, by the latter's name."""
        self.is_chosen = False
        """Whether experts have been chosen; until then, rows mean nothing, and nobody should compute with them."""

    @property
    def numbers(self) -> dict[str, tuple[int, ...]]:
        """Numbers of the chosen experts, ascending, by the name of their module."""
        return {name: chosen_numbers(module) for name, module in self._modules.items()}

    @property
    def parameters(self) -> int:
        """Number of parameters of all chosen experts."""
        return sum(self.model.get_parameter(name).numel() for name in self.whole_names)

    def choose(self, experts: Mapping[str, Sequence[int]]) -> None:
        """Choose experts, by the name of their module: as many as there are rows.

        Raises:
            UserError: these are others, or not so many.
        """
        for name, (count, of) in self.counts.items():
            numbers = sorted(set(experts.get(name, ())))
            if len(numbers) != count or not (numbers[0] >= 0 and numbers[-1] < of):
                raise UserError(
                    f"Of the {of} experts of {name}, {count} are trained, and these were chosen: {numbers}."
                )
        for name, module in self._modules.items():
            _note_numbers(module, sorted(experts[name]))
            _index(module).copy_(torch.tensor(chosen_numbers(module)))
        self.is_chosen = True

    def source(self, weights: WeightSource) -> "ChosenSource":
        """Return a source of ``weights`` and, by the names of the trained rows, of those of the chosen experts."""
        return ChosenSource(self, weights)

    def merged(
        self, values: Mapping[str, torch.Tensor], dtype: torch.dtype, source: WeightSource | None
    ) -> dict[str, torch.Tensor]:
        """Return whole parameters in ``dtype``, with the trained rows in their places; these have no entries any more.

        Args:
            values: trained rows and, without a source, all other parameters, by name.
            dtype: of the result.
            source: where frozen parameters are read from, of which only those with trained rows are returned.
        """
        trained = self.whole_names if self.is_chosen else {}
        rows = {trained[name]: value for name, value in values.items() if name in trained}
        whole: Iterable[tuple[str, torch.Tensor]] = (
            ((name, value) for name, value in values.items() if name not in self.whole_names)
            if source is None
            else source.read(list(rows))
        )
        result = {}
        for name, value in whole:
            result[name] = value.to(dtype)
            if name in rows:
                index = _index(self._modules[name.rpartition(".")[0]]).to("cpu")
                result[name] = result[name].index_copy(0, index, rows[name].to(dtype))
        return result


class ChosenSource:
    """A :class:`WeightSource` of a model with parameters of chosen experts."""

    def __init__(self, chosen: ChosenExperts, weights: WeightSource) -> None:
        self._chosen, self._weights = chosen, weights

    def check(self) -> None:
        """Check the weights; see :meth:`WeightSource.check`."""
        self._weights.check()

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Read parameters; see :meth:`WeightSource.read`. As long as no experts are chosen, rows are zero."""
        whole, chosen = self._chosen.whole_names, self._chosen
        reads = chosen.is_chosen
        values = self._weights.read([whole.get(name, name) for name in names if reads or name not in whole])
        for name in names:
            if name not in whole:
                yield name, next(values)[1]
            elif reads:
                index = chosen.model.get_buffer(f"{name.rpartition('.')[0]}.{INDEX}").to("cpu")
                yield name, next(values)[1].index_select(0, index)
            else:
                yield name, torch.zeros(()).expand(chosen.model.get_parameter(name).shape)

    def reads_rows(self, name: str) -> bool:
        """Return whether rows can be read alone; see :meth:`WeightSource.reads_rows`."""
        return self._weights.reads_rows(self._chosen.whole_names.get(name, name))

    def read_rows(self, name: str, first: int, stop: int) -> torch.Tensor:
        """Read rows; see :meth:`WeightSource.read_rows`. As long as no experts are chosen, theirs are zero."""
        whole = self._chosen.whole_names.get(name)
        if whole is None:
            return self._weights.read_rows(name, first, stop)
        if not self._chosen.is_chosen:
            return torch.zeros(()).expand(stop - first, *self._chosen.model.get_parameter(name).shape[1:])
        module = self._chosen.model.get_submodule(name.rpartition(".")[0])
        numbers = chosen_numbers(module)[first:stop]
        return torch.cat([self._weights.read_rows(whole, number, number + 1) for number in numbers])

    def read_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Read buffers; see :meth:`WeightSource.read_buffers`."""
        return self._weights.read_buffers()

    def read_compressed(self, name: str, parts: Sequence[int] | None = None) -> Iterator[Mapping[str, torch.Tensor]]:
        """Read components; see :meth:`WeightSource.read_compressed`."""
        return self._weights.read_compressed(name, parts)


def check_share(share: float) -> None:
    """Refuse a part of the experts that cannot be trained.

    Raises:
        UserError: it is not more than 0 and at most 1.
    """
    if not 0 < share <= 1:
        raise UserError(f"The part of the experts to train must be more than 0 and at most 1, not {share:g}.")


def chosen_count(experts: int, share: float) -> int:
    """Return how many of a layer's experts are trained: ``share`` of them rounded down, and at least one."""
    return max(1, math.floor(share * experts + 1e-6))


def _index(module: nn.Module) -> torch.Tensor:
    return module.get_buffer(INDEX)


def _note_numbers(module: nn.Module, numbers: Iterable[int]) -> None:
    module.__dict__["_chosen_numbers"] = tuple(numbers)


def _add_rows(module: nn.Module, count: int, experts: int) -> None:
    """Give a module of experts parameters for ``count`` of them, with the values of the first ones."""
    for name, whole in list(module._parameters.items()):
        if whole is not None and whole.shape[0] == experts:
            module.register_parameter(f"{PREFIX}{name}", nn.Parameter(whole.detach()[:count].float().clone()))
    module.register_buffer(INDEX, torch.arange(count), persistent=False)
    _note_numbers(module, range(count))
    module._disable_adapters = False  # type: ignore[assignment]
    module.forward = MethodType(_forward, module)  # type: ignore[method-assign]


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Compute with the rows of chosen experts in their places: a module's ``forward``."""
    if module._disable_adapters:
        return type(module).forward(module, *args, **kwargs)
    merged: Any = copy.copy(module)  # of its attributes, not of its memory
    merged.__dict__["_parameters"] = dict(module._parameters)
    index = _index(module)
    for name, row in row_names(module).items():
        whole, rows = module._parameters[name], module._parameters[row]
        assert whole is not None and rows is not None
        merged._parameters[name] = whole.index_copy(0, index, rows.to(whole.dtype))
    return type(module).forward(merged, *args, **kwargs)
