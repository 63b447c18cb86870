"""Attention of a chunk of a row's tokens to all tokens before it, without a mask: an attention implementation for
transformers.

A chunk has ``q`` queries; keys and values are those of the ``n`` tokens seen so far, the chunk's last: query ``i`` is
token ``n - q + i`` of them. Keys are taken in tiles whose results are joined by the logarithms of their softmax's
denominators, and the backward pass computes each tile again, so scores of all pairs of tokens never exist. Causal
attention, sliding windows, chunked attention (Llama 4), sinks (gpt-oss), soft caps (Gemma 2), shared heads, and values
of another width than keys (DeepSeek) are supported, and rows that hold several documents.

To compute with it, give the model a cache whose ``update`` returns the keys and values seen so far, and open::

    with attention_by_chunk(configurations(model)):  # common.models.attention.isolation
        model(input_ids=ids[:, first:last], position_ids=positions[:, first:last], past_key_values=cache)

Blocks that are called alone take, as ``attention_mask``, what the model's mask function returned in that context: a
:class:`ChunkMask`. A cache may drop keys that a layer's window hides. The gradients of keys and values are those of
this chunk alone. What cannot be computed so (a family's own mask, a bias, dropout) raises NotImplementedError.
"""

import itertools
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula
from transformers import PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from common.hardware import kernels_of
from common.models.attention import varlen
from common.models.attention.documents import empty_results, statistics_dtype

BY_CHUNK = "by_chunk"
"""The name under which transformers knows this."""
KEYS = 4096
"""Keys of a tile, where a kernel computes it."""
SCORES = 2**20
"""Scores of a tile and head, where products compute it."""
_BANDED_QUERIES = 256  # Queries that share a mask on a CPU, where a window hides some of their keys

_aten = torch.ops.aten


@dataclass(frozen=True)
class ChunkMask:
    """What the queries of a chunk see of the tokens before them: in the place where transformers has a mask."""

    offset: int  # Number of tokens of the row before the chunk
    window: int = 0  # Number of tokens that a token sees, itself included; 0: all
    chunk: int = 0  # Length of ranges of tokens that see each other alone (Llama 4); 0: all


_documents: Sequence[int] = ()  # First tokens of the documents that a chunk touches


@contextmanager
def attention_by_chunk(configs: Sequence[PreTrainedConfig], documents: Sequence[int] = ()) -> Iterator[None]:
    """Let models with these configurations attend by chunk while the context is open.

    Args:
        configs: of the models.
        documents: first tokens of the row's documents, as far as the chunk touches them; tokens of one document do not
            see those of others.
    """
    global _documents
    before = [config._attn_implementation for config in configs]
    documents_before, _documents = _documents, documents
    try:
        for config in configs:
            config._attn_implementation = BY_CHUNK
        yield
    finally:
        _documents = documents_before
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation = implementation


class _Tile(NamedTuple):
    """Queries, and some of the keys that they see."""

    queries: slice
    keys: slice
    kind: str  # "full": all see all; "causal": both are the same tokens; "banded": what they see differs


class _View(NamedTuple):
    """Which keys are seen by each query."""

    past: int  # Index of the first query's key
    window: int
    starts: tuple[int, ...]  # Indices of keys, ascending: queries from there on see no key before

    @staticmethod
    def of(queries: int, keys: int, window: int, chunk: int, offset: int, documents: Sequence[int]) -> "_View":
        past = keys - queries
        first, starts = offset - past, documents or (0,)  # the first key's token; where documents begin
        if chunk:
            ranges = itertools.pairwise((*starts, first + keys))
            starts = [start for begin, end in ranges for start in range(begin, end, chunk)]
        inside = (start - first for start in starts)
        return _View(past, window if window < keys else 0, tuple(start for start in inside if 0 < start < keys))

    def first(self, query: int) -> int:
        index = self.past + query
        before = bisect_right(self.starts, index)
        return max(self.starts[before - 1] if before else 0, index - self.window + 1 if self.window else 0)

    def stop(self, query: int) -> int:
        """Return the first query after ``query`` that sees none of the keys before its own, if there is one."""
        after = bisect_right(self.starts, self.past + query)
        return self.starts[after] - self.past if after < len(self.starts) else sys.maxsize

    def seen(self, tile: _Tile, device: torch.device) -> torch.Tensor:
        """Return which keys of a tile are seen by each of its queries, bool ``[queries, keys]``."""
        last = self.past + torch.arange(tile.queries.start, tile.queries.stop, device=device)[:, None]
        keys = torch.arange(tile.keys.start, tile.keys.stop, device=device)
        seen = keys <= last
        if self.window:
            seen &= keys > last - self.window
        return seen


