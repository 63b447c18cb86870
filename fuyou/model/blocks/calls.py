"""The calls of a model's blocks in one micro-batch: their arguments, and the values that pass between them.

For a block, masks and position embeddings are constants. In some families there is more than these and hidden states:

* *Carried arguments* are made before the blocks from something that is trained (Gemma 3n's inputs of each layer).
* *Produced values* are handed on from a block to later ones, in the tuple that it returns (GLM's top-k indices) or in a
  dictionary that all blocks are given (Gemma 4's shared keys and values).
* *Edits* change the hidden states between two blocks (Qwen3-VL adds features of the image there).

All of these stay on the device from the forward pass to the backward pass. Their gradients are summed here, on their
way from the blocks that read them to the block, or the embedding, that made them.
"""

import copy
from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from common.data.documents import Documents
from fuyou.model.blocks.hidden_edits import (
    EMBEDDING,
    BlockLinks,
    HiddenEdit,
    Key,
    argument_leaves,
    argument_paths,
    shared_dictionary,
)
from fuyou.model.chunks import ChunkCache


@dataclass
class _BlockRun:
    """The tensors at which gradients enter and leave one run of a block."""

    leaves: dict[Key, torch.Tensor] = field(default_factory=dict)  # Values that the block has read
    produced: dict[Key, torch.Tensor] = field(default_factory=dict)  # Values that the block has produced


@dataclass(frozen=True)
class _Produced:
    """Stands for a produced value in a shared dictionary."""

    key: Key


