"""Attention within each document of packed rows, without a mask: an attention implementation for transformers.

A row is cut where its documents begin, and every piece goes through the kernel that the document alone would go
through. So no mask of ``[S, S]`` exists, and the work is that of the documents: the sum of their squared lengths
instead of the square of the row's. One operator does all documents of a call, and its results have the same shapes
wherever the cuts are: a recording of a block's operators holds for every batch. On a CPU it computes each piece in
turn; on CUDA one kernel does (:mod:`common.models.attention.varlen`, not run on a GPU yet).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from common.data.documents import Documents, current_documents
from common.data.rows import PADDING
from common.hardware import kernels_of
from common.models.attention import varlen
from common.models.attention.kernels import shares_heads

BY_DOCUMENT = "by_document"  # transformers' name for this; it has no mask function of that name, so it makes no mask
_WINDOW_QUERIES = 256  # Least number of queries per kernel with a sliding window: their mask stays small
# In 16 bits, lengths are rounded up to a multiple of this: PyTorch's CPU kernel compiles matrix products for each new
# length and keeps them for good, megabytes each (torch 2.13, processors with bf16 instructions).
_BUCKET = 32
_NOT_CUT = ("position_bias", "softcap", "s_aux")  # Options of families' attention that are not cut at documents

_aten = torch.ops.aten


class _Piece(NamedTuple):
    """Queries of one document, and the keys that they may attend to."""

    row: int
    queries: slice
    keys: slice
    banded: bool  # Whether a window hides some of the keys; if not, both are the same tokens, and attention is causal


def _pieces(spans: Sequence[int], window: int) -> Iterator[_Piece]:
    """Cut a batch into pieces; ``spans`` and ``window`` as in :func:`attention_by_document`."""
    for row, start, end in zip(spans[::3], spans[1::3], spans[2::3], strict=True):
        if not window or end - start <= window:
            yield _Piece(row, slice(start, end), slice(start, end), False)
            continue
        width = max(window, _WINDOW_QUERIES)
        for first in range(start, end, width):
            last = min(first + width, end)
            yield _Piece(row, slice(first, last), slice(max(start, first - window + 1), last), True)


def _mask(piece: _Piece, window: int, like: torch.Tensor, padded: bool = False) -> torch.Tensor | None:
    """Return 0 where a query sees a key and minus infinity elsewhere, ``[queries, keys]``; None: merely causal."""
    if not piece.banded:
        return None
    lengths = [part.stop - part.start for part in (piece.queries, piece.keys)]
    if padded:  # no query sees a padding key; padding queries see some key, whichever, so that all numbers are finite
        lengths = [_rounded(length) for length in lengths]
    queries = piece.queries.start + torch.arange(lengths[0], device=like.device)[:, None]
    keys = piece.keys.start + torch.arange(lengths[1], device=like.device)
    seen = (keys <= queries) & (keys > queries - window) & (keys < piece.keys.stop)
    seen |= (queries >= piece.queries.stop) & (keys == piece.keys.start)
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, float("-inf"))


def _parts(piece: _Piece, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the piece's tokens of each ``[B, H, S, D]``: ``[1, H, tokens, D]``."""
    row = slice(piece.row, piece.row + 1)
    return query[row, :, piece.queries], key[row, :, piece.keys], value[row, :, piece.keys]