def _tiles(view: _View, queries: int, way: str) -> Iterator[_Tile]:
    """Cut attention into tiles that one call of a kernel computes; windows are sliced, and a query sees a key once.

    Args:
        way: ``"cpu"`` or ``"cuda"``: with that device's kernels; ``"products"``: one matrix product at a time.
    """
    step = queries
    if view.window and view.window < view.past + queries and way != "cuda":
        step = _BANDED_QUERIES if way == "cpu" else 4 * _BANDED_QUERIES
    start = 0
    while start < queries:
        stop = min(start + step, queries, view.stop(start))
        piece, first_own, end = slice(start, stop), view.past + start, view.past + stop
        first, shared = view.first(start), view.first(stop - 1)
        if way == "products":
            tile = max(1, SCORES // (stop - start))
            for key in range(first, end, tile):
                keys = slice(key, min(key + tile, end))
                yield _Tile(piece, keys, "full" if key >= shared and keys.stop <= first_own + 1 else "banded")
        elif first < shared and (way == "cuda" or shared >= first_own):
            yield _Tile(piece, slice(first, end), "banded")
        else:
            if first < shared:  # with a key that all see: no query sees none
                yield _Tile(piece, slice(first, shared + 1), "banded")
                shared += 1
            for key in range(shared, first_own, KEYS):
                yield _Tile(piece, slice(key, min(key + KEYS, first_own)), "full")
            yield _Tile(piece, slice(first_own, end), "causal")
        start = stop


class _ChunkCall(NamedTuple):
    """How tiles of a call of attention are computed."""

    way: str
    view: _View
    scale: float
    cap: float  # Scores are squeezed into (-cap, cap); 0: they are not

    @classmethod
    def of(
        cls,
        query: torch.Tensor,
        key: torch.Tensor,
        window: int,
        chunk: int,
        offset: int,
        documents: Sequence[int],
        scale: float,
        cap: float,
    ) -> "_ChunkCall":
        device = kernels_of(query.device)
        kernels = not cap and (device == "cpu" or (device == "cuda" and query.dtype.itemsize <= 4))
        view = _View.of(query.shape[2], key.shape[2], window, chunk, offset, documents)
        return cls(device if kernels else "products", view, scale, cap)

    def mask(self, tile: _Tile, like: torch.Tensor) -> torch.Tensor | None:
        """Return 0 where a query sees a key and minus infinity elsewhere; None: the tile's kind says it."""
        if tile.kind == "full" or (tile.kind == "causal" and self.way != "products"):
            return None
        seen = self.view.seen(tile, like.device)
        return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, float("-inf"))

    def forward(self, tile: _Tile, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return a tile's result ``[B, H, queries, V]``, and the logarithms of its denominators ``[B, H, queries]``."""
        if self.way == "cuda":
            sequences = varlen.Sequences.of_rows(q, k, tile.kind != "full")
            results = varlen.attend(q, k, v, sequences, self._window(tile), self.scale)
            return tuple(each.transpose(1, 2) for each in results)
        if self.way == "cpu":
            out, logarithms = _aten._scaled_dot_product_flash_attention_for_cpu(
                *_widened(q, k, v), 0.0, tile.kind == "causal", attn_mask=self.mask(tile, q), scale=self.scale
            )
            return out[..., : v.shape[-1]], logarithms
        scores, _ = self._scores(tile, q, k)
        most = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)
        scores = scores.sub_(most).exp_()
        total = scores.sum(-1, keepdim=True)
        out = scores.to(v.dtype) @ v / total.clamp(min=torch.finfo(total.dtype).tiny)
        return _ungrouped(out, q), _ungrouped(total.log_() + most, q)[..., 0]

    def backward(
        self,
        tile: _Tile,
        flowing: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        logarithms: torch.Tensor,
    ) -> Sequence[torch.Tensor]:
        """Return what a tile adds to the gradients of queries, keys, and values; ``out`` and ``logarithms`` are those
        of all tiles together."""
        if self.way == "cuda":
            sequences = varlen.Sequences.of_rows(q, k, tile.kind != "full")
            flowing, out, logarithms = (each.transpose(1, 2) for each in (flowing, out, logarithms))
            return varlen.attend_backward(flowing, q, k, v, out, logarithms, sequences, self._window(tile), self.scale)
        if self.way == "cpu":
            gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *_widened(flowing, q, k, v, out),
                logarithms,
                0.0,
                tile.kind == "causal",
                attn_mask=self.mask(tile, q),
                scale=self.scale,
            )
            return [each[..., : like.shape[-1]] for each, like in zip(gradients, (q, k, v), strict=True)]
        scores, slopes = self._scores(tile, q, k)
        flowing, out, logarithms = (_grouped(each, k) for each in (flowing, out, logarithms[..., None]))
        weights = scores.sub_(logarithms).exp_()
        to_value = weights.to(v.dtype).mT @ flowing
        change = (flowing @ v.mT).to(weights.dtype).sub_((flowing * out).sum(-1, keepdim=True, dtype=weights.dtype))
        change = change.mul_(weights).mul_(self.scale)
        if slopes is not None:
            change = change.mul_(slopes)
        change = change.to(q.dtype)
        return _ungrouped(change @ k, q), change.mT @ _grouped(q, k), to_value

    def _window(self, tile: _Tile) -> int:
        return self.view.window if tile.kind == "banded" else 0

    def _scores(self, tile: _Tile, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the scores of a tile, ``[B, G, H / G * queries, keys]``, and their cap's derivatives."""
        scores = (_grouped(q, k) @ k.mT).to(statistics_dtype(q)).mul_(self.scale)
        slopes = None
        if self.cap:
            squeezed = scores.div_(self.cap).tanh_()
            slopes = 1 - squeezed**2
            scores = squeezed * self.cap
        mask = self.mask(tile, scores)
        if mask is not None:
            scores.unflatten(2, (-1, mask.shape[0])).add_(mask)
        return scores, slopes


def _grouped(each: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Put the heads ``[B, H, queries, D]`` that share a key's head under each other."""
    return each.unflatten(1, (key.shape[1], -1)).flatten(2, 3)


def _ungrouped(each: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    return each.unflatten(2, (-1, query.shape[2])).flatten(1, 2)


def _widened(*parts: torch.Tensor) -> list[torch.Tensor]:
    """Append zeros until all have the width of the widest: the CPU's kernel takes nothing else."""
    width = max(part.shape[-1] for part in parts)
    return [functional.pad(part, (0, width - part.shape[-1])) if part.shape[-1] < width else part for part in parts]


@torch.library.custom_op("fuyou::attention_by_chunk", mutates_args=())
def _attention_by_chunk(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    window: int,
    chunk: int,
    offset: int,
    documents: Sequence[int],
    scale: float,
    cap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result ``[B, q, H, V]``, and the logarithm of each softmax's denominator ``[B, q, H]``.

    Args:
        query: ``[B, H, q, D]``.
        key: ``[B, G, n, D]``; each of its heads is shared by ``H / G`` of the query's.
        value: ``[B, G, n, V]``.
        sinks: ``[H]``: a score of each head that takes tile in the softmax and has no value.
    """
    call = _ChunkCall.of(query, key, window, chunk, offset, documents, scale, cap)
    dtype = statistics_dtype(query)
    rows, heads, count, _ = query.shape
    result = query.new_zeros(rows, count, heads, value.shape[-1], dtype=dtype)
    logarithms = query.new_full((rows, count, heads), float("-inf"), dtype=dtype)
    if sinks is not None:
        logarithms.copy_(sinks)
    for tile in _tiles(call.view, count, call.way):
        out, added = call.forward(tile, query[:, :, tile.queries], key[:, :, tile.keys], value[:, :, tile.keys])
        before, added = logarithms[:, tile.queries], added.transpose(1, 2)
        joined = torch.logaddexp(before, added)
        finite = joined.clamp(min=torch.finfo(dtype).min)
        total = result[:, tile.queries].mul_((before - finite).exp_()[..., None])
        total.addcmul_(out.transpose(1, 2), (added - finite).exp_()[..., None])
        before.copy_(joined)
        del out  # before the next
    return result.to(query.dtype), logarithms


_attention_by_chunk.register_fake(empty_results)


@torch.library.custom_op("fuyou::attention_by_chunk_backward", mutates_args=())
def _attention_by_chunk_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    result: torch.Tensor,
    logarithms: torch.Tensor,
    window: int,
    chunk: int,
    offset: int,
    documents: Sequence[int],
    scale: float,
    cap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    call = _ChunkCall.of(query, key, window, chunk, offset, documents, scale, cap)
    first = call.view.first(0)
    sums = statistics_dtype(query)
    to_query = torch.zeros_like(query, dtype=sums)
    # Without a window, a key is in one tile: its gradient is no sum.
    dtype = sums if call.view.window else key.dtype
    to_key, to_value = (torch.zeros_like(each[:, :, first:], dtype=dtype) for each in (key, value))
    flowing, result, logarithms = (each.transpose(1, 2) for each in (gradient, result, logarithms))
    for tile in _tiles(call.view, query.shape[2], call.way):
        queries, keys = tile.queries, slice(tile.keys.start - first, tile.keys.stop - first)
        added = call.backward(
            tile,
            flowing[:, :, queries],
            query[:, :, queries],
            key[:, :, tile.keys],
            value[:, :, tile.keys],
            result[:, :, queries],
            logarithms[:, :, queries],
        )
        to_query[:, :, queries] += added[0]
        to_key[:, :, keys] += added[1]
        to_value[:, :, keys] += added[2]
        del added  # before the next
    to_key, to_value = (each.to(key.dtype) for each in (to_key, to_value))
    if first:
        to_key, to_value = (functional.pad(each, (0, 0, first, 0)) for each in (to_key, to_value))
    return to_query.to(query.dtype), to_key, to_value


@_attention_by_chunk_backward.register_fake
def _(gradient: Any, query: Any, key: Any, value: Any, *others: Any) -> Any:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, sinks, *ctx.settings = inputs
    ctx.save_for_backward(query, key, value, sinks, *output)


def _backward(ctx: Any, gradient: torch.Tensor, _: Any) -> Any:
    query, key, value, sinks, result, logarithms = ctx.saved_tensors
    gradients = _attention_by_chunk_backward(gradient, query, key, value, result, logarithms, *ctx.settings)
    to_sinks = None
    if sinks is not None:
        flow = (gradient * result).sum(-1, dtype=logarithms.dtype)
        to_sinks = -(sinks.to(logarithms.dtype) - logarithms).exp().mul(flow).sum((0, 1)).to(sinks.dtype)
    return (*gradients, to_sinks, *(None for _ in ctx.settings))


_attention_by_chunk.register_autograd(_backward, setup_context=_save)


def _flops_of_products(query: Any, key: Any, widths: int, *seen: Any) -> int:
    """Return the operations of matrix products, whose widths have this sum, by shapes.

    Pairs of tokens that see each other are counted twice, less the diagonal: so all chunks of a row together count as
    the whole row does.
    """
    rows, heads, queries, _ = query
    view = _View.of(queries, key[2], *seen)
    pairs = sum(2 * (view.past + index - view.first(index)) + 1 for index in range(queries))
    return 2 * rows * heads * widths * pairs


@register_flop_formula(torch.ops.fuyou.attention_by_chunk)
def _flops(query: Any, key: Any, value: Any, sinks: Any, *settings: Any, **_: Any) -> int:
    return _flops_of_products(query, key, query[3] + value[3], *settings[:4])


@register_flop_formula(torch.ops.fuyou.attention_by_chunk_backward)
def _flops_backward(gradient: Any, query: Any, key: Any, value: Any, *others: Any, **_: Any) -> int:
    _, _, *settings = others
    return _flops_of_products(query, key, 3 * query[3] + 2 * value[3], *settings[:4])


@torch.compiler.disable  # the number of keys differs in every call
def _by_chunk(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: ChunkMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    if not isinstance(attention_mask, ChunkMask):
        raise NotImplementedError("Attention by chunk under a mask that is not merely causal.")
    if position_bias is not None or dropout:
        raise NotImplementedError("Attention by chunk with a bias or dropout.")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    mask = attention_mask
    sinks = None if s_aux is None else s_aux.flatten()
    result, _ = _attention_by_chunk(
        query, key, value, sinks, mask.window, mask.chunk, mask.offset, _documents, scale, float(softcap or 0)
    )
    return result, None


def _chunk_mask(
    q_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **_: Any,
) -> ChunkMask | None:

    def sees(query: int, key: int) -> bool:
        return bool(mask_function(*(torch.tensor(each) for each in (0, 0, query, key))))

    if sees(0, 1):
        return None  # under which attention raises: decoders of some families (BART) make one for an encoder
    # Families that add rules to a mask, and packed rows, say that it is not merely causal.
    if not allow_is_causal_skip or use_vmap:
        raise NotImplementedError("Attention by chunk under a mask that is not merely causal.")
    if attention_mask is not None and not bool(attention_mask.all()):
        raise NotImplementedError("Attention by chunk with padding.")
    if local_size is None:
        return ChunkMask(q_offset)
    slides = local_size == 1 or sees(local_size, 1)
    return ChunkMask(q_offset, **{"window" if slides else "chunk": local_size})


ALL_ATTENTION_FUNCTIONS.register(BY_CHUNK, _by_chunk)
ALL_MASK_ATTENTION_FUNCTIONS.register(BY_CHUNK, _chunk_mask)
