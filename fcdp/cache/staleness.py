"""Detecting cached parameters that are out of date: marks set by hooks, and a check for what no hook sees.

PyTorch's version counters do not see fused and foreach optimizer steps, and a checkpoint loaded in place fires no hook.
So each group has a mark, set by every optimizer step that may have changed one of its parameters, by
``load_state_dict``, and by :meth:`Sharding.invalidate`. Hit or miss must be the same decision on every rank, or ranks
wait in different collectives forever; these three happen on every rank. Any other change is found by comparing this
rank's part of the cache with its current parameters at each hit. A rank cannot gather alone, so it is an error."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from common.errors import FinetuneError, UserError
from fcdp import fsdp2
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
    """Hooks that mark ``groups`` as dirty at optimizer steps and loads, from now until :meth:`close`.

    ``before_step`` and ``after_step`` are called around an optimizer step that may change any of them."""

    def __init__(
        self, groups: list[ParameterGroup], before_step: weakref.WeakMethod, after_step: weakref.WeakMethod
    ):
        self._groups = groups
        self._before_step = before_step
        self._after_step = after_step
        # By place, and by whether it is sharded. Not weak: PyTorch refuses to swap tensors with weak references.
        self._known: dict[tuple[int, str, bool], tuple[nn.Parameter, ParameterGroup]] = {}
        self._look_up_parameters()
        # Hooks for all optimizers are kept by PyTorch for ever: they must not keep the model alive.
        this = weakref.ref(self)

        def hook(is_after: bool) -> Callable[[Optimizer, Any, Any], None]:
            def run(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
                if (hooks := this()) is not None:
                    hooks._around_step(optimizer, is_after)

            return run

        def mark(group: ParameterGroup, module: nn.Module, incompatible_keys: Any) -> None:
            group.dirty = True

        self._handles: list[RemovableHandle] = [
            register_optimizer_step_pre_hook(hook(False)),
            register_optimizer_step_post_hook(hook(True)),
        ]
        for group in groups:
            for owner in group.owners():
                self._handles.append(owner.register_load_state_dict_post_hook(functools.partial(mark, group)))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _look_up_parameters(self) -> None:
        # At every step: ``to_empty()`` and loading may replace parameters. A group that is unsharded now shows other
        # objects than the optimizer has, so the newest of both kinds are kept.
        for group in self._groups:
            for owner, name in group.places:
                parameter = owner._parameters.get(name)
                if parameter is not None:
                    self._known[id(owner), name, isinstance(parameter, DTensor)] = parameter, group

    def _around_step(self, optimizer: Optimizer, is_after: bool) -> None:
        """Mark the groups with a parameter that a step of ``optimizer`` may have changed. Too many do no harm."""
        self._look_up_parameters()
        known = {id(parameter): group for parameter, group in self._known.values()}
        if not is_after:
            self._refuse_gathered(optimizer)
        is_touched = False
        for options in optimizer.param_groups:
            for parameter in options["params"]:
                group = known.get(id(parameter))
                if group is not None and (parameter.requires_grad or parameter.grad is not None):
                    is_touched = True
                    group.dirty = group.dirty or is_after
        if is_touched and (call := (self._after_step if is_after else self._before_step)()) is not None:
            call()

    def _refuse_gathered(self, optimizer: Optimizer) -> None:
        """Refuse parameters in the form that they have between gather and release: no gradient ever comes to them."""
        gathered = {id(parameter) for group in self._groups for parameter in fsdp2.gathered_parameters(group)}
        given = [parameter for options in optimizer.param_groups for parameter in options["params"]]
        lost = sum(id(parameter) in gathered and parameter.requires_grad for parameter in given)
        if lost:
            raise UserError(
                f"{lost} of the {len(given)} parameters that this {type(optimizer).__name__} has were gathered when it "
                "was made, after a forward pass, and it cannot train them. Make it before the first forward pass, or "
                "after fcdp.sharding(model).reshard()."
            )


class StalenessCheck:
    """Compares cached with current parameters at each hit.

    On the CPU this is exact and immediate. On CUDA a sum of the words' bits is compared on the device, and the result
    of all ranks is read once per step, before the optimizer runs: the host never waits inside the step."""

    def __init__(
        self, device: torch.device, group: dist.ProcessGroup | None = None, at_once: bool | None = None
    ):
        at_once = device.type != "cuda" if at_once is None else at_once
        self._found = None if at_once else torch.zeros((), dtype=torch.int32, device=device)
        self._has_checked = False  # equal on all ranks, as hits are
        self._group = group

    def filled(self, group: ParameterGroup, current: torch.Tensor) -> None:
        """Note that the cache of ``group`` has just been filled, this rank's part of it with ``current``."""
        if self._found is not None:
            group.fingerprint = _fingerprint(current)

    def check(self, group: ParameterGroup, current: torch.Tensor, cached: torch.Tensor | None) -> None:
        """Compare this rank's part of the parameters, now and in the cache (not needed on CUDA)."""
        if self._found is not None:
            self._has_checked = True
            if group.fingerprint is not None:
                self._found |= (_fingerprint(current) != group.fingerprint).int()
        elif cached is not None and not torch.equal(_words(cached), _words(current)):
            raise StaleCacheError(f"'{group.name}'")

    def raise_if_found(self) -> None:
        """Raise what checks on CUDA have found on any rank since the last call. Collective; waits for the device."""
        if self._found is None or not self._has_checked:
            return
        self._has_checked = False
        if self._group is not None:
            # A rank that raised alone would leave the others waiting for it.
            dist.all_reduce(self._found, dist.ReduceOp.MAX, self._group)
        if bool(self._found):
            self._found.zero_()
            raise StaleCacheError("at least one group")


def _words(data: torch.Tensor) -> torch.Tensor:
    """Return the bits as integers, among which NaN equals itself and 0.0 is not -0.0."""
    return data.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[data.element_size()])


def _fingerprint(data: torch.Tensor) -> torch.Tensor:
    return _words(data).sum(dtype=torch.int64)
