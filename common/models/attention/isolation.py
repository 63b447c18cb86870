"""Keep the documents of packed rows apart, in a way that is found by experiment for each family.

Two things mix the tokens of a row. *Attention* that goes through transformers' interface is cut at documents there
(:mod:`common.models.attention.documents`); where a family has its own, it may look at position ids that restart and
make a mask. *Other modules* (recurrent layers, short convolutions, attention of a family's own that heeds no positions)
are called once for each document, with that document's part of every argument.

Which of them a family needs is tried out on a small model: each document must get the logits that it gets alone, and
other tokens in one document must not change the logits of the others. A family for which no way holds is not packed.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map
from transformers import PreTrainedConfig, PreTrainedModel

from common.data.documents import Documents, current_documents, separate_documents
from common.models.attention.documents import BY_DOCUMENT, rotate_by_document
from common.models.structure import find_blocks

# Lengths of the documents of five rows, longer than the windows of a small model. The number of rows and their length
# are no other size in it, such as its number of heads: so shapes tell which dimensions are rows and tokens.
_LENGTHS = ((9, 17, 11), (16, 10, 11), (20, 17), (8, 8, 21), (11, 26))
_ROUNDING = 1e-3  # Difference between documents, relative to that without isolation, that is rounding
_VISIBLE = 1e-3  # Smallest change of the logits, without isolation, for a valid experiment


@dataclass(frozen=True)
class Isolation:
    """A way to keep documents apart."""

    attention_by_document: bool  # Whether transformers' attention interface is cut at documents
    modules: tuple[str, ...] = ()  # Names of the classes of modules that are called once for each document

    def called_for_each(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """Return those of a model's modules that are called once for each document, with their names."""
        return [
            (name, module)
            for name, module in model.named_modules()
            # FSDP2 makes its own subclasses
            if any(_name(kind) in self.modules for kind in type(module).__mro__)
        ]


class DocumentSeparator:
    """Keeps documents apart in a model.

    Args:
        model: a model of the family that ``isolation`` was found for; on any device. Its modules are wrapped, which
            changes nothing outside of :meth:`apart`.
        isolation: the way in which documents are kept apart.
    """

    def __init__(self, model: nn.Module, isolation: Isolation):
        interfaced = [config for config in configurations(model) if config._attn_implementation == "sdpa"]
        self._configs = interfaced if isolation.attention_by_document else []
        self._open = 0
        self._wrapped = [module for _, module in isolation.called_for_each(model)]
        for module in self._wrapped:
            module.forward = _once_for_each(module.forward)  # type: ignore[method-assign]

    @contextmanager
    def apart(self, documents: Documents | None) -> Iterator[None]:
        """Keep ``documents`` apart in what the model computes while the context is open; None if there are none.

        Computations that take turns may have contexts open that do not nest: the last one to close ends it.
        """
        if documents is None:
            yield
            return
        self._open += 1
        try:
            self._attend(BY_DOCUMENT)
            with separate_documents(documents):
                yield
        finally:
            self._open -= 1
            if not self._open:
                self._attend("sdpa")

    def _attend(self, implementation: str) -> None:
        for config in self._configs:
            config._attn_implementation = implementation

    def remove(self) -> None:
        """Leave the model as it was."""
        for module in self._wrapped:
            del module.forward
        self._wrapped = []


@contextmanager
def without_masks(configs: Sequence[PreTrainedConfig]) -> Iterator[None]:
    """Let a model with these configurations make no masks while the context is open: for passes without attention.

    To see whether positions restart, transformers waits for the device, and a mask has a byte for each pair of tokens.
    """
    changed = [(config, config._attn_implementation) for config in configs]
    try:
        for config, before in changed:
            if before in ("sdpa", "eager"):
                config._attn_implementation = BY_DOCUMENT
        yield
    finally:
        for config, before in changed:
            config._attn_implementation = before


def takes_positions(model: nn.Module) -> bool:
    """Return whether the model takes the tokens' positions: some families derive them from the order alone."""
    return "position_ids" in inspect.signature(model.forward).parameters