def _rounded(length: int) -> int:
    return -(-length // _BUCKET) * _BUCKET


def _pad(*parts: torch.Tensor) -> list[torch.Tensor]:
    """Append zeros to each ``[.., tokens, D]``, to a rounded number of tokens. Causal attention does not see them."""
    return [functional.pad(part, (0, 0, 0, _rounded(part.shape[-2]) - part.shape[-2])) for part in parts]


def statistics_dtype(query: torch.Tensor) -> torch.dtype:
    """Return the dtype of the logarithms of softmax denominators."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def empty_results(query: torch.Tensor, key: Any, value: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
    """Return tensors of the shapes and dtypes of attention's result and of those logarithms."""
    rows, heads, length, _ = query.shape
    statistics = query.new_empty(rows, length, heads, dtype=statistics_dtype(query))
    return query.new_empty(rows, length, heads, value.shape[-1]), statistics


@torch.library.custom_op("fuyou::attention_by_document", mutates_args=())
def attention_by_document(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor | None,
    spans: Sequence[int],
    window: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend causally within each document.

    Args:
        query: ``[B, H, S, D]``.
        key: ``[B, G, S, D]``; each of its heads is shared by ``H / G`` of the query's.
        value: ``[B, G, S, V]``; on a CPU, ``V`` is ``D``.
        starts: for CUDA, as :meth:`common.data.documents.Documents.starts` returns.
        spans: row, first token and end of each document, one after another; together they cover every token.
        window: how many tokens a token sees, itself included; 0 for all.
        scale: what scores are multiplied by.

    Returns:
        The result ``[B, S, H, V]``, and for the backward pass the logarithm of each softmax's denominator ``[B, S,
        H]``.
    """
    if starts is not None:
        return varlen.attend(query, key, value, _sequences(starts, spans), window, scale)
    result, statistics = empty_results(query, key, value)  # the value's width is the query's here
    narrow = query.dtype.itemsize == 2
    for piece in _pieces(spans, window):
        q, k, v = _parts(piece, query, key, value)
        length = q.shape[-2]
        if narrow:
            q, k, v = _pad(q, k, v)
        mask = _mask(piece, window, query, narrow)
        out, logarithms = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale
        )
        result[piece.row, piece.queries] = out[0, :, :length].transpose(0, 1)
        statistics[piece.row, piece.queries] = logarithms[0, :, :length].transpose(0, 1)
    return result, statistics


attention_by_document.register_fake(empty_results)


@torch.library.custom_op("fuyou::attention_by_document_backward", mutates_args=())
def attention_by_document_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor | None,
    result: torch.Tensor,
    statistics: torch.Tensor,
    spans: Sequence[int],
    window: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value, given that of the result and what the forward pass had."""
    if starts is not None:
        return varlen.attend_backward(
            gradient, query, key, value, result, statistics, _sequences(starts, spans), window, scale
        )
    gradients = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    narrow = query.dtype.itemsize == 2
    for piece in _pieces(spans, window):
        q, k, v = _parts(piece, query, key, value)
        mask = _mask(piece, window, query, narrow)
        flowing, out, logarithms = (
            each[piece.row, piece.queries].transpose(0, 1)[None] for each in (gradient, result, statistics)
        )
        if narrow:  # what flows back into the tokens behind is zero
            q, k, v, flowing, out = _pad(q, k, v, flowing, out)
            logarithms = functional.pad(logarithms, (0, q.shape[-2] - logarithms.shape[-1]))
        parts = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            flowing, q, k, v, out, logarithms, 0.0, mask is None, attn_mask=mask, scale=scale
        )
        for whole, part in zip(_parts(piece, *gradients), parts, strict=True):
            whole.add_(part[..., : whole.shape[-2], :])  # with a window, several pieces see a key
    return gradients


@attention_by_document_backward.register_fake
def _(gradient: Any, query: Any, key: Any, value: Any, *others: Any) -> Any:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, starts, *ctx.settings = inputs
    ctx.save_for_backward(query, key, value, starts, *output)


def _backward(ctx: Any, gradient: torch.Tensor, _: Any) -> Any:
    gradients = attention_by_document_backward(gradient, *ctx.saved_tensors, *ctx.settings)
    return (*gradients, None, None, None, None)


attention_by_document.register_autograd(_backward, setup_context=_save)


OPERATOR = torch.ops.fuyou.attention_by_document.default  # How recordings and plans name the operator


@register_flop_formula(torch.ops.fuyou.attention_by_document)
def _flops(query: Any, key: Any, value: Any, starts: Any, spans: Sequence[int], *_: Any, **__: Any) -> int:
    squares = sum((end - start) ** 2 for start, end in zip(spans[1::3], spans[2::3], strict=True))
    return 2 * query[1] * (query[3] + value[3]) * squares


def _sequences(starts: torch.Tensor, spans: Sequence[int]) -> varlen.Sequences:
    longest = max(end - start for start, end in zip(spans[1::3], spans[2::3], strict=True))
    return varlen.Sequences(starts, starts, longest, longest)


@torch.compiler.disable  # documents are cut elsewhere in every batch: each would be compiled again
def _by_document(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    documents = current_documents()
    if documents is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **options)
    asked = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if asked is None else asked
    wanted = (documents.rows, documents.length)
    if not causal or any((states.shape[0], states.shape[2]) != wanted for states in (query, key)):
        raise NotImplementedError("Attention over something else than the rows' tokens.")
    if attention_mask is not None or any(options.get(name) is not None for name in _NOT_CUT):
        raise NotImplementedError("Attention with a mask, a bias, a soft cap or sinks.")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    window = options.get("sliding_window") or 0
    on_cuda = kernels_of(query.device) == "cuda" and query.dtype.itemsize <= 4
    if not dropout and (on_cuda or query.shape[-1] == value.shape[-1]):
        starts = documents.starts(query.device) if on_cuda else None
        return attention_by_document(query, key, value, starts, documents.flat, window, scale)[0], None
    return _one_by_one((query, key, value), documents, window, scale, dropout), None


