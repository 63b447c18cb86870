"""Attention within each document of packed rows, without a mask: an attention implementation for transformers.

Rows are laid end to end: to the operator of :mod:`common.models.attention.chunked` they are one row, which it cuts
where documents begin. So no mask of ``[S, S]`` exists, and the work is that of the documents: the sum of their squared
lengths instead of the square of the row's. The operator's results have the same shapes wherever the cuts are: a
recording of a block's operators holds for every batch.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from common.data.documents import Documents, current_documents
from common.data.rows import PADDING
from common.models.attention.chunked import attend
from common.models.attention.kernels import shares_heads

# Transformers' name for this; it has no mask function of that name, so it makes no mask
BY_DOCUMENT = "by_document"
# Options of families' attention that are not cut at documents
_NOT_CUT = ("position_bias", "softcap", "s_aux")


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
    shape = (documents.rows, documents.length)
    if not causal or any((states.shape[0], states.shape[2]) != shape for states in (query, key)):
        raise NotImplementedError("Attention over something else than the rows' tokens.")
    if attention_mask is not None or any(options.get(name) is not None for name in _NOT_CUT):
        raise NotImplementedError("Attention with a mask, a bias, a soft cap or sinks.")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    window = options.get("sliding_window") or 0
    # [tokens of all rows, heads, width]
    states = [each.transpose(1, 2).flatten(0, 1) for each in (query, key, value)]
    if dropout:
        result = _one_by_one(states, documents, window, scale, dropout)
    else:
        starts = [row * documents.length + start for row, start, _ in documents.spans()]
        rows = [each.transpose(0, 1)[None] for each in states]
        result = attend(*rows, None, window, 0, 0, starts, scale, 0.0)[0][0]
    return result.unflatten(0, shape), None


def _one_by_one(
    states: list[torch.Tensor], documents: Documents, window: int, scale: float, dropout: float
) -> torch.Tensor:
    """Attend to each document in a call that PyTorch differentiates; none of a recomputation is left out then."""
    lengths = [end - start for _, start, end in documents.spans()]
    results = []
    # Split, whose gradient is one concatenation: that of a slice is as large as all documents.
    for length, *parts in zip(lengths, *(each.split(lengths) for each in states), strict=True):
        q, k, v = (each.transpose(0, 1)[None] for each in parts)
        mask = None
        if window and length > window:
            mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(1 - window)
        if mask is not None or not shares_heads(mask, k, v):
            # CUDA's kernels share heads without a mask alone
            k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        out = functional.scaled_dot_product_attention(
            q, k, v, mask, dropout, mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        results.append(out[0].transpose(0, 1))
    return torch.cat(results)


ALL_ATTENTION_FUNCTIONS.register(BY_DOCUMENT, _by_document)


_padding: torch.Tensor | None = None  # Of the batch that is being computed, bool `[B, S]`
# Of each token's document, `[B, S]`, where chunks of rows are being computed
_lengths: torch.Tensor | None = None


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
        places = position_ids
        padding = _padding
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
    return (position_ids - first.gather(1, documents)).masked_fill(padding, 0), lengths.masked_fill(
        padding, 0
    )


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