def configurations(model: nn.Module) -> list[PreTrainedConfig]:
    """Return the configurations that modules of a model read, each once."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    return list({id(config): config for config in configs if isinstance(config, PreTrainedConfig)}.values())


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _once_for_each(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        documents = current_documents()
        if documents is None:
            return forward(*args, **kwargs)
        results = []
        for span in documents.spans():
            part = functools.partial(_part, documents, span)
            results.append(forward(*tree_map(part, args), **tree_map(part, kwargs)))
        return _joined(documents, results)

    return run


def _part(documents: Documents, span: tuple[int, int, int], value: Any) -> Any:
    """Return a module's argument for the document of this row, first token, and end, by its shape: rows, then tokens;
    of four dimensions the last two may be tokens."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    (row, *tokens), length, first = span, documents.length, value.shape[0]
    inside = slice(*tokens)
    if first == length and value.dim() < 3:
        return value[inside]
    if first != 1:
        each, rest = divmod(first, documents.rows)  # one of each row, or one of each of its heads
        if rest:
            raise NotImplementedError(f"An argument of shape {list(value.shape)}, in which no rows are.")
        value = value[row * each : (row + 1) * each]
    if value.dim() >= 4 and value.shape[-1] == value.shape[-2] == length:
        return value[..., inside, inside]
    for axis in range(1, value.dim()):
        if value.shape[axis] == length:
            return value[(slice(None),) * axis + (inside,)]
    return value


def _joined(documents: Documents, results: list[Any]) -> Any:
    """Join the results of all documents: states ``[1, tokens, H]`` become ``[B, S, H]``, all else becomes None."""
    lengths = [end - start for _, start, end in documents.spans()]
    structure = tree_flatten(results[0])[1]
    joined: list[Any] = []
    for leaves in zip(*(tree_leaves(result) for result in results), strict=True):
        if all(_is_hidden(leaf, (1, length)) for leaf, length in zip(leaves, lengths, strict=True)):
            whole = torch.cat(leaves, 1)  # documents come row by row
            joined.append(whole.view(documents.rows, documents.length, -1))
        else:
            joined.append(None)
    return structure.unflatten(joined)


@contextmanager
def _calls(modules: Iterable[nn.Module]) -> Iterator[dict[nn.Module, tuple[Any, Any]]]:
    """Record the arguments of the first call of each of ``modules`` while the context is open."""
    calls: dict[nn.Module, tuple[Any, Any]] = {}

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        calls.setdefault(module, (args, kwargs))

    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in modules]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


