"""A block's second forward pass, in the backward pass: computes what is needed and takes from memory what was kept.

The first backward pass of a block is an ordinary recomputation that is traced. From then on the forward pass copies the
chosen outputs into a buffer, and recomputation gives them back, leaves out what nobody needs, and runs the rest. Both
follow the trace operator by operator. Where a recomputation departs from it (control flow that depends on the data), it
starts again and computes everything, and that kind of call is never taken short cuts with again. So the gradients are
those of full recomputation, to the bit, whatever happens.

Operators that draw random numbers always run, in their order: the random stream is that of the forward pass.
"""

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fuyou.model.block_calls import BlockCalls
from fuyou.recompute.block_trace import ALIGN_BYTES, BlockTrace, TensorSpec, Tracer, argument_index, makes_views

_clone = torch.ops.aten.clone.default
_RUN, _LEAVE_OUT = -1, -2


class _Departed(Exception):
    """The recomputation does not do what the traced one did."""


class _Script:
    """How to recompute one kind of call of one block.

    Args:
        trace: of its first recomputation.
        operators: name and ordinal of the calls whose outputs are to be kept.
        nbytes: size of the buffer for them.
    """

    def __init__(self, trace: BlockTrace, operators: Collection[tuple[str, int]], nbytes: int):
        self.trace = trace
        #: Where in the buffer each kept call's outputs begin.
        self.places: dict[int, int] = {}
        self._actions: dict[frozenset[int], list[int]] = {}
        start = 0
        for name, ordinal in operators:
            index = trace.find(name, ordinal)
            if index is not None and trace.operators[index].savable:
                end = start + trace.operators[index].nbytes
                if end <= nbytes:
                    self.places[index], start = start, end

    def actions(self, kept: frozenset[int]) -> list[int]:
        """For each call: run it, leave it out, or where in the buffer its outputs are, given that ``kept`` are."""
        found = self._actions.get(kept)
        if found is None:
            needed = self.trace.required(kept)
            found = [
                self.places[index] if index in kept else _RUN if index in needed else _LEAVE_OUT
                for index in range(len(self.trace.operators))
            ]
            self._actions[kept] = found
        return found

    def saved_fraction(self, kept: frozenset[int]) -> float:
        """Of the forward pass's FLOPs."""
        whole = self.trace.flops()
        return 1.0 - self.trace.flops(self.trace.required(kept)) / whole if whole else 0.0


@dataclass
class SavedForward:
    """What the forward pass of one block and micro-batch left for the backward pass."""

    script: _Script | None
    kept: frozenset[int] = frozenset()
    """Calls whose outputs are in the buffer."""


class _Record(TorchDispatchMode):
    """Follows a script in a pass without gradients and copies the outputs that are to be kept."""

    def __init__(self, script: _Script, buffer: torch.Tensor):
        super().__init__()
        self._script, self._buffer = script, buffer
        self._next = 0
        self.kept: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if makes_views(func):
            return func(*args, **kwargs)
        index = self._follow(func)
        place = self._script.places.get(index)
        if place is None:
            return func(*args, **kwargs)
        result = func(*_with_statistics(func, args), **kwargs)
        if TensorSpec.of_all(result) == self._script.trace.operators[index].result:
            for value, view in zip(_tensors(result), _views(self._script, index, place, self._buffer), strict=True):
                view.copy_(value)
            self.kept.add(index)
        return result

    def _follow(self, func: Any) -> int:
        """Index of this call in the trace, or -1 from where the two are not the same any more."""
        operators = self._script.trace.operators
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
    """Follows a script with gradients enabled, and takes its short cuts."""

    def __init__(self, script: _Script, kept: frozenset[int], buffer: torch.Tensor | None):
        super().__init__()
        self._script, self._buffer = script, buffer
        self._actions = script.actions(kept)
        self._next = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if makes_views(func):
            return func(*args, **(kwargs or {}))
        index, operators = self._next, self._script.trace.operators
        if index >= len(operators) or operators[index].function is not func:
            raise _Departed
        self._next += 1
        action = self._actions[index]
        if action == _RUN:
            result = func(*args, **(kwargs or {}))
            if TensorSpec.of_all(result) != operators[index].result:
                raise _Departed
            return result
        if action == _LEAVE_OUT:
            return tree_map(_hollow, operators[index].result)
        assert self._buffer is not None
        views = iter(_views(self._script, index, action, self._buffer))
        return tree_map(lambda leaf: next(views) if isinstance(leaf, TensorSpec) else leaf, operators[index].result)

    def finish(self) -> None:
        """Check that nothing of the script is left.

        Raises:
            _Departed: something is.
        """
        if self._next != len(self._script.trace.operators):
            raise _Departed


