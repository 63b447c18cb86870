"""Stand-ins for a model's blocks: they record what the model calls its blocks with, and compute nothing."""

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_unflatten

from common.data.documents import Documents
from common.errors import UserError
from common.randomness import random_states, set_random_states
from fuyou.model.blocks.calls import BlockCalls
from fuyou.model.blocks.hidden_edits import BlockLinks, HiddenEditRecorder
from fuyou.model.blocks.probe import TENSOR, BlockProbe


class _AllBlocksCalled(Exception):
    """Ends a forward pass that has called every block."""


class _StandIn(nn.Module):
    """Takes a block's place in the model's list. Other attributes are those of the block."""

    def __init__(self, stand_ins: "BlockStandIns", index: int, block: nn.Module):
        super().__init__()
        self.__dict__.update(_stand_ins=stand_ins, _index=index, _block=block)  # not as submodules

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_block"], name)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_stand_ins"]._call(self.__dict__["_index"], hidden_states, args, kwargs)


class BlockStandIns:
    """Takes the places of all blocks while the model's own forward pass runs around them.

    In :meth:`recording`, the pass ends at the last block, and the blocks' calls are recorded. In :meth:`handing_out`,
    the last block returns a given value, and the pass continues to the head.
    """

    def __init__(self, name: str, modules: nn.ModuleList):
        self.blocks: list[nn.Module] = list(modules)
        self._name = name
        self._modules = modules
        self._stand_ins = [_StandIn(self, index, block) for index, block in enumerate(self.blocks)]
        self._calls: BlockCalls | None = None
        self._recorder = HiddenEditRecorder(name)
        self._recording = ExitStack()
        self._output: torch.Tensor | None = None
        self._random: tuple[torch.Tensor, ...] = ()
        self._probe: BlockProbe | None = None
        self._returns: dict[type[nn.Module], tuple[TreeSpec, list[Any]]] = {}

    @property
    def has_called_block(self) -> bool:
        """Whether a block has been called in the pass that is being recorded."""
        return self._calls is not None and bool(self._calls.arguments)

    @contextmanager
    def recording(self, links: BlockLinks, documents: Documents | None) -> Iterator[BlockCalls]:
        """Record what blocks are called with in a forward pass, which ends when it has called the last one."""
        self._calls = calls = BlockCalls(links, documents=documents)
        self._recorder = HiddenEditRecorder(self._name)
        try:
            with contextlib.suppress(_AllBlocksCalled), self._recording, self._in_place():
                yield calls
        finally:
            self._calls = None
        if calls.first_hidden is None or len(calls.arguments) != len(self.blocks):
            raise UserError(
                f"{self._name} called {len(calls.arguments)} of its {len(self.blocks)} blocks; it cannot be streamed."
            )

    @contextmanager
    def handing_out(self, output: torch.Tensor) -> Iterator[None]:
        """Let the last block return ``output`` while the context is open, and others their input.

        What the model draws before its blocks, as for dropout of embeddings, was drawn before them in the step: what
        comes after them draws the numbers that are next.
        """
        self._output = output
        self._random = random_states(output.device)
        try:
            with self._in_place():
                yield
        finally:
            self._output = None

    @contextmanager
    def probing(self, *, all_blocks: bool) -> Iterator[BlockProbe]:
        """Run blocks without their weights, too, when they are called: all of them, or one of each type."""
        self._probe = BlockProbe(self._returns, all_blocks)
        try:
            yield self._probe
        finally:
            self._probe = None

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        for index, stand_in in enumerate(self._stand_ins):
            self._modules._modules[str(index)] = stand_in
        try:
            yield
        finally:
            for index, block in enumerate(self.blocks):
                self._modules._modules[str(index)] = block

    def _call(self, index: int, hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        last = index == len(self.blocks) - 1
        calls = self._calls
        recorder = self._recorder
        if calls is None:
            if not last:
                return self._result(index, hidden)
            assert self._output is not None
            set_random_states(self._random, self._output.device)
            return self._result(index, self._output)
        if index != len(calls.arguments):
            raise UserError(
                f"{self._name} calls block {index} where block {len(calls.arguments)} is next; it cannot be streamed."
            )
        if calls.first_hidden is None:
            calls.first_hidden = hidden
            calls.hidden_shape = tuple(hidden.shape)
            self._recording.enter_context(recorder)
        recorder.paused = True
        recorder.check_arguments(index, args, kwargs)
        calls.add(args, kwargs, recorder.edit(index, hidden, calls.carry))
        if self._probe is not None:
            self._probe.run(index, self.blocks[index], calls.first_hidden, calls)
        if last:
            raise _AllBlocksCalled
        result = self._result(index, recorder.output(calls.first_hidden))
        recorder.paused = False
        return result

    def _result(self, index: int, hidden: Any) -> Any:
        """Return what block ``index`` would: ``hidden``, and placeholders for tensors next to it."""
        structure, leaves = self._returns[type(self.blocks[index])]
        values = [hidden, *leaves[1:]]
        for position, leaf in enumerate(leaves):
            if position and leaf is TENSOR:
                calls = self._calls
                values[position] = (
                    calls.placeholder((index, position)) if calls is not None else torch.empty(0)
                )
        return tree_unflatten(values, structure)
