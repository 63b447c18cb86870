"""What a model calls its blocks with, and what else than hidden states links one block to another.

Masks and position embeddings are constants to a block. In some families there is more:

* *Carried arguments*: made before the blocks from something that is trained (Gemma 3n's inputs of each layer).
* *Produced values*: what a block hands on to later ones, in the tuple that it returns (GLM's top-k indices) or in a
  dictionary that all blocks are given (Gemma 4's shared keys and values).
* *Edits*: what the model does to the hidden states between two blocks (Qwen3-VL adds features of the image there).

All of these stay on the device from the forward pass to the backward pass. Their gradients are summed here, on their
way from the blocks that read them to the block, or the embedding, that made them.
"""

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_leaves, tree_map, tree_unflatten

from common.data.documents import Documents
from common.errors import UserError

#: Who made a value, a block or the embedding (-1), and which of its values it is.
Key = tuple[int, Hashable]
EMBEDDING = -1


@dataclass(frozen=True)
class BlockLinks:
    """What links the blocks of a model beside hidden states; the same for all batches."""

    carried: frozenset[tuple[int, str]] = frozenset()
    """Arguments that carry gradients: block, and path in its arguments."""
    consumed: frozenset[Key] = frozenset()
    """Which of the tensors that blocks return beside hidden states other blocks are given."""
    shared: bool = False
    """Whether blocks are given one dictionary, in which they leave values for each other."""

    def __bool__(self) -> bool:
        return bool(self.carried or self.consumed or self.shared)


