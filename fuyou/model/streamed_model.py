"""Any Hugging Face causal LM as three parts - embedding, blocks, head - without touching its code.

The model's own ``forward`` does all the work around the blocks. A stand-in takes the place of every block: it notes
what the block is called with (masks, position embeddings: they differ by layer in some families) and computes nothing.

* The *embedding* is a forward pass that ends at the last stand-in.
* A *block* is the real block, called with what its stand-in has noted.
* The *head* is a forward pass whose last stand-in hands out the blocks' true result. Modules before the blocks run on
  the meta device in it: their parameters need not be there, and what they return is never looked at.

So the head can run on any range of tokens, which bounds the memory of its logits. What else than hidden states links
blocks is found out when the model is split, by a survey: a run of the embedding without weights, in which one block of
each kind runs on the meta device (:mod:`fuyou.model.block_calls`).
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_leaves, tree_map, tree_unflatten
from transformers import PreTrainedModel

from common.data.documents import Documents
from common.errors import FinetuneError, UserError
from common.models.attention.isolation import DocumentSeparator, takes_positions
from common.models.structure import find_blocks
from common.models.vision.towers import tower_parameters
from fuyou.model.block_calls import BlockCalls, BlockLinks, Recorder, paths
from fuyou.model.block_probe import TENSOR, BlockProbe, hollow, unchanged
from fuyou.model.family import Family, family_of
from fuyou.model.look_back import LookBack, UsedTensors

#: Tokens of the row that a survey runs.
_SURVEYED = 8


class _Reached(Exception):
    """The forward pass has called every block: the embedding is done."""


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
        self._name = type(model).__name__
        self.block_prefix, self._list = find_blocks(model)
        self.blocks: list[nn.Module] = list(self._list)
        self._stand_ins = [_StandIn(self, index, block) for index, block in enumerate(self.blocks)]
        self._owners: dict[str, tuple[nn.Module, str, nn.Parameter]] = {}  # parameter name -> module, attribute, meta
        for prefix, module in model.named_modules():
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self._owners[f"{prefix}.{name}" if prefix else name] = (module, name, parameter)
        self._calls: BlockCalls | None = None  # while the embedding runs
        self._recorder = Recorder(self._name)
        self._recording = ExitStack()
        self._probe: BlockProbe | None = None
        self._stack_output: torch.Tensor | None = None
        self._look_back: LookBack | None = None
        self._between: list[nn.Module] = []  # what a survey sees run after the first block
        self._returns: dict[type[nn.Module], tuple[TreeSpec, list[Any]]] = {}
        self._carried_bytes: dict[int, int] = {}
        #: What links blocks beside hidden states.
        self.links = BlockLinks()
        #: Modules that run before the blocks and use parameters; see :meth:`_survey`.
        self.before: frozenset[nn.Module] = frozenset()
        #: Elements of the hidden states, per token.
        self.hidden_size = 0
        #: Which dimension of the hidden states counts tokens.
        self.token_dim = 1
        self._takes_positions = takes_positions(model)
        self._survey()

    # -- which parameters belong where ----------------------------------------------------------------------------

    def _survey(self) -> None:
        """Run what comes before the blocks without its parameters, to see what that is, and what links the blocks."""
        inside = {module for block in self.blocks for module in block.modules()}
        self._towers = frozenset(tower_parameters(self.model))
        owners = {owner for owner, _, _ in self._owners.values()} - inside
        #: Modules outside the blocks that have parameters of their own.
        self._outer = owners
        holders = {owner for owner in owners if any(module in inside for module in owner.modules())}
        self._runners = _runners(self.model, owners - holders)
        outside = set(self._runners.values())
        called: list[nn.Module] = []

        def note(module: nn.Module, _: Any) -> None:
            (self._between if self._calls is not None and self._calls.arguments else called).append(module)

        hooks = [module.register_forward_pre_hook(note) for module in outside]
        ids = torch.zeros(1, _SURVEYED, dtype=torch.long, device=self.device)
        try:
            with unchanged(self.model), self._skipped(outside), self._hollow_outside(), torch.enable_grad():
                self._probe = BlockProbe(self._returns)
                direct = {id(value): (owner, name) for owner in owners for name, value in owner._parameters.items()}
                with UsedTensors(direct) as used:
                    hidden, calls = self._embed({"input_ids": ids}, BlockLinks())
                self.before = frozenset(called)
                self._read_before = {direct[identity] for identity in used.found}
                self._find_links(calls, self._probe)
                self._measure_hidden(hidden, self._probe.dtypes)
                self._check_head(hidden)
        except FinetuneError:
            raise
        except Exception as error:
            raise UserError(
                f"{self._name} cannot be split at its blocks: running what comes before them failed "
                f"({type(error).__name__}: {error})."
            ) from error
        finally:
            self._probe = None
            self._between.clear()
            for hook in hooks:
                hook.remove()

    def _find_links(self, calls: BlockCalls, probe: BlockProbe) -> None:
        carried, consumed = set(), set()
        for block, (args, kwargs) in enumerate(calls.arguments):
            for path, leaf in paths(args, kwargs):
                if isinstance(leaf, torch.Tensor):
                    key = calls.key_of(leaf)
                    if key is not None:
                        consumed.add(key)
                    elif leaf.requires_grad:
                        carried.add((block, path))
        self.links = BlockLinks(frozenset(carried), frozenset(consumed), bool(probe.left))

    def _measure_hidden(self, hidden: torch.Tensor, returned: set[torch.dtype]) -> None:
        """See that blocks take and return the model's dtype, and find the dimension that counts tokens: the one that is
        shorter where there are fewer of them."""
        _, fewer = self._embed(
            {"input_ids": torch.zeros(1, _SURVEYED - 1, dtype=torch.long, device=self.device)}, BlockLinks()
        )
        changed = [dim for dim, size in enumerate(hidden.shape) if size != fewer.hidden_shape[dim]]
        others = {hidden.dtype, *returned} - {self.model.dtype}
        if others:
            found, weights = (str(dtype).removeprefix("torch.") for dtype in (others.pop(), self.model.dtype))
            raise UserError(
                f"{self._name} carries hidden states in {found} from block to block where its weights are {weights}: "
                "train it with --dtype fp32."
            )
        if len(changed) != 1 or hidden.shape[changed[0]] != _SURVEYED:
            raise UserError(
                f"{self._name} cannot be split at its blocks: hidden states of {_SURVEYED} tokens have the "
                f"shape {tuple(hidden.shape)}, in which no dimension counts them."
            )
        self.token_dim, self.hidden_size = changed[0], hidden.numel() // _SURVEYED

    def _check_head(self, hidden: torch.Tensor) -> None:
        """See that what comes after the blocks uses nothing from before but the last block's output."""
        ids = torch.zeros(1, _SURVEYED, dtype=torch.long, device=self.device)
        with LookBack() as self._look_back, self._handed_out(torch.zeros_like(hidden)):
            self.model(input_ids=ids, use_cache=False)
        looked_back, self._look_back = self._look_back.found, None
        if looked_back:
            raise UserError(
                f"{self._name} cannot be split at its blocks: after the last one it uses again what was "
                "computed before."
            )

    def carried_bytes(self, seq_len: int) -> int:
        """What a row of ``seq_len`` tokens keeps on the device from the forward to the backward pass because it links
        blocks (:attr:`links`), gradients included."""
        if not self.links:
            return 0
        if seq_len not in self._carried_bytes:
            with self._probed() as probe:
                _, calls = self.embed_hollow(torch.zeros(1, seq_len, dtype=torch.long, device=self.device))
            kept = {id(value): value for value in calls.carried()}
            made = [probe.values[key] for key in self.links.consumed if key in probe.values] + probe.left
            kept.update({id(value): value for value in made})
            self._carried_bytes[seq_len] = sum(
                value.numel() * value.itemsize * (2 if value.is_floating_point() else 1) for value in kept.values()
            )
        return self._carried_bytes[seq_len]

    def runs_before_blocks(self, name: str) -> bool:
        """Whether the parameter ``name`` belongs to a module that runs before the blocks, as towers do."""
        owner, attribute, _ = self._owners[name]
        before = self._runners.get(owner) in self.before or (owner, attribute) in self._read_before
        return before or name in self._towers

    def dtype_of(self, name: str) -> torch.dtype:
        """What the model computes with in the place of the parameter ``name``."""
        return self._owners[name][2].dtype

    @cached_property
    def family(self) -> Family:
        """What was tried out on a small model of the same configuration."""
        return family_of(self.model)

    @cached_property
    def _separator(self) -> DocumentSeparator:
        self.family.check_documents(masked=False)
        assert self.family.isolation is not None
        return DocumentSeparator(self.model, self.family.isolation)

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
        return self._embed(batch, self.links)

    @torch.no_grad()
    def embed_hollow(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, BlockCalls]:
        """The same without parameters: everything has the right shape, and nothing a meaning."""
        with self._skipped(self.before), self._hollow_outside():
            return self._embed({"input_ids": input_ids}, self.links)

    def embed_alone(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, BlockCalls]:
        """The same as :meth:`embed`, for blocks that are run by themselves: what others hand them is zero."""
        if not self.links:
            return self.embed(batch)
        with self._probed() as probe:
            hidden, calls = self.embed(batch)
        calls.supply(probe.values, self.device)
        return hidden, calls

    def _embed(self, batch: Mapping[str, torch.Tensor], links: BlockLinks) -> tuple[torch.Tensor, BlockCalls]:
        documents = None if "attention_mask" in batch else Documents.of(batch.get("position_ids"))
        known = {name: value for name, value in batch.items() if name != "position_ids" or self._takes_positions}
        self._calls = calls = BlockCalls(links, documents=documents)
        self._recorder = Recorder(self._name)
        try:
            with contextlib.suppress(_Reached), self._recording, self._apart(documents), self._stood_in():
                self.model(**known, use_cache=False)
        finally:
            self._calls = None
        hidden, calls.first_hidden = calls.first_hidden, None
        if hidden is None or len(calls.arguments) != len(self.blocks):
            raise UserError(
                f"{self._name} called {len(calls.arguments)} of its {len(self.blocks)} blocks; it cannot be streamed."
            )
        return hidden, calls

    def block(self, index: int, hidden: torch.Tensor, calls: BlockCalls) -> torch.Tensor:
        """Run block ``index`` on the output of the block before it; same shape comes out.

        With gradients enabled, ``calls.backward`` is the way back.
        """
        with self._apart(calls.documents):
            return calls.run(index, self.blocks[index], hidden)

    def head(self, batch: Mapping[str, torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        """Run what comes after the blocks: logits ``[B, S, V]`` from the last block's output.

        Positions are of no use to it, and would make it build masks that nobody looks at.
        """
        batch = {name: value for name, value in batch.items() if name != "position_ids"}
        with self._handed_out(hidden), self._skipped(self.before), self._replaced(self._hollow(self._read_before)):
            return self.model(**batch, use_cache=False).logits

    @torch.no_grad()
    def dry_run(self, batch: Mapping[str, torch.Tensor]) -> Any:
        """Return what the model returns for ``batch`` where its blocks do nothing and its weights are not there: it
        does what it always does, and what comes out means nothing."""
        hidden, _ = self.embed_hollow(batch["input_ids"])
        outside = set(self._runners.values())
        with self._skipped(outside), self._hollow_outside(), self._handed_out(torch.zeros_like(hidden)):
            return self.model(**batch, use_cache=False)

    # -- how -------------------------------------------------------------------------------------------------------

    def _called(self, index: int, hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        last = index == len(self.blocks) - 1
        calls, recorder = self._calls, self._recorder
        if calls is None:
            if self._look_back is not None:
                hidden = self._look_back.reach(hidden, last)
            return self._returned(index, self._stack_output if last else hidden)
        if index != len(calls.arguments):
            raise UserError(
                f"{self._name} calls block {index} where block {len(calls.arguments)} is next; it cannot be streamed."
            )
        if self._between:
            raise UserError(
                f"{self._name} cannot be split at its blocks: it computes with parameters outside of them "
                f"({type(self._between[0]).__name__}) between one block and the next."
            )
        if calls.first_hidden is None:
            calls.first_hidden, calls.hidden_shape = hidden, tuple(hidden.shape)
            self._recording.enter_context(recorder)
        recorder.paused = True
        recorder.check_arguments(index, args, kwargs)
        calls.add(args, kwargs, recorder.edit(index, hidden, calls))
        if self._probe is not None:
            self._probe.look(index, self.blocks[index], calls.first_hidden, calls)
        if last:
            raise _Reached
        result = self._returned(index, recorder.output(calls.first_hidden))
        recorder.paused = False
        return result

    def _returned(self, index: int, hidden: Any) -> Any:
        """What block ``index`` would return: ``hidden``, and placeholders for tensors beside it."""
        structure, leaves = self._returns[type(self.blocks[index])]
        made = [hidden, *leaves[1:]]
        for position, leaf in enumerate(leaves):
            if position and leaf is TENSOR:
                calls = self._calls
                made[position] = calls.placeholder((index, position)) if calls is not None else torch.empty(0)
        return tree_unflatten(made, structure)

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
    def _handed_out(self, output: torch.Tensor) -> Iterator[None]:
        """Let ``output`` be what the last block's stand-in returns."""
        self._stack_output = output
        try:
            with self._stood_in():
                yield
        finally:
            self._stack_output = None

    @contextmanager
    def _probed(self) -> Iterator[BlockProbe]:
        """Run every block without its weights, too, where its stand-in is called."""
        self._probe = BlockProbe(self._returns, everything=True)
        try:
            yield self._probe
        finally:
            self._probe = None

    def _hollow_outside(self) -> contextlib.AbstractContextManager[None]:
        """Let parameters outside the blocks be zeros that take no memory, where the model reads them itself."""
        return self._replaced(self._hollow((owner, name) for owner in self._outer for name in owner._parameters))

    def _hollow(self, places: Iterable[tuple[nn.Module, str]]) -> dict[tuple[nn.Module, str], nn.Parameter]:
        made = {}
        for owner, name in places:
            parameter = owner._parameters[name]
            if parameter is not None:
                made[owner, name] = hollow(parameter, self.device)
        return made

    @contextmanager
    def _replaced(self, parameters: Mapping[tuple[nn.Module, str], nn.Parameter]) -> Iterator[None]:
        """Let modules have other parameters while the context is open."""
        saved = {(owner, name): owner._parameters[name] for owner, name in parameters}
        try:
            for (owner, name), parameter in parameters.items():
                owner._parameters[name] = parameter
            yield
        finally:
            for (owner, name), before in saved.items():
                owner._parameters[name] = before

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

        inner = set(module.modules())
        meta = {(owner, name): value for owner, name, value in self._owners.values() if owner in inner}
        trained = any(value.requires_grad for value in meta.values())

        def to_device(value: Any, carries: bool) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            zeros = torch.zeros(value.shape, dtype=value.dtype, device=self.device)
            return zeros.requires_grad_().clone() if carries and value.is_floating_point() else zeros

        def run(*args: Any, **kwargs: Any) -> Any:
            with torch.no_grad(), self._replaced(meta):
                result = forward(*tree_map(to_meta, args), **tree_map(to_meta, kwargs))
            # With gradients enabled, as in a survey, results show whether they depend on parameters that are trained.
            given = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
            carries = torch.is_grad_enabled() and (trained or any(leaf.requires_grad for leaf in given))
            made = tree_map(lambda value: to_device(value, carries), result)
            if self._look_back is not None:
                self._look_back.note(made)
            return made

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
