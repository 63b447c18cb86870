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
from common.models.attention.tiles import Tile, View, covered_once, cut_into_tiles

BY_CHUNK = "by_chunk"
"""The name under which transformers knows this."""
# In 16 bits, lengths are rounded up to a multiple of this: PyTorch's CPU kernel compiles matrix products for each new
# length and keeps them for good, megabytes each (torch 2.13, processors with bf16 instructions).
_BUCKET = 32

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


class _ChunkCall(NamedTuple):
    """How tiles of a call of attention are computed."""

    way: str
    view: View
    scale: float
    cap: float  # Scores are squeezed into (-cap, cap); 0: they are not

    @classmethod
    def of(
        cls,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        window: int,
        chunk: int,
        offset: int,
        documents: Sequence[int],
        scale: float,
        cap: float,
    ) -> "_ChunkCall":
        device = kernels_of(query.device)
        kernels = not cap and (device == "cpu" or (device == "cuda" and varlen.takes_flash(query, value)))
        view = View.of(query.shape[2], key.shape[2], window, chunk, offset, documents)
        return cls(device if kernels else "products", view, scale, cap)

    def mask(self, tile: Tile, like: torch.Tensor) -> torch.Tensor | None:
        """Return 0 where a query sees a key and minus infinity elsewhere; None: the tile's kind says it."""
        if tile.kind == "full" or (tile.kind == "causal" and self.way != "products"):
            return None
        seen = self.view.seen(tile, like.device)
        return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(
            ~seen, float("-inf")
        )

    def _on_cpu(
        self, tile: Tile, queries: Sequence[torch.Tensor], keys: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Return what the CPU's kernel takes: parts of one width, in 16 bits of rounded lengths, and a mask."""
        mask, width = self.mask(tile, queries[0]), max(part.shape[-1] for part in (*queries, *keys))
        bucket = _BUCKET if queries[0].dtype.itemsize == 2 else 1
        more, more_keys = (-parts[0].shape[2] % bucket for parts in (queries, keys))
        if (more or more_keys) and tile.kind != "causal":  # causal attention does not see what is appended
            if mask is None:
                mask = queries[0].new_zeros(queries[0].shape[2], keys[0].shape[2])
            mask = functional.pad(functional.pad(mask, (0, more_keys), value=float("-inf")), (0, 0, 0, more))

        def padded(part: torch.Tensor, count: int) -> torch.Tensor:
            size = (0, width - part.shape[-1], 0, count)
            return functional.pad(part, size) if any(size) else part

        return [*(padded(each, more) for each in queries), *(padded(each, more_keys) for each in keys)], mask

    def forward(
        self, tile: Tile, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return a tile's result ``[B, H, queries, V]``, and the logarithms of its denominators ``[B, H, queries]``."""
        if self.way == "cuda":
            results = varlen.attend(q, k, v, self._sequences(tile, q, k), self._window(tile), self.scale)
            return tuple(each.transpose(1, 2) for each in results)
        if self.way == "cpu":
            parts, mask = self._on_cpu(tile, [q], [k, v])
            out, logarithms = _aten._scaled_dot_product_flash_attention_for_cpu(
                *parts, 0.0, tile.kind == "causal", attn_mask=mask, scale=self.scale
            )
            return out[:, :, : q.shape[2], : v.shape[-1]], logarithms[..., : q.shape[2]]
        scores, _ = self._scores(tile, q, k)
        most = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)
        scores = scores.sub_(most).exp_()
        total = scores.sum(-1, keepdim=True)
        out = scores.to(v.dtype) @ v / total.clamp(min=torch.finfo(total.dtype).tiny)
        return _ungrouped(out, q), _ungrouped(total.log_() + most, q)[..., 0]

    def backward(
        self,
        tile: Tile,
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
            sequences = self._sequences(tile, q, k)
            flowing, out, logarithms = (each.transpose(1, 2) for each in (flowing, out, logarithms))
            return varlen.attend_backward(
                flowing, q, k, v, out, logarithms, sequences, self._window(tile), self.scale
            )
        if self.way == "cpu":
            (flowing, q_, out, k_, v_), mask = self._on_cpu(tile, [flowing, q, out], [k, v])
            logarithms = functional.pad(logarithms, (0, q_.shape[2] - q.shape[2]))
            gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                flowing,
                q_,
                k_,
                v_,
                out,
                logarithms,
                0.0,
                tile.kind == "causal",
                attn_mask=mask,
                scale=self.scale,
            )
            return [
                each[:, :, : like.shape[2], : like.shape[-1]]
                for each, like in zip(gradients, (q, k, v), strict=True)
            ]
        scores, slopes = self._scores(tile, q, k)
        flowing, out, logarithms = (_grouped(each, k) for each in (flowing, out, logarithms[..., None]))
        weights = scores.sub_(logarithms).exp_()
        to_value = weights.to(v.dtype).mT @ flowing
        change = (
            (flowing @ v.mT)
            .to(weights.dtype)
            .sub_((flowing * out).sum(-1, keepdim=True, dtype=weights.dtype))
        )
        change = change.mul_(weights).mul_(self.scale)
        if slopes is not None:
            change = change.mul_(slopes)
        change = change.to(q.dtype)
        return _ungrouped(change @ k, q), change.mT @ _grouped(q, k), to_value

    def _window(self, tile: Tile) -> int:
        return self.view.window if tile.kind in ("banded", "documents") else 0

    def _sequences(self, tile: Tile, q: torch.Tensor, k: torch.Tensor) -> varlen.Sequences:
        if tile.kind == "documents":
            first, end = tile.queries.start, tile.queries.stop
            inside = (start - first for start in self.view.starts if first < start < end)
            return varlen.Sequences.of_documents((0, *inside, end - first), q.shape[0], q.device)
        return varlen.Sequences.of_rows(q, k, tile.kind != "full")

    def _scores(
        self, tile: Tile, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
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


def statistics_dtype(query: torch.Tensor) -> torch.dtype:
    """Return the dtype of the logarithms of softmax denominators."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


@torch.library.custom_op("fuyou::attention_by_chunk", mutates_args=())
def attend(
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
        sinks: ``[H]``: a score of each head that takes part in the softmax and has no value.
        window, chunk, offset: as in :class:`ChunkMask`.
        documents: as in :func:`attention_by_chunk`.
        scale: what scores are multiplied by.
        cap: soft cap of the scores; 0 for none.
    """
    call = _ChunkCall.of(query, key, value, window, chunk, offset, documents, scale, cap)
    dtype = statistics_dtype(query)
    rows, heads, count, _ = query.shape
    tiles = list(cut_into_tiles(call.view, count, call.way))
    joins = sinks is not None or not covered_once(tiles, count)
    result = query.new_zeros(rows, count, heads, value.shape[-1], dtype=dtype if joins else query.dtype)
    logarithms = query.new_full((rows, count, heads), float("-inf"), dtype=dtype)
    if sinks is not None:
        logarithms.copy_(sinks)
    for tile in tiles:
        out, added = call.forward(
            tile, query[:, :, tile.queries], key[:, :, tile.keys], value[:, :, tile.keys]
        )
        before = logarithms[:, tile.queries]
        total = result[:, tile.queries]
        added = added.transpose(1, 2)
        if joins:
            joined = torch.logaddexp(before, added)
            finite = joined.clamp(min=torch.finfo(dtype).min)
            total.mul_((before - finite).exp_()[..., None])
            total.addcmul_(out.transpose(1, 2), (added - finite).exp_()[..., None])
            before.copy_(joined)
        else:
            total.copy_(out.transpose(1, 2))
            before.copy_(added)
        del out  # before the next
    return result.to(query.dtype), logarithms


OPERATOR = torch.ops.fuyou.attention_by_chunk.default  # How recordings and plans name the operator


@attend.register_fake
def _(query: torch.Tensor, key: Any, value: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
    rows, heads, length, _ = query.shape
    statistics = query.new_empty(rows, length, heads, dtype=statistics_dtype(query))
    return query.new_empty(rows, length, heads, value.shape[-1]), statistics


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
    call = _ChunkCall.of(query, key, value, window, chunk, offset, documents, scale, cap)
    first = call.view.first(0)
    sums = statistics_dtype(query)
    tiles = list(cut_into_tiles(call.view, query.shape[2], call.way))
    to_query = torch.zeros_like(query, dtype=query.dtype if covered_once(tiles, query.shape[2]) else sums)
    # Without a window, or in whole documents, a key is in one tile: its gradient is no sum.
    dtype = sums if call.view.window and len(tiles) > 1 and tiles[0].kind != "documents" else key.dtype
    to_key, to_value = (torch.zeros_like(each[:, :, first:], dtype=dtype) for each in (key, value))
    flowing, result, logarithms = (each.transpose(1, 2) for each in (gradient, result, logarithms))
    for tile in tiles:
        queries = tile.queries
        keys = slice(tile.keys.start - first, tile.keys.stop - first)
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


attend.register_autograd(_backward, setup_context=_save)


def _flops_of_products(query: Any, key: Any, widths: int, *seen: Any) -> int:
    """Return the operations of matrix products, whose widths have this sum, by shapes.

    Pairs of tokens that see each other are counted twice, less the diagonal: so all chunks of a row together count as
    the whole row does.
    """
    rows, heads, queries, _ = query
    view = View.of(queries, key[2], *seen)
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
    result, _ = attend(
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