class BlockCalls:
    """Arguments of each block, next to the hidden states, for one micro-batch."""

    def __init__(
        self,
        links: BlockLinks | None = None,
        arguments: Iterable[tuple[tuple[Any, ...], dict[str, Any]]] = (),
        documents: Documents | None = None,
    ):
        self._links = links or BlockLinks()
        self.documents = documents  # That share the rows; None: every row is one
        self.arguments = list(arguments)  # Positional and keyword arguments of each block
        # Input of the first block, until the embedding hands it out
        self.first_hidden: torch.Tensor | None = None
        self.hidden_shape: tuple[int, ...] = ()  # Shape of the hidden states
        # Keys and values of earlier chunks of the row, if it passes in chunks
        self.cache: ChunkCache | None = None
        self.edits: dict[int, HiddenEdit] = {}
        self._values: dict[Key, torch.Tensor] = {}
        self._gradients: dict[Key, torch.Tensor] = {}
        self._keys: dict[int, Key] = {}  # by the identity of the tensor
        # Keeps placeholders alive, so that no other tensor gets their identity
        self._alive: list[torch.Tensor] = []
        self._shared: dict[Any, Any] | None = None  # content of the shared dictionary now
        self._shared_before: dict[int, dict[Any, Any]] = {}  # content before each block
        self._latest_run = _BlockRun()

    # -- while the embedding runs ---------------------------------------------------------------------------------

    def placeholder(self, key: Key) -> torch.Tensor:
        """Return an empty tensor that stands for a value until a block has produced it."""
        empty = torch.empty(0)
        self._alive.append(empty)
        self._keys[id(empty)] = key
        return empty

    def add(self, args: tuple[Any, ...], kwargs: dict[str, Any], edit: HiddenEdit | None) -> None:
        """Note the arguments of the next block, and the edit of the hidden states before it."""
        block = len(self.arguments)
        self.arguments.append((args, kwargs))
        for path, leaf in argument_paths(args, kwargs) if self._links.carried else ():
            if (block, path) in self._links.carried and isinstance(leaf, torch.Tensor):
                self.carry(leaf)
        if edit is not None:
            self.edits[block] = edit

    def key_of(self, value: Any) -> Key | None:
        """Return the key of the value that ``value`` stands for; None if that is neither produced nor carried."""
        return self._keys.get(id(value))

    def carry(self, value: torch.Tensor) -> Key:
        """Give a tensor from before the blocks a key, under which its gradient goes back to the embedding."""
        key = self._keys.get(id(value))
        if key is None:
            key = self._keys[id(value)] = (EMBEDDING, sum(maker == EMBEDDING for maker, _ in self._values))
            self._values[key] = value
        return key

    def zero_produced_values(self, values: Mapping[Key, torch.Tensor], device: torch.device) -> None:
        """Set all produced values to zero, so that each block can be run alone.

        Here they are meta tensors: ``values`` that blocks return, and what they have left in shared dictionaries.
        """

        def zeros(leaf: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(leaf, device=device) if leaf.is_meta else leaf

        self._values.update({key: zeros(values[key]) for key in self._links.consumed if key in values})
        for args, kwargs in self.arguments if self._links.shared else ():
            dictionary = shared_dictionary(args, kwargs) or {}
            dictionary.update(
                {name: tree_map_only(torch.Tensor, zeros, entry) for name, entry in dictionary.items()}
            )

    def carried(self) -> list[torch.Tensor]:
        """Return the tensors made by the embedding that carry gradients."""
        return [value for (maker, _), value in self._values.items() if maker == EMBEDDING]

    def lost_gradient(self) -> tuple[int, str] | None:
        """Return block and path of an argument whose gradient would be lost; None if there is none."""

        def is_lost(leaf: Any) -> bool:
            return isinstance(leaf, torch.Tensor) and leaf.requires_grad and id(leaf) not in self._keys

        for block, arguments in enumerate(self.arguments):
            if any(map(is_lost, argument_leaves(arguments))):
                return block, next(path for path, leaf in argument_paths(*arguments) if is_lost(leaf))
        return None

    # -- while a block runs ---------------------------------------------------------------------------------------

    def describe(self, block: int) -> Hashable:
        """Return what decides which operators a block runs on which shapes: to compare calls."""
        args, kwargs = self.arguments[block]
        leaves = argument_leaves((args, [kwargs[name] for name in sorted(kwargs)]))
        edit = self.edits.get(block)
        if edit is not None:
            leaves += [self._values[key] for key in edit.values.values()]
        described = tuple(
            (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
            if isinstance(leaf, torch.Tensor | bool | int | float | str | None)
        )
        several = self.documents is not None
        start = None if self.cache is None else self.cache.start
        steps = len(edit.steps) if edit is not None else 0
        return self.hidden_shape, tuple(sorted(kwargs)), steps, several, start, described

    def run(self, index: int, block: Callable[..., Any], hidden: torch.Tensor) -> torch.Tensor:
        """Call block ``index``, here ``block``, on the output of the one before it, and return its hidden states.

        With gradients enabled, :meth:`backward` is to follow. Without, values it produces are kept for later blocks.
        """
        edit = self.edits.get(index)
        args, kwargs = self.arguments[index]
        if not self._links and edit is None:
            return _hidden_of(block(hidden, *args, **kwargs))
        run = self._latest_run = _BlockRun()
        if edit is not None:
            hidden = edit.apply(hidden, self._value)
        dictionary = shared_dictionary(args, kwargs) if self._links.shared else None
        shared, before = (None, {}) if dictionary is None else self._copy_shared(index, dictionary)

        def replace(leaf: Any) -> Any:
            return shared if leaf is dictionary and dictionary is not None else self._argument(leaf)

        args, kwargs = tree_map(replace, (args, kwargs), is_leaf=lambda leaf: leaf is dictionary)
        result = block(hidden, *args, **kwargs)
        for position, leaf in enumerate(tree_leaves(result)):
            if (index, position) in self._links.consumed:
                run.produced[index, position] = leaf
        if shared is not None:
            self._note_shared(index, shared, before)
        if not torch.is_grad_enabled():
            self._values.update(run.produced)
            self._latest_run = _BlockRun()
        return _hidden_of(result)

    def roots(self) -> list[torch.Tensor]:
        """Return the values that the latest run of a block has produced next to hidden states."""
        states = [] if self.cache is None else self.cache.roots()
        return [*self._latest_run.produced.values(), *(state for state, _ in states)]

    def backward(
        self, result: torch.Tensor, gradient: torch.Tensor, losses: Sequence[torch.Tensor] = ()
    ) -> None:
        """Run the backward pass of the latest run of a block, which has added the scalars ``losses`` to the loss."""
        run = self._latest_run
        self._latest_run = _BlockRun()
        roots = [result, *losses]
        gradients = [gradient, *(torch.ones_like(loss) for loss in losses)]
        for key, value in run.produced.items():
            upstream = self._gradients.pop(key, None)
            self._values.pop(key, None)  # all who read it come after it, and have been here
            if upstream is not None and value.requires_grad:
                roots.append(value)
                gradients.append(upstream)
        for state, upstream in () if self.cache is None else self.cache.roots():
            roots.append(state)
            gradients.append(upstream)
        torch.autograd.backward(roots, gradients)
        if self.cache is not None:
            self.cache.pass_on()
        for key, leaf in run.leaves.items():
            if leaf.grad is not None:
                self._gradients[key] = (
                    self._gradients[key] + leaf.grad if key in self._gradients else leaf.grad
                )

    def embedding_gradients(self, again: "BlockCalls") -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the tensors that the embedding makes for blocks, in its second run ``again``, and their gradients."""
        keys = [key for key in self._gradients if again._values[key].requires_grad]
        return [again._values[key] for key in keys], [self._gradients[key] for key in keys]

    def _value(self, key: Key) -> torch.Tensor:
        value = self._values[key]
        if not torch.is_grad_enabled() or not value.is_floating_point():
            return value
        if key not in self._latest_run.leaves:
            self._latest_run.leaves[key] = value.detach().requires_grad_()
        return self._latest_run.leaves[key]

    def _argument(self, leaf: Any) -> Any:
        key = self._keys.get(id(leaf)) if isinstance(leaf, torch.Tensor) else None
        return leaf if key is None else self._value(key)

    def _copy_shared(
        self, index: int, dictionary: MutableMapping[Any, Any]
    ) -> tuple[MutableMapping[Any, Any], dict[Any, Any]]:
        """Return a dictionary for one run of a block, and its content, which is that before the block."""
        if index not in self._shared_before:
            if self._shared is None:
                self._shared = dict(dictionary)
            self._shared_before[index] = dict(self._shared)
        before = {
            name: tree_map_only(_Produced, lambda leaf: self._value(leaf.key), entry)
            for name, entry in self._shared_before[index].items()
        }
        mine = copy.copy(dictionary)
        mine.clear()
        mine.update(before)
        return mine, before

    def _note_shared(self, index: int, dictionary: Mapping[Any, Any], before: Mapping[Any, Any]) -> None:
        for name, entry in dictionary.items():
            if name in before and before[name] is entry:
                continue
            leaves, structure = tree_flatten(entry)
            for position, leaf in enumerate(leaves):
                if isinstance(leaf, torch.Tensor):
                    key = (index, (name, position))
                    self._latest_run.produced[key] = leaf
                    leaves[position] = _Produced(key)
            if not torch.is_grad_enabled():
                assert self._shared is not None
                self._shared[name] = tree_unflatten(leaves, structure)


def _hidden_of(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result[0]
