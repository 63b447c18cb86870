"""Recomputes a block's forward pass in its backward pass: takes from memory what was saved, computes what is needed.

The first backward pass of a block is an ordinary recomputation that is traced. From then on the forward pass copies the
chosen outputs into a buffer, and recomputation gives them back, leaves out what nobody needs, and runs the rest. Both
follow the trace operator by operator. Where a recomputation departs from it (control flow that depends on the data), it
starts again and computes everything, and that kind of call is never taken short cuts with again. So the gradients are
those of full recomputation, to the bit.

Following an operator costs 5 to 10 us of the host. Where the trace hands no value to Python, nothing can depart from it
once a recomputation has matched, unless the code depends on more than its call says; from then on only the modules are
followed in which something is saved or left out. Operators elsewhere are computed again and not compared.

Operators that draw random numbers always run, in their order: the random stream is that of the forward pass.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fuyou.model.blocks.calls import BlockCalls
from fuyou.model.operators import makes_views
from fuyou.model.recompute.block_trace import (
    ALIGN_BYTES,
    BlockTrace,
    ModuleCall,
    TensorSpec,
    Tracer,
    argument_index,
)

_clone = torch.ops.aten.clone.default


class _TraceMismatch(Exception):
    """A recomputation that does not do what the traced one did."""


class _ReplayPlan:
    """The plan for recomputing one kind of call of one block: from the trace of its first recomputation, the modules
    that it has called (None: every operator is followed), the name and ordinal of the calls whose outputs are saved,
    and the size of the buffer for them."""

    def __init__(
        self,
        trace: BlockTrace,
        modules: Sequence[ModuleCall] | None,
        operators: Collection[tuple[str, int]],
        nbytes: int,
    ):
        self.trace = trace
        self.is_confirmed = False  # Whether a recomputation has matched the trace from its start to its end
        self._modules = modules
        self._around: dict[frozenset[int], list[ModuleCall] | None] = {}
        self.places: dict[int, int] = {}  # Where in the buffer the outputs of each saved call begin
        self._short_cuts: dict[frozenset[int], _ShortCuts] = {}
        start = 0
        for name, ordinal in operators:
            index = trace.find(name, ordinal)
            if index is not None and trace.operators[index].savable:
                end = start + trace.operators[index].nbytes
                if end <= nbytes:
                    self.places[index], start = start, end

    def short_cuts(self, given: frozenset[int]) -> "_ShortCuts":
        """Return the short cuts of a recomputation if the outputs of ``given`` are saved."""
        if given not in self._short_cuts:
            self._short_cuts[given] = _ShortCuts.of(self.trace, given)
        return self._short_cuts[given]

    def around(self, operators: frozenset[int]) -> list[ModuleCall] | None:
        """Return the calls of modules in which these operators run; None if all operators are to be followed."""
        if self._modules is None or not self.is_confirmed:
            return None
        if operators not in self._around:
            self._around[operators] = ModuleCall.around(operators, self._modules)
        return self._around[operators]

    def views(self, index: int, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return the outputs of one saved call in the buffer, each with a separate version counter."""
        views = []
        start = self.places[index]
        for spec in self.trace.operators[index].outputs:
            flat = buffer[start : start + spec.nbytes].view(spec.dtype)
            views.append(flat.as_strided(spec.shape, spec.stride, flat.storage_offset()).data)
            start += -(-spec.nbytes // ALIGN_BYTES) * ALIGN_BYTES
        return views


@dataclass(frozen=True)
class _ShortCuts:
    required: frozenset[int]  # Calls that a recomputation has to make
    replaced: frozenset[int]  # Calls that it must not make, or whose time is worth saving
    left_out: float  # Fraction of the FLOPs that it leaves out

    @staticmethod
    def of(trace: BlockTrace, given: frozenset[int]) -> "_ShortCuts":
        required = trace.required(given)
        operators = trace.operators
        unneeded = [index for index in range(len(operators)) if index not in required | given]
        # Others may run on results that are left out, whose values are arbitrary, unless these are indices.
        indices = {
            i for i in unneeded if not all(spec.dtype.is_floating_point for spec in operators[i].outputs)
        }
        replaced = {i for i in unneeded if operators[i].flops or i in indices or operators[i].reads & indices}
        return _ShortCuts(required, given | replaced, trace.left_out(given))


@dataclass
class SavedForward:
    """The outputs that one block's forward pass on one micro-batch has saved for its backward pass."""

    kind: Hashable  # Kind of the call
    plan: _ReplayPlan | None
    saved: Mapping[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    """Calls whose outputs are in the buffer, each with those that are on another device than it: the random state of an
    attention kernel is on the host, and to copy it would make the host wait for the device."""


class _FollowPlan(TorchDispatchMode):
    """Follows a plan, operator by operator."""

    def __init__(self, plan: _ReplayPlan):
        super().__init__()
        self._plan = plan
        self._operators = plan.trace.operators
        self.next = 0  # Index of the next call

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # What is compiled runs eagerly in a mode anyway, and PyTorch's guard costs 3 us per operator
        return False

    def run(self, work: Callable[[], torch.Tensor], around: list[ModuleCall] | None) -> torch.Tensor:
        """Return what ``work`` does, following it in these calls of modules, or all the time."""
        if around is None:
            with self:
                result = work()
            self.check(self.next == len(self._operators))
            return result
        left = {(call.module, call.ordinal): call for call in around}
        counts: Counter[nn.Module] = Counter()
        with ExitStack() as hooks, ExitStack() as following:

            def begin(module: nn.Module, _arguments: Any) -> None:
                call = left.get((module, counts[module]))
                counts[module] += 1
                if call is not None:
                    self.next = call.start
                    following.enter_context(self)

            def end(module: nn.Module, _arguments: Any, _result: Any) -> None:
                call = left.pop((module, counts[module] - 1), None)
                if call is not None:
                    following.close()
                    self.check(self.next == call.stop)

            for module in {call.module for call in around}:
                hooks.callback(module.register_forward_pre_hook(begin).remove)
                hooks.callback(module.register_forward_hook(end).remove)
            result = work()
        self.check(not left)
        return result

    def check(self, matches: bool) -> None:
        """Raise an error if the recomputation does not match."""


class _SaveOutputs(_FollowPlan):
    """Follows a plan in a pass without gradients, and copies the outputs that are to be saved."""

    def __init__(self, plan: _ReplayPlan, buffer: torch.Tensor):
        super().__init__(plan)
        self._buffer = buffer
        self.saved: dict[int, tuple[torch.Tensor, ...]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if makes_views(func):
            return func(*args, **kwargs)
        index = self._follow(func)
        if index not in self._plan.places:
            return func(*args, **kwargs)
        result = func(*_with_statistics(func, args), **kwargs)
        if _matches(result, self._plan.trace.operators[index].result):
            values = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            for value, view in zip(values, self._plan.views(index, self._buffer), strict=True):
                if value.device == view.device:
                    view.copy_(value)
            self.saved[index] = tuple(value for value in values if value.device != self._buffer.device)
        return result

    def _follow(self, func: Any) -> int:
        """Return the index of this call in the trace, or -1 from where the two differ."""
        operators = self._operators
        at = self.next
        # Autograd saves copies of what is about to be overwritten; a pass without gradients does not.
        while at < len(operators) and operators[at].function is not func and operators[at].function is _clone:
            at += 1
        if at == len(operators) or operators[at].function is not func:
            self.next = len(operators)
            return -1
        self.next = at + 1
        return at


class _Recompute(_FollowPlan):
    """Follows a plan with gradients enabled, and takes its short cuts."""

    def __init__(
        self, plan: _ReplayPlan, saved: Mapping[int, tuple[torch.Tensor, ...]], buffer: torch.Tensor | None
    ):
        super().__init__(plan)
        self._saved = saved
        self._buffer = buffer
        self.short_cuts = plan.short_cuts(frozenset(saved))

    def check(self, matches: bool) -> None:
        if not matches:
            raise _TraceMismatch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if makes_views(func):
            return func(*args, **(kwargs or {}))
        index = self.next
        operators = self._operators
        self.check(index < len(operators) and operators[index].function is func)
        self.next += 1
        if index in self._saved:
            assert self._buffer is not None
            views = self._plan.views(index, self._buffer)
            others = iter(self._saved[index])
            given = (
                next(others) if spec.device != view.device else view
                for spec, view in zip(operators[index].outputs, views, strict=True)
            )
            return tree_map_only(TensorSpec, lambda _: next(given), operators[index].result)
        if index not in self.short_cuts.required:
            result = operators[index].result
            single = type(result) is TensorSpec
            return _uninitialized(result) if single else tree_map_only(TensorSpec, _uninitialized, result)
        result = func(*args, **(kwargs or {}))
        self.check(_matches(result, operators[index].result))
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
    _traces: list[BlockTrace] = field(default_factory=list)  # Distinct ones

    def forward(
        self, layer: int, calls: BlockCalls, run: Callable[[], torch.Tensor], buffer: torch.Tensor | None
    ) -> tuple[torch.Tensor, SavedForward]:
        """Call ``run`` (the block, without gradients), and save the chosen outputs in ``buffer`` (uint8, or None)."""
        kind = layer, calls.describe(layer)
        plan = self._plans.get(kind)
        if plan is None or buffer is None or not plan.places:
            return run(), SavedForward(kind, plan)
        mode = _SaveOutputs(plan, buffer)
        result = mode.run(run, plan.around(frozenset(plan.places)))
        return result, SavedForward(kind, plan, mode.saved)

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
        kind = saved.kind
        plan = saved.plan
        if plan is None:
            if kind in self._plans:  # it did not match its trace once
                return run(), 0.0
            with Tracer() as tracer:
                result = run()
            trace = tracer.finish(result, *calls.roots())
            # Which operators run for documents or earlier keys depends on their lengths, which no kind of call tells.
            is_told = calls.cache is None and calls.documents is None
            modules = tracer.module_calls if tracer.is_static and is_told else None
            operators = self.operators if layer in self.layers else ()
            self._plans[kind] = _ReplayPlan(self._shared(trace), modules, operators, self.nbytes)
            return result, 0.0
        mode = _Recompute(plan, saved.saved, buffer)
        try:
            result = mode.run(run, plan.around(mode.short_cuts.replaced))
        except _TraceMismatch:
            self._plans[kind] = None
            return run(), 0.0
        plan.is_confirmed = True
        return result, mode.short_cuts.left_out

    def _shared(self, trace: BlockTrace) -> BlockTrace:
        """Return an equal trace of an earlier block, or this one."""
        if trace not in self._traces:
            self._traces.append(trace)
        return self._traces[self._traces.index(trace)]


def _matches(result: Any, expected: Any) -> bool:
    """Return whether ``TensorSpec.of_all(result)`` is ``expected``."""
    if type(expected) is not TensorSpec or type(result) is not torch.Tensor:
        return bool(TensorSpec.of_all(result) == expected)
    same_layout = result.shape == expected.shape and result.stride() == expected.stride
    return same_layout and result.dtype == expected.dtype and result.device == expected.device


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