@dataclass
class BlockReplay:
    """Runs blocks forward and again, for as long as an engine lives.

    Args:
        layers: blocks that keep outputs.
        operators: name and ordinal of the calls whose outputs they keep.
        nbytes: of the buffers that they are kept in.
    """

    layers: Collection[int] = ()
    operators: Collection[tuple[str, int]] = ()
    nbytes: int = 0
    _scripts: dict[Hashable, _Script | None] = field(default_factory=dict)
    """By kind of call; None for those that departed from theirs."""
    _distinct: list[_Script] = field(default_factory=list)

    def forward(
        self,
        layer: int,
        hidden: torch.Tensor,
        calls: BlockCalls,
        run: Callable[[], torch.Tensor],
        buffer: torch.Tensor | None,
    ) -> tuple[torch.Tensor, SavedForward]:
        """Call ``run`` (the block, without gradients), and keep in ``buffer`` (uint8, or None) what was chosen."""
        script = self._scripts.get(_kind(layer, hidden, calls))
        if script is None or buffer is None or not script.places:
            return run(), SavedForward(script)
        with _Record(script, buffer) as mode:
            result = run()
        return result, SavedForward(script, frozenset(mode.kept))

    def backward(
        self,
        layer: int,
        hidden: torch.Tensor,
        calls: BlockCalls,
        run: Callable[[], torch.Tensor],
        buffer: torch.Tensor | None,
        recorded: SavedForward,
    ) -> tuple[torch.Tensor, float]:
        """Call ``run`` (the block, with gradients; must draw the forward pass's random numbers at each call).

        Returns:
            The block's output, with everything behind it that a backward pass needs (its values may be meaningless),
            and the fraction of the FLOPs that this took less than a full recomputation.
        """
        kind = _kind(layer, hidden, calls)
        script = recorded.script
        if script is None:
            if kind in self._scripts:  # it departed once
                return run(), 0.0
            with Tracer() as tracer:
                result = run()
            self._scripts[kind] = self._script(tracer.finish(result, *calls.roots()), layer)
            return result, 0.0
        try:
            with _Recompute(script, recorded.kept, buffer) as mode:
                result = run()
            mode.finish()
        except _Departed:
            self._scripts[kind] = None
            return run(), 0.0
        return result, script.saved_fraction(recorded.kept)

    def _script(self, trace: BlockTrace, layer: int) -> _Script:
        """Layers of one kind share a script."""
        operators = self.operators if layer in self.layers else ()
        made = _Script(trace, operators, self.nbytes)
        for script in self._distinct:
            same = script.trace.operators == trace.operators and script.trace.saved == trace.saved
            if same and script.trace.prunes == trace.prunes and script.places == made.places:
                return script
        self._distinct.append(made)
        return made


def _kind(layer: int, hidden: torch.Tensor, calls: BlockCalls) -> Hashable:
    """What must be the same for a block to run the same operators on the same shapes."""
    return layer, tuple(hidden.shape), calls.describe(layer)


def _with_statistics(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Attention kernels leave out what only a backward pass needs, if there is to be none: ask for it."""
    for name in ("compute_log_sumexp", "compute_logsumexp"):
        position = argument_index(func, name)
        if position is not None and position < len(args):
            return (*args[:position], True, *args[position + 1 :])
    return args


def _tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def _views(script: _Script, index: int, place: int, buffer: torch.Tensor) -> list[torch.Tensor]:
    """The outputs of one kept call in the buffer, each with a version counter of its own."""
    views = []
    for spec in script.trace.operators[index].outputs:
        flat = buffer[place : place + spec.nbytes].view(spec.dtype)
        views.append(flat.as_strided(spec.shape, spec.stride, flat.storage_offset()).data)
        place += -(-spec.nbytes // ALIGN_BYTES) * ALIGN_BYTES
    return views


def _hollow(leaf: Any) -> Any:
    """Memory with nothing in it, in the place of an output that nobody will read."""
    if isinstance(leaf, TensorSpec):
        return torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device=leaf.device)
    return leaf
