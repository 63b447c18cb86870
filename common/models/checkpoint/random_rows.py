"""Random first values of some rows of a parameter, equal to those that a draw of the whole would give them.

What a family's initialisation does to a parameter is noted on the meta device, and repeated for the rows that are
wanted. PyTorch's generator for the CPU takes one number for each element, in order, and makes normal ones in groups of
16. So rows of a multiple of 16 elements can be drawn from the state in which the generator comes to them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GROUP = 16
"""Elements that are drawn together."""
_SCRATCH = 1 << 20
"""Elements that are drawn at once and thrown away, on the way to others."""

_ATEN = torch.ops.aten
_DRAWS = {_ATEN.normal_.default, _ATEN.uniform_.default}
_SETS = {_ATEN.zero_.default, _ATEN.fill_.Scalar}
_CHANGES = {
    _ATEN.mul_.Tensor,
    _ATEN.mul_.Scalar,
    _ATEN.div_.Tensor,
    _ATEN.add_.Tensor,
    _ATEN.add_.Scalar,
    _ATEN.erfinv_.default,
    _ATEN.clamp_.default,
}
"""Operators that do the same to each element, whatever the others are."""


@dataclass(frozen=True)
class _Step:
    """An operator that is applied to a parameter in place."""

    function: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    def __call__(self, tensor: torch.Tensor) -> None:
        self.function(tensor, *self.arguments, **self.keywords)


class _Draw:
    """A draw of all elements of a parameter, one after the other.

    Args:
        step: draws them.
        count: number of elements.
        before: the draw that takes the generator to the first of them.
        state: state of the generator there, if nothing was drawn before.
    """

    def __init__(self, step: _Step, count: int, before: "_Draw | None", state: torch.Tensor) -> None:
        self._step, self._count, self._before = step, count, before
        self._start = state if before is None else None
        self._end: torch.Tensor | None = None
        self._place, self._state = 0, self._start

    def into(self, values: torch.Tensor, place: int) -> None:
        """Draw ``values``, the elements from ``place`` on."""
        self._go_to(place)
        self._step(values)
        self._note(place + values.numel())

    def end(self) -> torch.Tensor:
        """Return the state of the generator after the last element."""
        if self._end is None:
            self._go_to(self._count)
        assert self._end is not None
        return self._end

    def _go_to(self, place: int) -> None:
        if self._state is None or place < self._place:
            if self._start is None:
                assert self._before is not None
                self._start = self._before.end()
            self._place, self._state = 0, self._start
        torch.set_rng_state(self._state)
        missing = place - self._place
        scratch = torch.empty(min(missing, _SCRATCH))
        for first in range(0, missing, _SCRATCH):
            self._step(scratch[: missing - first])
        self._note(place)

    def _note(self, place: int) -> None:
        self._place, self._state = place, torch.get_rng_state()
        if place == self._count:
            self._end = self._state


@dataclass
class RowDraws:
    """How a parameter's first values are made, of which any rows can be made alone.

    Rows that follow those that were made last cost nothing more; others make all before them be drawn, too.
    """

    shape: torch.Size
    draw: _Draw | None = None
    """What is drawn first, if anything is."""
    steps: list[_Step] = field(default_factory=list)
    """What is done then, in order."""

    @property
    def is_set(self) -> bool:
        """Whether anything sets the parameter."""
        return self.draw is not None or bool(self.steps)

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.shape[1:].numel()

    @property
    def by_rows(self) -> bool:
        """Whether rows can be made alone."""
        return len(self.shape) > 0 and (self.draw is None or self.width % GROUP == 0)

    def rows(self, first: int, stop: int) -> torch.Tensor:
        """Return rows ``[first, stop)``, fp32."""
        values = torch.empty(stop - first, *self.shape[1:])
        with torch.random.fork_rng(devices=[]):
            if self.draw is not None:
                self.draw.into(values, first * self.width)
        for step in self.steps:
            step(values)
        return values


class RowRecorder(TorchDispatchMode):
    """Notes, while active, what is done to fp32 parameters on the meta device. Nothing is drawn for it.

    Args:
        parameters: by name.

    Attributes:
        possible: whether what is done to all these parameters can be repeated row by row.
        made: how, by name.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.made = {name: RowDraws(value.shape) for name, value in parameters.items()}
        self.possible = True
        self._names = {_memory(value): name for name, value in parameters.items()}
        self._last: _Draw | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        own = [leaf for leaf in tree_leaves((args, keywords)) if self._is_own(leaf)]
        if not own:
            result = func(*args, **keywords)
            drawn = torch.Tag.nondeterministic_seeded in func.tags
            self.possible &= not (drawn and isinstance(result, torch.Tensor) and not result.is_meta)
            return result
        if all(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns):
            return func(*args, **keywords)  # a view
        made, rest = self.made[self._names[_memory(own[0])]], tree_leaves((args[1:], keywords))
        whole = own[0] is args[0] and own[0].shape == made.shape and own[0].is_contiguous()
        count = made.shape.numel()
        countable = func not in _DRAWS or count % GROUP == 0 or count <= _SCRATCH
        alone = not any(isinstance(one, torch.Tensor | torch.Generator) for one in rest)
        if not (whole and countable and alone and func in _DRAWS | _SETS | _CHANGES):
            self.possible = False
            return func(*args, **keywords)
        step = _Step(func, tuple(args[1:]), keywords)
        if func not in _CHANGES:  # what was there is overwritten
            made.draw = None
            made.steps.clear()
        if func in _DRAWS:
            made.draw = self._last = _Draw(step, count, self._last, torch.get_rng_state())
        else:
            made.steps.append(step)
        return args[0]

    def _is_own(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.is_meta and _memory(value) in self._names


def _memory(value: torch.Tensor) -> int:
    return value.untyped_storage()._cdata
