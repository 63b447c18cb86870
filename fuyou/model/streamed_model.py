"""Splitting any Hugging Face causal LM into embedding, blocks and head, without touching its code.

The model's own ``forward`` does all the work around the blocks. A stand-in takes the place of every block: it records
what the block is called with (masks, position embeddings: they differ by layer in some families) and computes nothing.

* The *embedding* is a forward pass that ends at the last stand-in.
* A *block* is the real block, called with what its stand-in has recorded.
* The *head* is a forward pass whose last stand-in hands out the blocks' true result. Modules before the blocks run on
  the meta device in it: their parameters need not be there, and what they return is never looked at.

So the head can run on any range of tokens, which bounds the memory of its logits. Links between blocks, other than
hidden states, are found when the model is split, by a survey: a run of the embedding without weights, in which one
block of each type runs on the meta device (:mod:`fuyou.model.blocks.calls`).
"""

import contextlib
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel

from common.data.documents import Documents
from common.data.rows import PADDING
from common.errors import FinetuneError, UserError
from common.models.attention.chunked import attention_by_chunk
from common.models.attention.documents import lengths_known, padding_known, rotate_by_document
from common.models.attention.isolation import (
    DocumentSeparator,
    configurations,
    takes_positions,
    without_masks,
)
from common.models.attention.kernels import AttentionKernels
from common.models.structure import find_blocks
from common.models.vision import tower_parameters
from fuyou.model.blocks.calls import BlockCalls
from fuyou.model.blocks.hidden_edits import BlockLinks, argument_paths
from fuyou.model.blocks.probe import BlockProbe, GroupedShapes, UsedTensors
from fuyou.model.blocks.stand_ins import BlockStandIns
from fuyou.model.blocks.weightless import (
    empty_parameters,
    on_meta,
    replaced_parameters,
    restored,
    runners_of,
    skipped_modules,
)
from fuyou.model.chunks import ChunkCache, NoChoices, RowKeys
from fuyou.model.family import Family, family_of

META_TOKENS = 8  # Tokens of the row that a survey runs, and that blocks are run on without values
HOST_POSITIONS = "position_ids_on_host"  # Name in a batch of a copy of ``position_ids`` on the CPU

CHUNK_PLACE = "place_in_row"
"""Name in a batch of the first token of a chunk, the tokens of its row and, if that holds several documents, the first
tokens of those that the chunk touches and the end of the last, int64 on the CPU."""


