"""Whether a block's backward pass needs the output of its experts: if not, recomputation leaves the experts out.

It is found out by running the block on the meta device: everything made from the experts' output is marked, and what
autograd saves is looked at.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fuyou.model.blocks.weightless import on_meta
from fuyou.model.streamed_model import StreamedModel
from fuyou.pieces.expert_adapters import AdaptedModule, ExpertAdapters
from fuyou.pieces.meta_block import cut_off_layer, learn, meta_call

Adapters = ExpertAdapters | AdaptedModule


def output_is_saved(stack: StreamedModel, layer: int, name: str, adapters: Sequence[Adapters] = ()) -> bool:
    """Return whether anything that depends on the output of the module ``name`` is saved for the backward pass.

    Raises:
        UserError: if the block does not run on the meta device.
    """
    question = ("saves", cut_off_layer(stack, layer, name))
    return learn(stack, layer, question, lambda: _saves(stack, layer, stack.model.get_submodule(name), adapters))


def _saves(stack: StreamedModel, layer: int, module: nn.Module, adapters: Sequence[Adapters]) -> bool:
    marks = _Marks()

    def forward(hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        result = torch.empty_like(hidden).requires_grad_()
        marks.mark(result)
        return result

    block = stack.blocks[layer]
    others = [other for other in block.modules() if other is not module and "_is_expert_parallel" in other.__dict__]
    with on_meta(block), torch.enable_grad(), ExitStack() as opened:
        for each in adapters:
            opened.enter_context(each.bound())
        for other in others:  # which their own way to compute may not do here
            other.forward = lambda hidden, *_, **__: hidden * 1.0  # type: ignore[method-assign]
        module.forward = forward  # type: ignore[method-assign]
        hidden, args, kwargs = meta_call(stack, layer)
        with torch.autograd.graph.saved_tensors_hooks(marks.see, lambda value: value), marks:
            result = block(hidden.detach().requires_grad_(), *args, **kwargs)
    return marks.seen or _has_custom_function(result)


class _Marks(TorchDispatchMode):
    """Marks what is made from marked tensors, and notices when autograd saves a marked one."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False
        self._marked: dict[int, torch.UntypedStorage] = {}  # kept, so that no other memory gets a marked one's identity

    def mark(self, value: torch.Tensor) -> None:
        storage = value.untyped_storage()
        self._marked[storage._cdata] = storage

    def see(self, value: torch.Tensor) -> torch.Tensor:
        self.seen |= self._has(value)
        return value

    def _has(self, value: torch.Tensor) -> bool:
        return value.untyped_storage()._cdata in self._marked

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(self._has(value) for value in given):
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, torch.Tensor):
                    self.mark(value)
            for value in tree_leaves(result):
                if isinstance(value, torch.Tensor):
                    self.mark(value)
        return result


def _has_custom_function(result: Any) -> bool:
    """Return whether a custom autograd function is behind a result: it may hold what nobody sees it save."""
    todo: list[Any] = [leaf.grad_fn for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                return True
            todo.extend(earlier for earlier, _ in node.next_functions)
    return False
