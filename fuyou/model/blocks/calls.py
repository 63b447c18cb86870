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
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from common.data.documents import Documents
from fuyou.model.blocks.hidden_edits import EMBEDDING, BlockLinks, HiddenEdit, Key, argument_paths, shared_dictionaries
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
    """Arguments of each block, next to the hidden states, for one micro-batch.

    Args:
        links: what to expect.
        arguments: positional and keyword arguments of each block, if they are known already.
        documents: documents that share the rows; None: every row is one.
    """

    def __init__(
        self,
        links: BlockLinks | None = None,
        arguments: Iterable[tuple[tuple[Any, ...], dict[str, Any]]] = (),
        documents: Documents | None = None,
    ):
        self._links = links or BlockLinks()
        self.documents = documents
        self.arguments = list(arguments)  # Positional and keyword arguments of each block
        self.first_hidden: torch.Tensor | None = None  # Input of the first block, until the embedding hands it out
        self.hidden_shape: tuple[int, ...] = ()  # Shape of the hidden states
        self.cache: ChunkCache | None = None  # Keys and values of earlier chunks of the row, if it passes in chunks
        self.edits: dict[int, HiddenEdit] = {}
        self._values: dict[Key, torch.Tensor] = {}
        self._gradients: dict[Key, torch.Tensor] = {}
        self._keys: dict[int, Key] = {}  # by the identity of the tensor
        self._alive: list[torch.Tensor] = []  # keeps placeholders alive, so that no other tensor gets their identity
        self._shared: dict[int, dict[Any, Any]] = {}  # content of each shared dictionary now, by its identity
        self._shared_before: dict[int, dict[int, dict[Any, Any]]] = {}  # content before each block
        self._latest_run = _BlockRun()

    # -- while the embedding runs ---------------------------------------------------------------------------------

    def placeholder(self, key: Key) -> torch.Tensor:
        """Return an empty tensor that stands for a value until a block has produced it."""
        made = torch.empty(0)
        self._alive.append(made)
        self._keys[id(made)] = key
        return made

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

        Args:
            values: tensors that blocks return next to hidden states, on the meta device; shared dictionaries hold meta
                tensors, too.
            device: where the zeros are.
        """

        def zeros(leaf: Any) -> Any:
            is_meta = isinstance(leaf, torch.Tensor) and leaf.is_meta
            return torch.zeros(leaf.shape, dtype=leaf.dtype, device=device) if is_meta else leaf

        self._values.update({key: zeros(values[key]) for key in self._links.consumed if key in values})
        for args, kwargs in self.arguments if self._links.shared else ():
            for dictionary in shared_dictionaries(args, kwargs):
                for name, entry in dictionary.items():
                    dictionary[name] = tree_map(zeros, entry)

    def carried(self) -> list[torch.Tensor]:
        """Return the tensors made by the embedding that carry gradients."""
        return [value for (maker, _), value in self._values.items() if maker == EMBEDDING]

    def lost_gradient(self) -> tuple[int, str] | None:
        """Return block and path of an argument whose gradient would be lost; None if there is none."""
        for block, (args, kwargs) in enumerate(self.arguments):
            for path, leaf in argument_paths(args, kwargs):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad and id(leaf) not in self._keys:
                    return block, path
        return None

    # -- while a block runs ---------------------------------------------------------------------------------------

    def describe(self, block: int) -> Hashable:
        """Return what decides, with hidden states, which operators a block runs on which shapes: to compare calls."""
        args, kwargs = self.arguments[block]
        leaves = tree_leaves((args, [kwargs[name] for name in sorted(kwargs)]))
        edit = self.edits.get(block)
        if edit is not None:
            leaves += [self._values[key] for key in edit.values.values()]
        described = tuple(
            (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
            if isinstance(leaf, torch.Tensor | bool | int | float | str | None)
        )
        several, start = self.documents is not None, None if self.cache is None else self.cache.start
        return tuple(sorted(kwargs)), len(edit.steps) if edit is not None else 0, several, start, described

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
        shared: dict[int, MutableMapping[Any, Any]] = {}
        given: dict[int, dict[Any, Any]] = {}
        if self._links.shared:
            before = self._shared_content_before(index)
            shared, given = self._copy_shared(before, args, kwargs)
        args, kwargs = tree_map(
            lambda leaf: self._argument(leaf, shared), (args, kwargs), is_leaf=lambda leaf: id(leaf) in shared
        )
        result = block(hidden, *args, **kwargs)
        for position, leaf in enumerate(tree_leaves(result)):
            if (index, position) in self._links.consumed:
                run.produced[index, position] = leaf
        for identity, dictionary in shared.items():
            self._note_shared(index, identity, dictionary, given[identity])
        if not torch.is_grad_enabled():
            self._values.update(run.produced)
            self._latest_run = _BlockRun()
        return _hidden_of(result)

    def roots(self) -> list[torch.Tensor]:
        """Return the values that the latest run of a block has produced next to hidden states."""
        states = [] if self.cache is None else self.cache.roots()
        return [*self._latest_run.produced.values(), *(state for state, _ in states)]

    def backward(self, result: torch.Tensor, gradient: torch.Tensor, losses: Sequence[torch.Tensor] = ()) -> None:
        """Run the backward pass of the latest run of a block.

        Args:
            result: its output.
            gradient: gradient of the output.
            losses: scalars that the run has added to the loss.
        """
        run, self._latest_run = self._latest_run, _BlockRun()
        roots, gradients = [result, *losses], [gradient, *(torch.ones_like(loss) for loss in losses)]
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
                self._gradients[key] = self._gradients[key] + leaf.grad if key in self._gradients else leaf.grad

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

    def _argument(self, leaf: Any, shared: Mapping[int, Any]) -> Any:
        if id(leaf) in shared:
            return shared[id(leaf)]
        key = self._keys.get(id(leaf)) if isinstance(leaf, torch.Tensor) else None
        return leaf if key is None else self._value(key)

    def _shared_content_before(self, index: int) -> dict[int, dict[Any, Any]]:
        if index not in self._shared_before:
            for dictionary in shared_dictionaries(*self.arguments[index]):
                self._shared.setdefault(id(dictionary), dict(dictionary))
            self._shared_before[index] = {identity: dict(content) for identity, content in self._shared.items()}
        return self._shared_before[index]

    def _copy_shared(
        self, before: Mapping[int, Mapping[Any, Any]], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[dict[int, MutableMapping[Any, Any]], dict[int, dict[Any, Any]]]:
        shared, given = {}, {}
        for dictionary in shared_dictionaries(args, kwargs):
            content = {
                name: tree_map(lambda leaf: self._value(leaf.key) if isinstance(leaf, _Produced) else leaf, entry)
                for name, entry in before[id(dictionary)].items()
            }
            mine = copy.copy(dictionary)
            mine.clear()
            mine.update(content)
            shared[id(dictionary)], given[id(dictionary)] = mine, content
        return shared, given

    def _note_shared(self, index: int, identity: int, dictionary: Mapping[Any, Any], given: Mapping[Any, Any]) -> None:
        for name, entry in dictionary.items():
            if name in given and given[name] is entry:
                continue
            leaves, structure = tree_flatten(entry)
            for position, leaf in enumerate(leaves):
                if isinstance(leaf, torch.Tensor):
                    key = (index, (name, position))
                    self._latest_run.produced[key] = leaf
                    leaves[position] = _Produced(key)
            if not torch.is_grad_enabled():
                self._shared[identity][name] = tree_unflatten(leaves, structure)


def _hidden_of(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result[0]
