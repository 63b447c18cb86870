"""What a model does to the hidden states between two blocks: recorded without values, and repeated with them.

Qwen3-VL, for example, adds features of the image there.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map_only

from common.errors import UserError

Key = tuple[int, Hashable]  # Name of a value: the block that made it (or :data:`EMBEDDING`), and which
EMBEDDING = -1


@dataclass(frozen=True)
class BlockLinks:
    """The links between the blocks of a model, which are the same for all batches."""

    # Arguments with gradients for the embedding: block, path
    carried: frozenset[tuple[int, str]] = frozenset()
    # Tensors that blocks return for other blocks besides hidden states
    consumed: frozenset[Key] = frozenset()
    shared: bool = False  # Whether blocks are given one dictionary, in which they leave values for each other

    def __bool__(self) -> bool:
        return bool(self.carried or self.consumed or self.shared)


def shared_dictionary(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> MutableMapping[Any, Any] | None:
    """Return the dictionary among a block's arguments; None if there is none."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, MutableMapping)), None)


def argument_paths(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield all leaves of a block's arguments, with their paths."""
    for path, leaf in tree_flatten_with_path((args, dict(kwargs)))[0]:
        yield "".join(str(part) for part in path), leaf


def argument_leaves(value: Any) -> list[Any]:
    """Return ``tree_leaves(value)`` in another order, ten times faster for what blocks are called with."""
    leaves = []
    parts = [value]
    while parts:
        part = parts.pop()
        if part is None or isinstance(part, torch.Tensor):
            leaves.append(part)
        elif type(part) is dict:
            parts.extend(part.values())
        elif type(part) in (list, tuple):
            parts.extend(part)
        else:
            leaves.extend(tree_leaves(part))
    return leaves


@dataclass(frozen=True)
class _Reference:
    """Stands for a tensor in a recorded call: the identity that the tensor had when it was recorded."""

    identity: int


@dataclass(frozen=True)
class HiddenEdit:
    """The calls of PyTorch's functions that make a block's input from the output of the block before it."""

    # Function, arguments, keyword arguments and result of each call; references stand for tensors that depend on the
    # hidden states.
    steps: tuple[tuple[Callable[..., Any], Any, Any, Any], ...]
    source: int  # Identity of the earlier block's output, when it was recorded
    result: int  # Identity of the block's input, also
    # Names of other tensors that may carry gradients (image features, say), by identity
    values: Mapping[int, Key]

    def apply(self, hidden: torch.Tensor, value: Callable[[Key], torch.Tensor]) -> torch.Tensor:
        """Repeat the calls on ``hidden``, with ``value`` to look up other tensors, and return their result."""
        known = {self.source: hidden.clone()}  # an edit in place must not reach what is kept
        known.update({identity: value(key) for identity, key in self.values.items()})

        for function, args, kwargs, expected in self.steps:
            args, kwargs = tree_map_only(_Reference, lambda leaf: known[leaf.identity], (args, kwargs))
            output = function(*args, **kwargs)
            for leaf, reference in zip(tree_leaves(output), tree_leaves(expected), strict=True):
                if isinstance(reference, _Reference):
                    known[reference.identity] = leaf
        return known[self.result]


class HiddenEditRecorder(TorchFunctionMode):
    """Records what a model does with the output of a block before it calls the next one.

    The outputs are not computed yet: what the model edits is scratch memory of their shape. A block's output may be
    edited on its way to the next block. Other uses are refused.
    """

    def __init__(self, name: str):
        super().__init__()
        self._name = name
        self.paused = False
        self._steps: list[tuple[Callable[..., Any], Any, Any, Any]] = []
        self._made: dict[int, torch.Tensor] = {}  # Tensors that depend on outputs of blocks, by identity
        self._outputs: list[int] = []  # Identities of the scratch memory in place of the blocks' outputs

    def output(self, like: torch.Tensor) -> torch.Tensor:
        """Return scratch memory that stands for what the next block will return."""
        scratch = torch.empty_like(like, requires_grad=False)
        self._made[id(scratch)] = scratch
        self._outputs.append(id(scratch))
        return scratch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.paused:
            return result
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(id(leaf) in self._made for leaf in inputs):
            outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            if outputs or func is torch.Tensor.__setitem__:
                self._steps.append((func, args, kwargs, result))
                self._made.update({id(leaf): leaf for leaf in outputs})
            elif getattr(func, "__name__", "") in ("item", "tolist", "__bool__", "__int__", "__float__"):
                raise self._refusal("decides by values that its blocks compute")
        return result

    def edit(
        self, block: int, hidden: torch.Tensor, carry: Callable[[torch.Tensor], Key]
    ) -> HiddenEdit | None:
        """Return how the input ``hidden`` of ``block`` follows from the output before it; None if it is that output.

        ``carry`` gives a tensor from before the blocks a name, under which its gradient goes back.

        Raises:
            UserError: the input follows from something else.
        """
        if not self._outputs:
            return None
        *earlier, source = self._outputs
        if id(hidden) == source and hidden._version == 0:  # as it was made: not edited in place either
            return None
        needed = {id(hidden)}
        chosen = []
        for step in reversed(self._steps):
            function, args, kwargs, result = step
            outputs = {id(leaf) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)}
            changed = {id(args[0])} if function is torch.Tensor.__setitem__ else set()
            if needed & (outputs | changed):
                chosen.append(step)
                needed |= {id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        if source not in needed or not needed.isdisjoint(earlier):
            raise self._refusal(f"gives block {block} another input than the output of the block before it")
        values: dict[int, Key] = {}

        def refer(leaf: torch.Tensor) -> Any:
            if id(leaf) in self._made:
                return _Reference(id(leaf))
            if leaf.is_floating_point():
                values.setdefault(id(leaf), carry(leaf))
                return _Reference(id(leaf))
            return leaf

        steps = tuple(tree_map_only(torch.Tensor, refer, step) for step in reversed(chosen))
        return HiddenEdit(steps, source, id(hidden), values)

    def check_arguments(self, block: int, args: Any, kwargs: Any) -> None:
        """Check that no argument of ``block`` is computed from the outputs of blocks."""
        for leaf in argument_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and id(leaf) in self._made:
                raise self._refusal(
                    f"computes an argument of block {block} from the outputs of blocks before it"
                )

    def _refusal(self, what: str) -> UserError:
        return UserError(f"{self._name} cannot be split at its blocks: it {what}.")