class _Experiment:
    """Packed rows of random tokens, and what a model makes of them."""

    def __init__(self, model: PreTrainedModel):
        self._model = model
        rotate_by_document(model)
        device = next(model.parameters()).device
        positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in _LENGTHS])
        documents = Documents.of(positions)
        assert documents is not None
        self._documents = documents
        self._positions = {"position_ids": positions.to(device)} if takes_positions(model) else {}
        # Whether a token is behind the first document of its row, bool `[B, S]`.
        self._later = (torch.arange(documents.length) >= torch.tensor([[row[0]] for row in _LENGTHS])).to(
            device
        )
        vocabulary = model.config.get_text_config().vocab_size
        generator = torch.Generator().manual_seed(7)
        tokens = min(5, vocabulary // 2), vocabulary, positions.shape
        self._ids, other = (torch.randint(*tokens, generator=generator).to(device) for _ in range(2))
        # Differ from them in the first documents only
        self._changed = torch.where(self._later, self._ids, other)

    def mixing(self, by_document: bool) -> tuple[str, ...]:
        """Return the names of the outermost classes inside blocks that mix documents."""
        _, blocks = find_blocks(self._model)
        names: set[str] = set()
        with self._apart(Isolation(by_document)):
            with _calls(blocks.modules()) as calls:
                self._packed(self._ids)
            for block in blocks:
                mixing = [module for module in _called(block, calls) if self._mixes(module, *calls[module])]
                if not mixing and block in calls and self._mixes(block, *calls[block]):
                    mixing = [block]
                names |= {_name(type(module)) for module in mixing}
        return tuple(sorted(names))

    def holds(self, how: Isolation) -> bool:
        """Return whether each document gets the logits that it gets alone, and none depends on tokens of others."""
        mixed = self._as_one(self._ids)
        seen = self._moved(mixed, self._as_one(self._changed))
        if not seen > _VISIBLE * float(mixed.abs().max()):
            return False  # nothing could be told apart
        with self._apart(how):
            packed, changed = (self._packed(ids) for ids in (self._ids, self._changed))
        alone = [
            self._as_one(self._ids[row : row + 1, start:end]) for row, start, end in self._documents.spans()
        ]
        away = float((packed - torch.cat(alone, 1).view_as(packed)).abs().max())
        return max(away, self._moved(packed, changed)) <= _ROUNDING * seen and self._equal_arguments(how)

    @contextmanager
    def _apart(self, how: Isolation) -> Iterator[None]:
        separator = DocumentSeparator(self._model, how)
        try:
            with separator.apart(self._documents):
                yield
        finally:
            separator.remove()

    def _packed(self, ids: torch.Tensor) -> torch.Tensor:
        return self._model(input_ids=ids, **self._positions, use_cache=False).logits

    def _as_one(self, ids: torch.Tensor) -> torch.Tensor:
        return self._model(input_ids=ids, use_cache=False).logits

    def _moved(self, first: torch.Tensor, second: torch.Tensor) -> float:
        """Return the largest difference between two results ``[B, S, ..]``, outside the first documents."""
        return float((first - second)[self._later].abs().max())

    def _mixes(self, module: nn.Module, args: Any, kwargs: Any) -> bool:
        """Return whether other hidden states in the first documents change the results of ``module`` for the others."""
        leaves, spec = tree_flatten((args, kwargs))
        shape = self._ids.shape
        hidden = next((leaf for leaf in leaves if _is_hidden(leaf, shape)), None)
        if hidden is None:
            return False
        noise = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(9)).to(hidden)
        results = []
        for value in (hidden, torch.where(self._later[..., None], hidden, noise)):
            again, named = spec.unflatten([value if leaf is hidden else leaf for leaf in leaves])
            results.append([leaf for leaf in tree_leaves(module(*again, **named)) if _is_hidden(leaf, shape)])
        pairs = zip(*results, strict=True)
        return any(self._moved(first, second) > 1e-4 * float(first.abs().max()) for first, second in pairs)

    def _equal_arguments(self, how: Isolation) -> bool:
        """Return whether modules that are called once for each document get the arguments that they get for it alone.

        Biases by the place in the row (ALiBi) are not equal: they differ by a constant, which matters only to rounding,
        but in bf16 that loses the differences between neighbours far from the row's beginning.
        """
        modules = [module for _, module in how.called_for_each(self._model)]
        row, start, end = span = list(self._documents.spans())[2]
        part = functools.partial(_part, self._documents, span)
        with self._apart(how), _calls(modules) as packed:
            self._packed(self._ids)
        with _calls(modules) as single:
            self._as_one(self._ids[row : row + 1, start:end])
        arguments = [
            (tree_leaves(tree_map(part, packed[module])), tree_leaves(single[module])) for module in packed
        ]
        return all(
            torch.allclose(here.expand_as(there), there, rtol=1e-3, atol=1e-3)
            for pair in arguments
            for here, there in zip(*pair, strict=True)
            if isinstance(here, torch.Tensor) and isinstance(there, torch.Tensor) and here.is_floating_point()
        )


def _called(module: nn.Module, calls: Mapping[nn.Module, Any]) -> Iterator[nn.Module]:
    """Yield the outermost modules inside ``module`` that were called; others are mere collections."""
    for child in module.children():
        if child in calls:
            yield child
        else:
            yield from _called(child, calls)


def _is_hidden(value: Any, shape: tuple[int, ...]) -> bool:
    """Return whether these are states of tokens, ``[B, S, H]``, where ``shape`` is ``[B, S]``."""
    is_states = isinstance(value, torch.Tensor) and value.dim() == 3 and value.is_floating_point()
    return is_states and value.shape[:2] == shape


def find_isolation(model: PreTrainedModel) -> Isolation | None:
    """Find the best way to keep documents apart in the family of a small model with values; None if no way holds."""
    interface = any(config._attn_implementation == "sdpa" for config in configurations(model))
    was_training = model.training
    model.eval()
    try:
        for by_document in (True, False) if interface else (False,):
            with suppress(Exception), torch.no_grad():
                # A family's own code may do anything with the unexpected
                experiment = _Experiment(model)
                how = Isolation(by_document, experiment.mixing(by_document))
                if experiment.holds(how):
                    return how
        return None
    finally:
        model.train(was_training)