class StreamedModel:
    """A model on the meta device whose parts run one at a time, on parameters that are bound to it meanwhile.

    Args:
        model: the model, with parameters on the meta device in the compute dtype, and real buffers.
        device: where the parts compute.

    Raises:
        UserError: the model cannot be split at its blocks.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device):
        self.model = model
        self.device = device
        self._name = type(model).__name__
        self.block_prefix, modules = find_blocks(model)
        self._stand_ins = BlockStandIns(self._name, modules)
        self.blocks = self._stand_ins.blocks
        # For each parameter's name: the module, its attribute, and the parameter on the meta device
        self._owners: dict[str, tuple[nn.Module, str, nn.Parameter]] = {}
        for prefix, module in model.named_modules():
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self._owners[f"{prefix}.{name}" if prefix else name] = (module, name, parameter)
        self._carried_bytes: dict[int, int] = {}
        self.links = BlockLinks()  # Links between blocks, next to hidden states
        # Modules that run before the blocks and use parameters
        self.before: frozenset[nn.Module] = frozenset()
        self.hidden_size = 0  # Elements of the hidden states, per token
        self.token_dim = 1  # Dimension of the hidden states that counts tokens
        arguments = inspect.signature(model.forward).parameters
        # As Mamba calls it
        self._cache_name = "cache_params" if "cache_params" in arguments else "past_key_values"
        self._takes_positions = takes_positions(model)
        self._configurations = configurations(model)
        self.kernels = AttentionKernels(model.config, model.dtype, device)  # Those that all passes may take
        # Whether chunks attend by the family's own code, with a mask of queries and keys
        self.masks_chunks = False
        if hasattr(model.config, "max_inference_chunksize"):
            # XLSTM would call all blocks once per part of a long row
            model.config.max_inference_chunksize = sys.maxsize
        rotate_by_document(model)
        self._survey()

    # -- which parameters belong where ----------------------------------------------------------------------------

    def _survey(self) -> None:
        inside = {module for block in self.blocks for module in block.modules()}
        self._towers = frozenset(tower_parameters(self.model))
        owners = self._outer_owners = {owner for owner, _, _ in self._owners.values()} - inside
        holders = {owner for owner in owners if any(module in inside for module in owner.modules())}
        self._runners = runners_of(self.model, owners - holders)
        outside = set(self._runners.values())
        stand_ins = self._stand_ins
        called: list[nn.Module] = []

        def note(module: nn.Module, _: Any) -> None:
            if not stand_ins.has_called_block:
                called.append(module)

        hooks = [module.register_forward_pre_hook(note) for module in outside]
        try:
            with (
                restored(self.model),
                self._skipped(outside),
                self._without_outer_weights(),
                torch.enable_grad(),
                stand_ins.probing(all_blocks=False) as probe,
            ):
                direct = {
                    id(value): (owner, name) for owner in owners for name, value in owner._parameters.items()
                }
                with UsedTensors(direct) as used:
                    hidden, calls = self.embed({"input_ids": self._zeros(META_TOKENS)})
                self.before = frozenset(called)
                self._read_before = {direct[identity] for identity in used.found}
                self._find_links(calls, probe)
                self._measure_hidden(hidden, probe.dtypes)
                self._try_head(hidden)
        except FinetuneError:
            raise
        except Exception as error:
            raise UserError(
                f"{self._name} cannot be split at its blocks: running what comes before them failed "
                f"({type(error).__name__}: {error})."
            ) from error
        finally:
            for hook in hooks:
                hook.remove()

    def _find_links(self, calls: BlockCalls, probe: BlockProbe) -> None:
        carried = set()
        consumed = set()
        for block, (args, kwargs) in enumerate(calls.arguments):
            for path, leaf in argument_paths(args, kwargs):
                if isinstance(leaf, torch.Tensor):
                    key = calls.key_of(leaf)
                    if key is not None:
                        consumed.add(key)
                    elif leaf.requires_grad:
                        carried.add((block, path))
        self.links = BlockLinks(frozenset(carried), frozenset(consumed), bool(probe.left))

    def _measure_hidden(self, hidden: torch.Tensor, returned: set[torch.dtype]) -> None:
        """Check that blocks take and return the model's dtype, and find the dimension that counts tokens.

        That is the one that is shorter where there are fewer tokens.
        """
        _, fewer = self.embed({"input_ids": self._zeros(META_TOKENS - 1)})
        changed = [dim for dim, size in enumerate(hidden.shape) if size != fewer.hidden_shape[dim]]
        others = {hidden.dtype, *returned} - {self.model.dtype}
        if others:
            carried, weights = (
                str(dtype).removeprefix("torch.") for dtype in (others.pop(), self.model.dtype)
            )
            raise UserError(
                f"{self._name} carries hidden states in {carried} from block to block where its weights are {weights}: "
                "train it with --dtype fp32."
            )
        if len(changed) != 1 or hidden.shape[changed[0]] != META_TOKENS:
            raise UserError(
                f"{self._name} cannot be split at its blocks: hidden states of {META_TOKENS} tokens have the "
                f"shape {tuple(hidden.shape)}, in which no dimension counts them."
            )
        self.token_dim = changed[0]
        self.hidden_size = hidden.numel() // META_TOKENS

    def _try_head(self, hidden: torch.Tensor) -> None:
        def run() -> None:
            with self._stand_ins.handing_out(torch.zeros_like(hidden)), without_masks(self._configurations):
                self.model(input_ids=self._zeros(META_TOKENS), use_cache=False)

        try:
            run()
        except Exception:  # of families that do something with a mask before any block is given it (MPT)
            self._configurations = []
            run()

    def carried_bytes(self, seq_len: int) -> int:
        """Return the bytes on the device of the values that link blocks (:attr:`links`), gradients included.

        They are those of one row of ``seq_len`` tokens, and stay from the forward pass to the backward pass.
        """
        if not self.links:
            return 0
        if seq_len not in self._carried_bytes:
            with self._stand_ins.probing(all_blocks=True) as probe:
                _, calls = self.embed_without_weights({"input_ids": self._zeros(seq_len)})
            carried = {id(value): value for value in calls.carried()}
            produced = [probe.values[key] for key in self.links.consumed if key in probe.values] + probe.left
            carried.update({id(value): value for value in produced})
            self._carried_bytes[seq_len] = sum(
                value.numel() * value.itemsize * (2 if value.is_floating_point() else 1)
                for value in carried.values()
            )
        return self._carried_bytes[seq_len]

    def runs_before_blocks(self, name: str) -> bool:
        """Return whether the parameter ``name`` is used before the blocks, as those of towers are."""
        owner, attribute, _ = self._owners[name]
        before = self._runners.get(owner) in self.before or (owner, attribute) in self._read_before
        return before or name in self._towers

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype in which the model computes with the parameter ``name``."""
        return self._owners[name][2].dtype

    @cached_property
    def family(self) -> Family:
        """Family of the model, which knows how batches and the loss are made."""
        return family_of(self.model)

    @cached_property
    def _separator(self) -> DocumentSeparator:
        self.family.check_documents(masked=False)
        assert self.family.isolation is not None
        return DocumentSeparator(self.model, self.family.isolation)

    @contextmanager
    def apart(self, documents: Documents | None) -> Iterator[None]:
        """Keep ``documents`` apart in what the model computes while the context is open; None if there are none.

        Attention takes the same kernels whenever this is entered, with gradients or without.
        """
        separated = contextlib.nullcontext() if documents is None else self._separator.apart(documents)
        with self.kernels.pinned(), separated:
            yield

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Compute without dropout while the context is open."""
        self.model.eval()
        try:
            yield
        finally:
            self.model.train()

    @contextmanager
    def _attending(self, documents: Documents | None, cache: ChunkCache | None) -> Iterator[None]:
        if cache is not None:
            cache.begin()
        by_chunk: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if cache is not None and not self.masks_chunks:
            by_chunk = attention_by_chunk(configurations(self.model), cache.bounds[:-1])
        with self.apart(documents), by_chunk:
            yield

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
            batch: ``input_ids`` int64 ``[B, S]`` and, if any, ``position_ids``, ``attention_mask``, and padding.
                Without a mask, documents at which positions restart are kept apart; with :data:`HOST_POSITIONS`, no
                device is waited for to see where that is.

        Returns:
            The first block's input ``[B, S, H]``, and what each block is called with.
        """
        positions = batch.get(HOST_POSITIONS, batch.get("position_ids"))
        chunk_place = batch.get(CHUNK_PLACE)
        cache = None if chunk_place is None else ChunkCache(self.model.config, *chunk_place.tolist())
        documents = None if "attention_mask" in batch or cache is not None else Documents.of(positions)
        left_out = {PADDING, HOST_POSITIONS, CHUNK_PLACE} | (
            set() if self._takes_positions else {"position_ids"}
        )
        known: dict[str, Any] = {name: value for name, value in batch.items() if name not in left_out}
        if cache is not None:
            known[self._cache_name] = cache
        lengths = None if cache is None else cache.document_lengths(batch["input_ids"].shape[1])
        with (
            padding_known(batch),
            lengths_known(lengths),
            self._attending(documents, cache),
            self._stand_ins.recording(self.links, documents) as calls,
        ):
            self.model(**known, use_cache=False)
        calls.cache = cache
        hidden = calls.first_hidden
        calls.first_hidden = None
        assert hidden is not None
        return hidden, calls

    @torch.no_grad()
    def embed_without_weights(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, BlockCalls]:
        """Run what comes before the blocks without parameters: shapes are right, but values mean nothing."""
        with self._skipped(self.before), self._without_outer_weights():
            return self.embed(batch)

    def calls_on_meta(self, tokens: int, place: tuple[int, int] | None = None) -> BlockCalls:
        """Return what each block is called with, next to hidden states, on the meta device.

        Shared dictionaries are as the first block finds them.

        Args:
            tokens: of the row, or of a chunk of it.
            place: first token of the chunk, and tokens of its row.
        """
        batch = {"input_ids": self._zeros(tokens)} | (
            {} if place is None else {CHUNK_PLACE: torch.tensor(place)}
        )
        with self._stand_ins.probing(all_blocks=bool(self.links)) as probe:
            _, calls = self.embed_without_weights(batch)

        def on_meta(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            key = calls.key_of(leaf)  # of what a block makes
            return probe.values[key] if key in probe.values else leaf.to("meta")

        # What blocks share remains one tensor
        leaves = {id(leaf): leaf for leaf in tree_leaves(calls.arguments)}
        moved = {identity: on_meta(leaf) for identity, leaf in leaves.items()}
        calls.arguments = tree_map(lambda leaf: moved[id(leaf)], calls.arguments)
        return calls

    @cached_property
    def meta_calls(self) -> list[tuple[torch.Tensor, tuple[Any, ...], dict[str, Any]]]:
        """What each block is called with for a row of :data:`META_TOKENS` tokens: hidden states, and the others."""
        calls = self.calls_on_meta(META_TOKENS)
        hidden = torch.empty(calls.hidden_shape, dtype=self.model.dtype, device="meta")
        return [(hidden, *arguments) for arguments in calls.arguments]

    def _zeros(self, tokens: int) -> torch.Tensor:
        return torch.zeros(1, tokens, dtype=torch.long, device=self.device)

    def run_on_meta(self, index: int, calls: BlockCalls, row: RowKeys | None) -> None:
        """Run block ``index`` on what :meth:`calls_on_meta` has returned, with what it keeps of the row so far."""
        assert calls.cache is not None
        calls.cache.row = row
        args, kwargs = calls.arguments[index]
        block = self.blocks[index]
        hidden = torch.empty(calls.hidden_shape, dtype=self.model.dtype, device="meta")
        with (
            self._attending(None, calls.cache),
            on_meta(block),
            torch.no_grad(),
            GroupedShapes(),
            NoChoices(),
        ):
            block(hidden, *args, **kwargs)

    def embed_with_zero_links(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, BlockCalls]:
        """Do what :meth:`embed` does, for blocks that are run alone: what other blocks hand them is zero."""
        if not self.links:
            return self.embed(batch)
        with self._stand_ins.probing(all_blocks=True) as probe:
            hidden, calls = self.embed(batch)
        calls.zero_produced_values(probe.values, self.device)
        return hidden, calls

    def block(self, index: int, hidden: torch.Tensor, calls: BlockCalls) -> torch.Tensor:
        """Run block ``index`` on the output of the block before it, and return hidden states of the same shape.

        With gradients enabled, ``calls.backward`` is to follow.
        """
        with self._attending(calls.documents, calls.cache):
            return calls.run(index, self.blocks[index], hidden)

    def head(self, batch: Mapping[str, torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        """Run what comes after the blocks: return logits ``[B, S, V]`` from the last block's output.

        Masks, and positions that would only be made into some, are left out: blocks alone use them.
        """
        batch = {name: value for name, value in batch.items() if name != "position_ids"}
        empty = empty_parameters(self._read_before, self.device)
        with (
            self._stand_ins.handing_out(hidden),
            self._skipped(self.before),
            replaced_parameters(empty),
            without_masks(self._configurations),
        ):
            return self.model(**batch, use_cache=False).logits

    def _without_outer_weights(self) -> contextlib.AbstractContextManager[None]:
        places = ((owner, name) for owner in self._outer_owners for name in owner._parameters)
        return replaced_parameters(empty_parameters(places, self.device))

    def _skipped(self, modules: Iterable[nn.Module]) -> contextlib.AbstractContextManager[None]:
        """Let ``modules`` run on the meta device, with their meta parameters, and return zeros."""
        parameters = {(owner, name): value for owner, name, value in self._owners.values()}
        return skipped_modules(modules, parameters, self.device)
