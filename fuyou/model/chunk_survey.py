"""What a model's blocks keep of a row that passes through them in chunks, and in which memory: tried without values."""

import contextlib
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from fuyou.layout.model_layout import KeyMemory
from fuyou.model.blocks.calls import BlockCalls
from fuyou.model.chunks import BlockKeys, MadeBytes, RowKeys
from fuyou.model.streamed_model import META_TOKENS, StreamedModel


@dataclass(frozen=True)
class ChunkSurvey:
    """How rows pass through a model's blocks in chunks; empty if they cannot."""

    keys: tuple[BlockKeys, ...] = ()  # What each block keeps of a token for later ones
    memory: KeyMemory = field(default_factory=KeyMemory)
    separates: bool = False
    """Whether documents that share a row are kept apart in its chunks: attention in tiles does it, and no state."""


_SURVEYS: WeakKeyDictionary[StreamedModel, ChunkSurvey] = WeakKeyDictionary()


def chunk_survey(stack: StreamedModel) -> ChunkSurvey:
    """Return how rows pass through the blocks of ``stack`` in chunks, and settle how it attends to earlier chunks."""
    if stack not in _SURVEYS:
        _SURVEYS[stack] = ChunkSurvey()
        for dense in (False, True) if not (stack.links.carried or stack.links.shared) else ():
            stack.masks_chunks = dense
            with contextlib.suppress(Exception):
                # Of a family's code, which may want another kind of cache, or a mask
                _SURVEYS[stack] = _survey(stack)
                break
    return _SURVEYS[stack]


def _survey(stack: StreamedModel) -> ChunkSurvey:
    counter, length = MadeBytes(), 4 * META_TOKENS

    def call(index: int, calls: BlockCalls, row: RowKeys | None) -> int:
        """Return the bytes that a chunk of :data:`META_TOKENS` makes in a block."""
        before = counter.nbytes
        with counter:
            stack.run_on_meta(index, calls, row)
        return counter.nbytes - before

    first, *later = (
        stack.calls_on_meta(META_TOKENS, (start, length)) for start in (0, META_TOKENS, 3 * META_TOKENS)
    )
    assert first.cache is not None
    blocks: list[BlockKeys] = []
    most, attends_first, seen_at = 0, True, 0

    def note() -> None:
        nonlocal seen_at
        seen_at = counter.nbytes

    first.cache.on_seen = note
    for index in range(len(stack.blocks)):
        began = seen_at = counter.nbytes
        call(index, first, None)
        attends_first &= seen_at - began < counter.nbytes - seen_at
        keys = BlockKeys.of(first.cache, META_TOKENS, stack.model.dtype)
        if keys is None or first.edits:
            return ChunkSurvey()
        few, many = (
            call(index, calls, _row_on_meta(keys, start, length, META_TOKENS))
            for calls, start in zip(later, (META_TOKENS, 3 * META_TOKENS), strict=True)
        )
        most = max(most, 2 * (many - few) // (2 * META_TOKENS))
        blocks.append(keys)
    if not any(block.shapes or block.states for block in blocks):
        return ChunkSurvey()
    held, *longer = (
        sum({id(leaf): leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor)}.values())
        for leaves in (tree_leaves(calls.arguments) for calls in (first, *later))
    )
    dense, masks = stack.masks_chunks, (longer[1] - longer[0]) // (2 * META_TOKENS**2)
    largest = max(block.nbytes for block in blocks)
    memory = KeyMemory(
        keys=largest,
        gradients=max(block.elements for block in blocks) * 4,
        computing=largest + (0 if dense else most),
        arguments=-(-held // META_TOKENS) - masks * META_TOKENS,
        pairs=-(-most // META_TOKENS) if dense else 0,
        masks=masks,
        states=max(block.state_nbytes for block in blocks),
        state_gradients=max(block.state_elements for block in blocks) * 4,
        attends_first=attends_first,
    )
    separates = not (dense or memory.states) and stack.family.isolation is not None
    return ChunkSurvey(tuple(blocks), memory, separates)


def chunk_flops(stack: StreamedModel, start: int, length: int, tokens: int) -> float:
    """Return the FLOPs of a block's forward pass on a chunk of ``tokens`` from ``start``, on average over blocks."""
    calls = stack.calls_on_meta(min(tokens, length - start), (start, length))
    assert calls.cache is not None
    flops: dict[Any, int] = {}
    keys = chunk_survey(stack).keys
    kinds = [
        (type(block), keys[index], calls.cache.window(index)) for index, block in enumerate(stack.blocks)
    ]
    for index, kind in enumerate(kinds):
        if kind not in flops:
            with FlopCounterMode(display=False) as counter:
                stack.run_on_meta(index, calls, _row_on_meta(keys[index], start, length, tokens))
            flops[kind] = counter.get_total_flops()
    return sum(flops[kind] for kind in kinds) / len(kinds)


def _row_on_meta(keys: BlockKeys, start: int, length: int, chunk: int) -> RowKeys:
    flat = torch.empty(keys.row_nbytes(length, chunk), dtype=torch.uint8, device="meta")
    return keys.row(flat, None, start, length, chunk)
