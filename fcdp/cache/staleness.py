"""Telling when cached parameters are no longer the parameters: marks, and a net for what no mark has seen.

A stale cache ruins training in silence. PyTorch's version counters do not see fused and foreach optimizer steps, and a
checkpoint loaded in place fires no hook. So each group carries a mark that is set

* by every optimizer step that may have changed one of its parameters,
* by ``load_state_dict`` of the model or of a part of it,
* by :meth:`Sharding.invalidate`, for everything else.

Hit or miss must be the same decision on every rank, or ranks wait in different collectives for ever. All three happen
on every rank alike, and nothing else decides. What slipped through is found by comparing this rank's part of the cache
with its current parameters at each hit: the rank cannot go and gather alone, so it is an error.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from common.errors import FinetuneError
from fcdp.grouping import ParameterGroup


class StaleCacheError(FinetuneError):
    """Parameters were changed behind the cache's back."""

    def __init__(self, where: str):
        super().__init__(
            f"The parameters of {where} have changed since they were cached, but neither an optimizer step nor "
            "load_state_dict has changed them. After loading a checkpoint in place, or changing parameters by hand, "
            "call fcdp.sharding(model).invalidate() on every rank."
        )


class OptimizerHooks:
    """Sets the groups' marks on optimizer steps and loads, from now until :meth:`close`.

    Args:
        groups: those to mark.
        before_step, after_step: called before and after an optimizer step that concerns any of them.
    """

    def __init__(self, groups: list[ParameterGroup], before_step: weakref.WeakMethod, after_step: weakref.WeakMethod):
        self._groups = groups
        self._before_step = before_step
        self._after_step = after_step
        #: By place, and whether it was sharded. Not weak: PyTorch refuses to swap tensors that have weak references.
        self._shown: dict[tuple[int, str, bool], tuple[nn.Parameter, ParameterGroup]] = {}
        self._learn()
        # Hooks for all optimizers are kept by PyTorch for ever: they must not keep the model alive.
        this = weakref.ref(self)

        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if (watch := this()) is not None:
                watch._before(optimizer)

        def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if (watch := this()) is not None:
                watch._after(optimizer)

        self._handles: list[RemovableHandle] = [
            register_optimizer_step_pre_hook(before),
            register_optimizer_step_post_hook(after),
        ]
        for group in groups:
            for owner in group.owners():
                self._handles.append(owner.register_load_state_dict_post_hook(_mark_hook(group)))

    def close(self) -> None:
        """OptimizerHooks no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _learn(self) -> None:
        """Whose parameters are which. Asked again at every step, because objects change: ``to_empty()`` and loading
        may put new ones in place. The newest of each kind are kept: a group that is unsharded now shows others than
        those that the optimizer has."""
        for group in self._groups:
            for owner, name in group.places:
                parameter = owner._parameters.get(name)
                if parameter is not None:
                    self._shown[id(owner), name, isinstance(parameter, DTensor)] = parameter, group

    def _touched(self, optimizer: Optimizer) -> list[ParameterGroup]:
        """Groups with a parameter that a step of ``optimizer`` may change. Too many does no harm, too few does."""
        self._learn()
        known = {id(parameter): group for parameter, group in self._shown.values()}
        touched = {}
        for options in optimizer.param_groups:
            for parameter in options["params"]:
                owner = known.get(id(parameter))
                if owner is not None and (parameter.requires_grad or parameter.grad is not None):
                    touched[id(owner)] = owner
        return list(touched.values())

    def _before(self, optimizer: Optimizer) -> None:
        if self._touched(optimizer) and (call := self._before_step()) is not None:
            call()

    def _after(self, optimizer: Optimizer) -> None:
        touched = self._touched(optimizer)
        for group in touched:
            group.dirty = True
        if touched and (call := self._after_step()) is not None:
            call()


def _mark_hook(group: ParameterGroup) -> Any:
    def mark(module: nn.Module, incompatible_keys: Any) -> None:
        group.dirty = True

    return mark


class StalenessCheck:
    """The check at a hit. On the CPU exact and at once. On CUDA a sum of the words' bits, compared on the device and
    read once per step: no host waits inside the step, and what is found stops the step before it is applied."""

    def __init__(self, device: torch.device):
        self._found = torch.zeros((), dtype=torch.bool, device=device) if device.type == "cuda" else None

    def filled(self, group: ParameterGroup, current: torch.Tensor) -> None:
        """The cache of ``group`` has just been filled; this rank's part of it was ``current``."""
        if self._found is not None:
            group.fingerprint = _fingerprint(current)

    def check(self, group: ParameterGroup, current: torch.Tensor, cached: torch.Tensor | None) -> None:
        """Compare this rank's ``current`` parameters with what was cached.

        Args:
            group: whose parameters they are.
            current: this rank's part of them, flat, as it is now.
            cached: this rank's part of the cache; on CUDA not needed.

        Raises:
            StaleCacheError: they differ (CPU).
        """
        if self._found is not None:
            if group.fingerprint is not None:
                self._found |= _fingerprint(current) != group.fingerprint
        elif cached is not None and not torch.equal(_words(cached), _words(current)):
            raise StaleCacheError(f"'{group.name}'")

    def raise_if_found(self) -> None:
        """Read what checks on CUDA have found since the last call. Waits for the device.

        Raises:
            StaleCacheError: some group's parameters differed.
        """
        if self._found is not None and bool(self._found):
            self._found.zero_()
            raise StaleCacheError("at least one group")


def _words(data: torch.Tensor) -> torch.Tensor:
    """The bits as integers: NaN equals itself, and 0.0 is not -0.0."""
    return data.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[data.element_size()])


def _fingerprint(data: torch.Tensor) -> torch.Tensor:
    return _words(data).sum(dtype=torch.int64)


def mark_all(groups: Iterable[ParameterGroup]) -> None:
    """Every group is gathered across nodes at its next use."""
    for group in groups:
        group.dirty = True