def _one_by_one(
    inputs: tuple[torch.Tensor, ...], documents: Documents, window: int, scale: float, dropout: float
) -> torch.Tensor:
    """Attend to each document in a call that PyTorch differentiates; none of a recomputation is left out then."""
    lengths = [end - start for _, start, end in documents.spans()]
    # Split, whose gradient is one concatenation: that of a slice is as large as all documents.
    parts = [each.transpose(1, 2).flatten(0, 1).split(lengths) for each in inputs]
    results = []
    for states in zip(*parts, strict=True):
        alone = [each.transpose(0, 1)[None] for each in states]
        for piece in _pieces((0, 0, len(states[0])), window):
            q, k, v = _parts(piece, *alone)
            mask = _mask(piece, window, q)
            if mask is not None or not shares_heads(mask, k, v):  # CUDA's kernels share heads without a mask alone
                k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
            out = functional.scaled_dot_product_attention(
                q, k, v, mask, dropout, mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
            results.append(out[0].transpose(0, 1))
    return torch.cat(results).unflatten(0, (documents.rows, documents.length))


ALL_ATTENTION_FUNCTIONS.register(BY_DOCUMENT, _by_document)


_padding: torch.Tensor | None = None  # Of the batch that is being computed, bool `[B, S]`
_lengths: torch.Tensor | None = None  # Of each token's document, `[B, S]`, where chunks of rows are being computed


def rotate_by_document(model: nn.Module) -> None:
    """Let every rotary embedding of ``model`` that depends on lengths compute each document as if it were alone.

    With ``dynamic`` and ``longrope``, frequencies depend on the length of a sequence, which transformers takes from the
    largest position of the batch, padding included: a document would get other embeddings with other company.
    """
    for module in model.modules():
        if _depends_on_length(module) and "forward" not in vars(module):
            module.forward = _rotated_by_document(module, module.forward)  # type: ignore[method-assign]


@contextmanager
def padding_known(batch: Mapping[str, Any]) -> Iterator[None]:
    """Let no document's length count padding while the context is open: what a batch marks, or its mask hides."""
    global _padding
    mask = batch.get("attention_mask")
    hidden = mask.eq(0) if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None
    before, _padding = _padding, batch.get(PADDING, hidden)
    try:
        yield
    finally:
        _padding = before


@contextmanager
def lengths_known(lengths: torch.Tensor | None) -> Iterator[None]:
    """Let rotations be those of documents of these lengths, of which a chunk is computed, int64 ``[B, S]``; None: of
    what is computed."""
    global _lengths
    before, _lengths = _lengths, lengths
    try:
        yield
    finally:
        _lengths = before


def _depends_on_length(module: nn.Module) -> bool:
    types = getattr(module, "rope_type", None)
    kinds = types.values() if isinstance(types, dict) else [types]
    return any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds)


def _rotated_by_document(module: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if position_ids.is_meta or position_ids.dim() != 2:
            return forward(x, position_ids, *args, **kwargs)
        places, padding = position_ids, _padding
        if padding is None or padding.shape[1] != position_ids.shape[1]:
            padding = torch.zeros_like(position_ids, dtype=torch.bool)
        if _lengths is None:
            places, lengths = _alone(position_ids.expand(padding.shape[0], -1), padding)
        else:
            lengths = _lengths.to(position_ids.device)
        lengths = torch.where(lengths > _shortest_limit(module), lengths, 0)  # up to it, all are alike
        result: tuple[torch.Tensor, ...] = ()
        for length in lengths.unique().tolist():
            _forget_lengths(module)
            inside = lengths == length
            last = places.new_full((places.shape[0], 1), max(length - 1, 0))  # which a chunk need not hold
            values = forward(x, torch.cat([torch.where(inside, places, 0), last], 1), *args, **kwargs)
            values = tuple(value[:, :-1] for value in values)
            pairs = zip(values, result or values, strict=True)
            result = tuple(torch.where(inside[..., None], new, old) for new, old in pairs)
        _forget_lengths(module)
        return result

    return run


def _alone(position_ids: torch.Tensor, padding: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's position in its document and that document's length, int64 ``[B, S]``; 0 for padding."""
    begins = torch.diff(position_ids, prepend=position_ids[:, :1]) != 1
    documents = begins.cumsum(1) - 1
    lengths = torch.zeros_like(position_ids).scatter_add(1, documents, (~padding).long()).gather(1, documents)
    # With padding on the left, positions may begin above 0; rotations are relative.
    most = position_ids.max().expand_as(position_ids)
    first = most.clone().scatter_reduce(1, documents, torch.where(padding, most, position_ids), "amin")
    return (position_ids - first.gather(1, documents)).masked_fill(padding, 0), lengths.masked_fill(padding, 0)


def _shortest_limit(module: Any) -> int:
    """Return the length up to which no frequency depends on lengths."""
    parameters = module.config.rope_parameters
    groups = [group for group in (parameters, *parameters.values()) if isinstance(group, dict)]
    limits = [group.get("original_max_position_embeddings") for group in groups]
    return min([module.config.max_position_embeddings, *(int(limit) for limit in limits if limit)])


def _forget_lengths(module: Any) -> None:
    """Let frequencies be those of a model that has seen no long sequence."""
    for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
        setattr(module, name, module.original_max_seq_len)
    for name, original in list(module._buffers.items()):
        if name.endswith("original_inv_freq"):
            module._buffers[name.replace("original_", "")] = original.clone()
