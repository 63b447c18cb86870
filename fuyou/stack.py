"""Any Hugging Face causal LM as three parts - embedding, blocks, head - without touching its code.

The model's own ``forward`` does all the work around the blocks. A stand-in takes the place of every block: it notes
what the block is called with (masks, position embeddings: they differ by layer in some families) and computes nothing.

* The *embedding* is a forward pass that ends at the last stand-in.
* A *block* is the real block, called with what its stand-in has noted.
* The *head* is a forward pass whose last stand-in hands out the blocks' true result. Modules before the blocks run on
  the meta device in it: their parameters need not be there, and what they return is never looked at.

So the head can run on any range of tokens, which bounds the memory of its logits.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from common.data.isolation import Documents
from common.errors import FinetuneError, UserError
from common.models.isolation import Separator, takes_positions
from common.models.structure import find_blocks
from fuyou.family import Family, family_of


class _Reached(Exception):
    """The forward pass has called every block: the embedding is done."""


@dataclass
class BlockCalls:
    """What the model called each block with, for one micro-batch, beside the hidden states."""

    arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    first_hidden: torch.Tensor | None = None
    """The first block's input, until the embedding hands it out."""
    documents: Documents | None = None
    """Those that share the rows; None: every row is one."""


class _StandIn(nn.Module):
    """Takes a block's place in the model's list. Other attributes are those of the block."""

    def __init__(self, stack: "StreamedModel", index: int, block: nn.Module):
        super().__init__()
        self.__dict__.update(_stack=stack, _index=index, _block=block)  # not as submodules

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_block"], name)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_stack"]._called(self.__dict__["_index"], hidden_states, args, kwargs)


