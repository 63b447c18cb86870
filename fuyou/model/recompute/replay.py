"""Recomputes a block's forward pass in its backward pass: takes from memory what was saved, computes what is needed.

The first backward pass of a block is an ordinary recomputation that is traced. From then on the forward pass copies the
chosen outputs into a buffer, and recomputation gives them back, leaves out what nobody needs, and runs the rest. Both
follow the trace operator by operator. Where a recomputation departs from it (control flow that depends on the data), it
starts again and computes everything, and that kind of call is never taken short cuts with again. So the gradients are
those of full recomputation, to the bit, in every case.

Operators that draw random numbers always run, in their order: the random stream is that of the forward pass.
"""

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fuyou.model.blocks.calls import BlockCalls
from fuyou.model.operators import makes_views
from fuyou.model.recompute.block_trace import ALIGN_BYTES, BlockTrace, TensorSpec, Tracer, argument_index

_clone = torch.ops.aten.clone.default


class _TraceMismatch(Exception):
    """A recomputation that does not do what the traced one did."""


class _ReplayPlan:
    """The plan for recomputing one kind of call of one block: from the trace of its first recomputation, the name and
    ordinal of the calls whose outputs are saved, and the size of the buffer for them."""

    def __init__(self, trace: BlockTrace, operators: Collection[tuple[str, int]], nbytes: int):
        self.trace = trace
        self.places: dict[int, int] = {}  # Where in the buffer the outputs of each saved call begin
        self._required: dict[frozenset[int], frozenset[int]] = {}
        start = 0
        for name, ordinal in operators:
            index = trace.find(name, ordinal)
            if index is not None and trace.operators[index].savable:
                end = start + trace.operators[index].nbytes
                if end <= nbytes:
                    self.places[index], start = start, end

    def required(self, kept: frozenset[int]) -> frozenset[int]:
        """Return the calls that a recomputation has to make if the outputs of ``kept`` are saved."""
        if kept not in self._required:
            self._required[kept] = self.trace.required(kept)
        return self._required[kept]

    def views(self, index: int, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return the outputs of one saved call in the buffer, each with a separate version counter."""
        views, place = [], self.places[index]
        for spec in self.trace.operators[index].outputs:
            flat = buffer[place : place + spec.nbytes].view(spec.dtype)
            views.append(flat.as_strided(spec.shape, spec.stride, flat.storage_offset()).data)
            place += -(-spec.nbytes // ALIGN_BYTES) * ALIGN_BYTES
        return views


@dataclass
class SavedForward:
    """The outputs that one block's forward pass on one micro-batch has saved for its backward pass."""

    plan: _ReplayPlan | None
    kept: Mapping[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    """Calls whose outputs are in the buffer, each with those that are on another device than it: the random state of an
    attention kernel is on the host, and to copy it would make the host wait for the device."""


class _SaveOutputs(TorchDispatchMode):
    """Follows a plan in a pass without gradients, and copies the outputs that are to be saved."""

    def __init__(self, plan: _ReplayPlan, buffer: torch.Tensor):
        super().__init__()
        self._plan, self._buffer = plan, buffer
        self._next = 0
        self.kept: dict[int, tuple[torch.Tensor, ...]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if makes_views(func):
            return func(*args, **kwargs)
        index = self._follow(func)
        if index not in self._plan.places:
            return func(*args, **kwargs)
        result = func(*_with_statistics(func, args), **kwargs)
        if TensorSpec.of_all(result) == self._plan.trace.operators[index].result:
            values = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            for value, view in zip(values, self._plan.views(index, self._buffer), strict=True):
                if value.device == view.device:
                    view.copy_(value)
            self.kept[index] = tuple(value for value in values if value.device != self._buffer.device)
        return result

    def _follow(self, func: Any) -> int:
        """Return the index of this call in the trace, or -1 from where the two differ."""
        operators = self._plan.trace.operators
        at = self._next
        # Autograd saves copies of what is about to be overwritten; a pass without gradients does not.
        while at < len(operators) and operators[at].function is not func and operators[at].function is _clone:
            at += 1
        if at == len(operators) or operators[at].function is not func:
            self._next = len(operators)
            return -1
        self._next = at + 1
        return at


class _Recompute(TorchDispatchMode):
    """Follows a plan with gradients enabled, and takes its short cuts."""

    def __init__(self, plan: _ReplayPlan, kept: Mapping[int, tuple[torch.Tensor, ...]], buffer: torch.Tensor | None):
        super().__init__()
        self._plan, self._kept, self._buffer = plan, kept, buffer
        self._required = plan.required(frozenset(kept))
        self.next = 0  # Index of the next call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if makes_views(func):
            return func(*args, **(kwargs or {}))
        index, operators = self.next, self._plan.trace.operators
        if index >= len(operators) or operators[index].function is not func:
            raise _TraceMismatch
        self.next += 1
        if index in self._kept:
            assert self._buffer is not None
            views, others = self._plan.views(index, self._buffer), iter(self._kept[index])
            given = (
                next(others) if spec.device != view.device else view
                for spec, view in zip(operators[index].outputs, views, strict=True)
            )
            return tree_map_only(TensorSpec, lambda _: next(given), operators[index].result)
        if index not in self._required:
            return tree_map_only(TensorSpec, _uninitialized, operators[index].result)
        result = func(*args, **(kwargs or {}))
        if TensorSpec.of_all(result) != operators[index].result:
            raise _TraceMismatch
        return result


@dataclass
class BlockReplay:
    """Runs blocks forward and recomputes them, for as long as an engine lives.

    Args:
        layers: blocks that save outputs.
        operators: name and ordinal of the calls whose outputs they save.
        nbytes: size of the buffers that they are saved in.
    """

    layers: Collection[int] = ()
    operators: Collection[tuple[str, int]] = ()
    nbytes: int = 0
    _plans: dict[Hashable, _ReplayPlan | None] = field(default_factory=dict)
    """Plans by kind of call; None where a recomputation did not match its trace."""
    _distinct: list[_ReplayPlan] = field(default_factory=list)

    def forward(
        self, layer: int, calls: BlockCalls, run: Callable[[], torch.Tensor], buffer: torch.Tensor | None
    ) -> tuple[torch.Tensor, SavedForward]:
        """Call ``run`` (the block, without gradients), and save the chosen outputs in ``buffer`` (uint8, or None)."""
        plan = self._plans.get((layer, calls.describe(layer)))
        if plan is None or buffer is None or not plan.places:
            return run(), SavedForward(plan)
        with _SaveOutputs(plan, buffer) as mode:
            result = run()
        return result, SavedForward(plan, mode.kept)

    def backward(
        self,
        layer: int,
        calls: BlockCalls,
        run: Callable[[], torch.Tensor],
        buffer: torch.Tensor | None,
        saved: SavedForward,
    ) -> tuple[torch.Tensor, float]:
        """Call ``run`` (the block, with gradients; must draw the forward pass's random numbers at each call).

        Returns:
            The block's output, with everything behind it that a backward pass needs (its values may be meaningless),
            and the fraction of the FLOPs that this took less than a full recomputation.
        """
        kind, plan = (layer, calls.describe(layer)), saved.plan
        if plan is None:
            if kind in self._plans:  # it did not match its trace once
                return run(), 0.0
            with Tracer() as tracer:
                result = run()
            self._plans[kind] = self._plan_for(tracer.finish(result, *calls.roots()), layer)
            return result, 0.0
        try:
            with _Recompute(plan, saved.kept, buffer) as mode:
                result = run()
            if mode.next != len(plan.trace.operators):  # calls are missing
                raise _TraceMismatch
        except _TraceMismatch:
            self._plans[kind] = None
            return run(), 0.0
        return result, plan.trace.left_out(frozenset(saved.kept))

    def _plan_for(self, trace: BlockTrace, layer: int) -> _ReplayPlan:
        """Return the plan for this trace; layers of one kind share it."""
        operators = self.operators if layer in self.layers else ()
        made = _ReplayPlan(trace, operators, self.nbytes)
        for plan in self._distinct:
            if plan.trace == trace and plan.places == made.places:
                return plan
        self._distinct.append(made)
        return made


def _with_statistics(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return ``args`` that make an attention kernel compute what only a backward pass needs, too."""
    for name in ("compute_log_sumexp", "compute_logsumexp"):
        position = argument_index(func, name)
        if position is not None and position < len(args):
            return (*args[:position], True, *args[position + 1 :])
    return args


def _uninitialized(spec: TensorSpec) -> torch.Tensor:
    """Return memory with arbitrary values, instead of an output that nobody will read."""
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
