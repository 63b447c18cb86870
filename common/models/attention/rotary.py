"""Compute rotary embeddings for each document by its own length.

With ``dynamic`` and ``longrope``, frequencies depend on the length of a sequence, and transformers takes that from the
largest position of the batch, padding included. So a document would get other embeddings with other company.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from common.data.rows import PADDING

_padding: torch.Tensor | None = None  # Of the batch that is being computed, bool `[B, S]`


def rotate_by_document(model: nn.Module) -> None:
    """Let every rotary embedding of ``model`` that depends on lengths compute each document as if it were alone."""
    for module in model.modules():
        if _depends_on_length(module) and "forward" not in vars(module):
            module.forward = _by_document(module, module.forward)  # type: ignore[method-assign]


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


def _depends_on_length(module: nn.Module) -> bool:
    types = getattr(module, "rope_type", None)
    kinds = types.values() if isinstance(types, dict) else [types]
    return any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds)


def _by_document(module: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if position_ids.is_meta or position_ids.dim() != 2:
            return forward(x, position_ids, *args, **kwargs)
        padding = _padding
        if padding is None or padding.shape[1] != position_ids.shape[1]:
            padding = torch.zeros_like(position_ids, dtype=torch.bool)
        places, lengths = _alone(position_ids.expand(padding.shape[0], -1), padding)
        lengths = torch.where(lengths > _shortest_limit(module), lengths, 0)  # up to it, all are alike
        result: tuple[torch.Tensor, ...] = ()
        for length in lengths.unique().tolist():
            _forget_lengths(module)
            inside = lengths == length
            values = forward(x, torch.where(inside, places, 0), *args, **kwargs)
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