class StreamedModel:
    """A model on the meta device whose parts run one at a time on parameters that are brought in.

    Args:
        model: parameters on the meta device in the compute dtype, buffers real.
        device: where the parts compute.

    Raises:
        UserError: the model is no stack of blocks.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device):
        self.model = model
        self.device = device
        self.block_prefix, self._list = find_blocks(model)
        self.blocks: list[nn.Module] = list(self._list)
        #: Size of the hidden states that blocks take and give.
        self.hidden_size: int = model.config.get_text_config().hidden_size
        self._stand_ins = [_StandIn(self, index, block) for index, block in enumerate(self.blocks)]
        self._owners: dict[str, tuple[nn.Module, str, nn.Parameter]] = {}  # parameter name -> module, attribute, meta
        for prefix, module in model.named_modules():
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self._owners[f"{prefix}.{name}" if prefix else name] = (module, name, parameter)
        self._calls: BlockCalls | None = None
        self._stack_output: torch.Tensor | None = None
        self._returns_tuple = False
        #: Modules that run before the blocks and use parameters; see :meth:`_survey`.
        self.before: frozenset[nn.Module] = frozenset()
        self._takes_positions = takes_positions(model)
        self._survey()

    # -- which parameters belong where ----------------------------------------------------------------------------

    def _survey(self) -> None:
        """Run what comes before the blocks without its parameters, to see what that is."""
        inside = {module for block in self.blocks for module in block.modules()}
        self._runners = _runners(self.model, {owner for owner, _, _ in self._owners.values()} - inside)
        outside = set(self._runners.values())
        called: list[nn.Module] = []
        hooks = [module.register_forward_pre_hook(lambda module, _: called.append(module)) for module in outside]
        ids = torch.zeros(1, 8, dtype=torch.long, device=self.device)
        try:
            with self._skipped(outside):
                self.embed({"input_ids": ids})
        except FinetuneError:
            raise
        except Exception as error:
            raise UserError(
                f"{type(self.model).__name__} cannot be split at its blocks: running what comes before them failed "
                f"({type(error).__name__}: {error})."
            ) from error
        finally:
            for hook in hooks:
                hook.remove()
        self.before = frozenset(called)

    def runs_before_blocks(self, name: str) -> bool:
        """Whether the parameter ``name`` belongs to a module that runs before the blocks."""
        return self._runners.get(self._owners[name][0]) in self.before

    def dtype_of(self, name: str) -> torch.dtype:
        """What the model computes with in the place of the parameter ``name``."""
        return self._owners[name][2].dtype

    @property
    def family(self) -> Family:
        """What was tried out on a small model of the same configuration."""
        return family_of(self.model)

    @cached_property
    def _separator(self) -> Separator:
        isolation = self.family.isolation
        assert isolation is not None, "rows of several documents are refused before"
        return Separator(self.model, isolation)

    def _apart(self, documents: Documents | None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if documents is None else self._separator.apart(documents)

    @contextmanager
    def bound(self, parameters: Mapping[str, torch.Tensor], *, before: bool | None = None) -> Iterator[None]:
        """Let the model use ``parameters`` (by name) while the context is open, and meta parameters after it.

        ``before`` restricts that to modules that run before the blocks (True) or to the others (False).
        """
        names = [name for name in parameters if before is None or self.runs_before_blocks(name) is before]
        try:
            for name in names:
                module, attribute, _ = self._owners[name]
                module._parameters[attribute] = parameters[name]  # type: ignore[assignment]
            yield
        finally:
            for name in names:
                module, attribute, meta = self._owners[name]
                module._parameters[attribute] = meta

    # -- the three parts ------------------------------------------------------------------------------------------

    def embed(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, BlockCalls]:
        """Run what comes before the blocks.

        Args:
            batch: ``input_ids`` int64 ``[B, S]`` and, if any, ``position_ids`` and ``attention_mask``. Without a mask,
                documents at which positions restart are kept apart.

        Returns:
            The first block's input ``[B, S, H]``, and what each block is called with.
        """
        positions = None if "attention_mask" in batch else batch.get("position_ids")
        self._calls = calls = BlockCalls(documents=Documents.of(positions))
        known = {name: value for name, value in batch.items() if name != "position_ids" or self._takes_positions}
        try:
            with contextlib.suppress(_Reached), self._stood_in(), self._apart(calls.documents):
                self.model(**known, use_cache=False)
        finally:
            self._calls = None
        hidden, calls.first_hidden = calls.first_hidden, None
        if hidden is None or len(calls.arguments) != len(self.blocks):
            raise FinetuneError(
                f"{type(self.model).__name__} called {len(calls.arguments)} of its {len(self.blocks)} blocks; it "
                "cannot be streamed."
            )
        return hidden, calls

    def block(self, index: int, hidden: torch.Tensor, calls: BlockCalls) -> torch.Tensor:
        """Run block ``index`` on ``hidden`` ``[B, S, H]``; same shape comes out."""
        args, kwargs = calls.arguments[index]
        with self._apart(calls.documents):
            result = self.blocks[index](hidden, *args, **kwargs)
        self._returns_tuple = not isinstance(result, torch.Tensor)
        return result[0] if self._returns_tuple else result

    def head(self, batch: Mapping[str, torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        """Run what comes after the blocks: logits ``[B, S, V]`` from the last block's output ``[B, S, H]``.

        Positions are of no use to it, and would make it build masks that nobody looks at.
        """
        batch = {name: value for name, value in batch.items() if name != "position_ids"}
        self._stack_output = hidden
        try:
            with self._stood_in(), self._skipped(self.before):
                return self.model(**batch, use_cache=False).logits
        finally:
            self._stack_output = None

    # -- how -------------------------------------------------------------------------------------------------------

    def _called(self, index: int, hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        last = index == len(self.blocks) - 1
        if self._calls is not None:
            if self._calls.first_hidden is None:
                self._calls.first_hidden = hidden
            self._calls.arguments.append((args, kwargs))
            if last:
                raise _Reached
            return self._calls.first_hidden
        result = self._stack_output if last else hidden
        return (result,) if self._returns_tuple else result

    @contextmanager
    def _stood_in(self) -> Iterator[None]:
        for index, stand_in in enumerate(self._stand_ins):
            self._list._modules[str(index)] = stand_in
        try:
            yield
        finally:
            for index, block in enumerate(self.blocks):
                self._list._modules[str(index)] = block

    @contextmanager
    def _skipped(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Let ``modules`` run on the meta device, with their meta parameters, and return zeros."""
        replaced = list(modules)
        for module in replaced:
            module.forward = self._on_meta(module)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for module in replaced:
                del module.forward

    def _on_meta(self, module: nn.Module) -> Any:
        forward = module.forward

        def to_meta(value: Any) -> Any:
            return value.to("meta") if isinstance(value, torch.Tensor) else value

        def to_device(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return torch.zeros(value.shape, dtype=value.dtype, device=self.device)
            return value

        def run(*args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                return tree_map(to_device, forward(*tree_map(to_meta, args), **tree_map(to_meta, kwargs)))

        return run


def _runners(model: nn.Module, owners: set[nn.Module]) -> dict[nn.Module, nn.Module]:
    """For each of ``owners`` of parameters, the module that is called to use them: itself, or, of a mere collection of
    parameters, what holds it, together with all that stands in there."""
    parents = {child: parent for parent in model.modules() for child in parent.children()}
    holders = {parents[owner] for owner in owners if isinstance(owner, nn.ParameterDict | nn.ParameterList)}
    found = {}
    for owner in owners:
        found[owner] = module = owner
        while module in parents:
            module = parents[module]
            if module in holders:
                found[owner] = module
    return found