@dataclass
class _Opened:
    """One run of a block, with gradients: where they enter it and where they leave it."""

    leaves: dict[Key, torch.Tensor] = field(default_factory=dict)
    produced: dict[Key, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class _Reference:
    """The place of a tensor, in what is called again: its identity when it was first called."""

    identity: int


@dataclass(frozen=True)
class _Edit:
    """How a block's input follows from the output of the block before it: calls of PyTorch's functions."""

    steps: tuple[tuple[Callable[..., Any], Any, Any, Any], ...]
    """Function, arguments, keyword arguments and result, with references in the place of tensors that depend on it."""
    source: int
    result: int
    values: Mapping[int, Key]
    """Features and the like that may carry gradients, by identity."""

    def apply(self, hidden: torch.Tensor, value: Callable[[Key], torch.Tensor]) -> torch.Tensor:
        known = {self.source: hidden.clone()}  # an edit in place must not reach what is kept
        known.update({identity: value(key) for identity, key in self.values.items()})

        def look_up(leaf: Any) -> Any:
            return known[leaf.identity] if isinstance(leaf, _Reference) else leaf

        for function, args, kwargs, expected in self.steps:
            made = function(*tree_map(look_up, args), **tree_map(look_up, kwargs))
            for leaf, reference in zip(tree_leaves(made), tree_leaves(expected), strict=True):
                if isinstance(reference, _Reference):
                    known[reference.identity] = leaf
        return known[self.result]


class BlockCalls:
    """What the model called each block with, for one micro-batch, beside the hidden states.

    Args:
        links: what to expect.
        arguments: positional and keyword arguments of each block, if they are known already.
        documents: those that share the rows; None: every row is one.
    """

    def __init__(
        self,
        links: BlockLinks | None = None,
        arguments: Iterable[tuple[tuple[Any, ...], dict[str, Any]]] = (),
        documents: Documents | None = None,
    ):
        self._links = links or BlockLinks()
        self.documents = documents
        #: Positional and keyword arguments of each block.
        self.arguments = list(arguments)
        #: The first block's input, until the embedding hands it out.
        self.first_hidden: torch.Tensor | None = None
        #: Shape of what flows from block to block.
        self.hidden_shape: tuple[int, ...] = ()
        self.edits: dict[int, _Edit] = {}
        self._values: dict[Key, torch.Tensor] = {}
        self._gradients: dict[Key, torch.Tensor] = {}
        self._keys: dict[int, Key] = {}  # identity of a tensor -> its key
        self._alive: list[torch.Tensor] = []  # so that identities stay theirs
        self._shared: dict[int, dict[Any, Any]] = {}  # identity of a dictionary -> what is in it now
        self._shared_before: dict[int, dict[int, dict[Any, Any]]] = {}  # the same, before each block
        self._opened = _Opened()

    # -- while the embedding runs ---------------------------------------------------------------------------------

    def placeholder(self, key: Key) -> torch.Tensor:
        """An empty tensor that stands for a value until a block has produced it."""
        made = torch.empty(0)
        self._alive.append(made)
        self._keys[id(made)] = key
        return made

    def add(self, args: tuple[Any, ...], kwargs: dict[str, Any], edit: "_Edit | None") -> None:
        """Note the next block's call."""
        block = len(self.arguments)
        self.arguments.append((args, kwargs))
        for path, leaf in paths(args, kwargs) if self._links.carried else ():
            if (block, path) in self._links.carried and isinstance(leaf, torch.Tensor):
                self.carry(leaf)
        if edit is not None:
            self.edits[block] = edit

    def key_of(self, value: Any) -> Key | None:
        """What ``value`` stands for, if it is a placeholder, or carries a gradient."""
        return self._keys.get(id(value))

    def carry(self, value: torch.Tensor) -> Key:
        """Give a tensor from before the blocks a key, under which its gradient goes back to the embedding."""
        key = self._keys.get(id(value))
        if key is None:
            key = self._keys[id(value)] = (EMBEDDING, sum(maker == EMBEDDING for maker, _ in self._values))
            self._values[key] = value
        return key

    def supply(self, values: Mapping[Key, torch.Tensor], device: torch.device) -> None:
        """Let zeros be what blocks have produced, so that each of them can be run by itself.

        Args:
            values: what they return beside hidden states, on the meta device, as dictionaries that they share hold it.
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
        """What the embedding has made that carries gradients."""
        return [value for (maker, _), value in self._values.items() if maker == EMBEDDING]

    def lost_gradient(self) -> tuple[int, str] | None:
        """Return block and path of an argument that carries a gradient of which nothing is known; None if none does."""
        for block, (args, kwargs) in enumerate(self.arguments):
            for path, leaf in paths(args, kwargs):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad and id(leaf) not in self._keys:
                    return block, path
        return None

    # -- while a block runs ---------------------------------------------------------------------------------------

    def describe(self, block: int) -> Hashable:
        """What must be the same for a block to run the same operators on the same shapes, beside hidden states."""
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
        several = self.documents is not None
        return tuple(sorted(kwargs)), len(edit.steps) if edit is not None else 0, several, described

    def run(self, index: int, block: Callable[..., Any], hidden: torch.Tensor) -> torch.Tensor:
        """Call block ``index``, here ``block``, on the output of the one before it.

        With gradients enabled, :meth:`backward` is to follow. Without, what it produces is kept for later blocks.
        """
        edit = self.edits.get(index)
        args, kwargs = self.arguments[index]
        if not self._links and edit is None:
            return _hidden_of(block(hidden, *args, **kwargs))
        opened = self._opened = _Opened()
        if edit is not None:
            hidden = edit.apply(hidden, self._value)
        shared: dict[int, MutableMapping[Any, Any]] = {}
        given: dict[int, dict[Any, Any]] = {}
        if self._links.shared:
            before = self._before(index)
            shared, given = self._open_shared(before, args, kwargs)
        args, kwargs = tree_map(
            lambda leaf: self._argument(leaf, shared), (args, kwargs), is_leaf=lambda leaf: id(leaf) in shared
        )
        result = block(hidden, *args, **kwargs)
        for position, leaf in enumerate(tree_leaves(result)):
            if (index, position) in self._links.consumed:
                opened.produced[index, position] = leaf
        for identity, dictionary in shared.items():
            self._close_shared(index, identity, dictionary, given[identity])
        if not torch.is_grad_enabled():
            self._values.update(opened.produced)
            self._opened = _Opened()
        return _hidden_of(result)

    def roots(self) -> list[torch.Tensor]:
        """What the newest run of a block has produced beside hidden states."""
        return list(self._opened.produced.values())

    def backward(self, result: torch.Tensor, gradient: torch.Tensor, losses: Sequence[torch.Tensor] = ()) -> None:
        """Go back through the newest run of a block, from the gradient of its output, and of what it has produced.

        ``losses``: scalars that the run has added to the loss.
        """
        opened, self._opened = self._opened, _Opened()
        roots, gradients = [result, *losses], [gradient, *(torch.ones_like(loss) for loss in losses)]
        for key, value in opened.produced.items():
            upstream = self._gradients.pop(key, None)
            self._values.pop(key, None)  # all who read it come after it, and have been here
            if upstream is not None and value.requires_grad:
                roots.append(value)
                gradients.append(upstream)
        torch.autograd.backward(roots, gradients)
        for key, leaf in opened.leaves.items():
            if leaf.grad is not None:
                self._gradients[key] = self._gradients[key] + leaf.grad if key in self._gradients else leaf.grad

    def embedding_gradients(self, again: "BlockCalls") -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What the embedding has made for the blocks, in a second run of it (``again``), and the gradients of that."""
        keys = [key for key in self._gradients if again._values[key].requires_grad]
        return [again._values[key] for key in keys], [self._gradients[key] for key in keys]

    # -- how ------------------------------------------------------------------------------------------------------

    def _value(self, key: Key) -> torch.Tensor:
        value = self._values[key]
        if not torch.is_grad_enabled() or not value.is_floating_point():
            return value
        if key not in self._opened.leaves:
            self._opened.leaves[key] = value.detach().requires_grad_()
        return self._opened.leaves[key]

    def _argument(self, leaf: Any, shared: Mapping[int, Any]) -> Any:
        if id(leaf) in shared:
            return shared[id(leaf)]
        key = self._keys.get(id(leaf)) if isinstance(leaf, torch.Tensor) else None
        return leaf if key is None else self._value(key)

    def _before(self, index: int) -> dict[int, dict[Any, Any]]:
        """What is in the shared dictionaries when block ``index`` begins."""
        if index not in self._shared_before:
            for dictionary in shared_dictionaries(*self.arguments[index]):
                self._shared.setdefault(id(dictionary), dict(dictionary))
            self._shared_before[index] = {identity: dict(content) for identity, content in self._shared.items()}
        return self._shared_before[index]

    def _open_shared(
        self, before: Mapping[int, Mapping[Any, Any]], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[dict[int, MutableMapping[Any, Any]], dict[int, dict[Any, Any]]]:
        """A copy of each shared dictionary for one run of a block, and what is in it."""
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

    def _close_shared(self, index: int, identity: int, dictionary: Mapping[Any, Any], given: Mapping[Any, Any]) -> None:
        """Take what a block has left in a shared dictionary."""
        for name, entry in dictionary.items():
            if name in given and given[name] is entry:
                continue
            leaves, structure = tree_flatten(entry)
            for position, leaf in enumerate(leaves):
                if isinstance(leaf, torch.Tensor):
                    key = (index, (name, position))
                    self._opened.produced[key] = leaf
                    leaves[position] = _Produced(key)
            if not torch.is_grad_enabled():
                self._shared[identity][name] = tree_unflatten(leaves, structure)


@dataclass(frozen=True)
class _Produced:
    """The place of a produced value in a shared dictionary."""

    key: Key


class Recorder(TorchFunctionMode):
    """Notes what a model does with the outputs of its blocks before it calls the next one.

    Outputs are not there yet: what the model edits is scratch memory of their shape. A block's output may be edited on
    its way to the next block. Other uses are refused.
    """

    def __init__(self, name: str):
        super().__init__()
        self._name = name
        self.paused = False
        self._steps: list[tuple[Callable[..., Any], Any, Any, Any]] = []
        self._made: dict[int, torch.Tensor] = {}  # everything that depends on outputs of blocks
        self._outputs: list[int] = []  # identities of what stands for the outputs of the blocks so far

    def output(self, like: torch.Tensor) -> torch.Tensor:
        """Scratch memory in the place of what the next block will return."""
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

    def edit(self, block: int, hidden: torch.Tensor, calls: BlockCalls) -> _Edit | None:
        """How the input of ``block`` follows from the output of the one before it; None: it is that output.

        Raises:
            UserError: it follows from something else.
        """
        if not self._outputs:
            return None
        *earlier, source = self._outputs
        if id(hidden) == source and hidden._version == 0:  # as it was made: not edited in place either
            return None
        needed, chosen = {id(hidden)}, []
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

        def refer(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) in self._made:
                return _Reference(id(leaf))
            if leaf.is_floating_point():
                values.setdefault(id(leaf), calls.carry(leaf))
                return _Reference(id(leaf))
            return leaf

        steps = tuple(tree_map(refer, step) for step in reversed(chosen))
        return _Edit(steps, source, id(hidden), values)

    def check_arguments(self, block: int, args: Any, kwargs: Any) -> None:
        """See that no argument of ``block`` is computed from the outputs of blocks.

        Raises:
            UserError: one is.
        """
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and id(leaf) in self._made:
                raise self._refusal(f"computes an argument of block {block} from the outputs of blocks before it")

    def _refusal(self, what: str) -> UserError:
        return UserError(f"{self._name} cannot be split at its blocks: it {what}.")


def shared_dictionaries(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[MutableMapping[Any, Any]]:
    """The dictionaries among a block's arguments."""
    return [value for value in (*args, *kwargs.values()) if isinstance(value, MutableMapping)]


def paths(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """All leaves of a block's arguments, with their paths."""
    for path, leaf in tree_flatten_with_path((args, dict(kwargs)))[0]:
        yield "".join(str(part) for part in path), leaf


def _hidden_of(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result[0]
