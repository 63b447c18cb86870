"""Attention by CUDA's kernels for sequences of different lengths. Not run on a GPU yet.

Rows are laid end to end, and one call does all documents, or all rows of a chunk. Flash attention is taken where it
works, otherwise memory-efficient attention, whose keys and values need as many heads as the queries.
"""

from typing import Any, NamedTuple

import torch
from torch.nn import functional

_aten = torch.ops.aten


class Sequences(NamedTuple):
    """Sequences that are laid end to end, each of queries and of keys that they attend to."""

    starts: torch.Tensor  # First query of each, and the end of the last: as Documents.starts returns
    key_starts: torch.Tensor  # The same of keys
    longest: int  # Queries of the longest
    longest_keys: int
    causal: bool = True  # Whether a query sees keys up to its token alone; the last query's is the last key

    @staticmethod
    def of_rows(query: torch.Tensor, key: torch.Tensor, causal: bool) -> "Sequences":
        """Return the rows of ``[B, H, q, D]``, each with its keys ``[B, G, n, D]``."""
        ends = torch.arange(query.shape[0] + 1, dtype=torch.int32, device=query.device)
        queries, keys = query.shape[2], key.shape[2]
        return Sequences(ends * queries, ends * keys, queries, keys, causal)

    @property
    def _ends(self) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        return self[:4]

    @property
    def _mask(self) -> int:
        """Memory-efficient attention's number for the mask: none, from the top left, or from the bottom right."""
        return (1 if self.longest == self.longest_keys else 2) if self.causal else 0


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sequences: Sequences,
    window: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result ``[B, S, H, V]``, and the logarithm of each softmax's denominator ``[B, S, H]``.

    Args:
        query: ``[B, H, S, D]``.
        key: ``[B, G, n, D]``.
        value: ``[B, G, n, V]``.
        sequences: the sequences in the rows.
        window: tokens that a token sees, itself included; 0 for all.
        scale: what scores are multiplied by.
    """
    rows, heads, length, _ = query.shape
    q, k, v = (_flat(each) for each in (query, key, value))
    if takes_flash(query, value):
        out, logarithms, *_ = _aten._flash_attention_forward(
            q, k, v, *sequences._ends, 0.0, sequences.causal and not window, False, scale=scale, **_sides(window)
        )
        statistics = logarithms.t()
    else:
        k, v = (each.repeat_interleave(heads // each.shape[1], 1) for each in (k, v))
        out, logarithms, *_ = _aten._efficient_attention_forward(
            q[None], k[None], v[None], None, *sequences._ends, 0.0, sequences._mask, True, scale=scale,
            window_size=window or None,
        )  # fmt: skip
        out, statistics = out[0], logarithms.transpose(1, 2)[_indices(sequences.starts, q.shape[0])]
    result = out[..., : value.shape[-1]].reshape(rows, length, heads, -1)
    return result, statistics.contiguous().view(rows, length, heads)


def attend_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    result: torch.Tensor,
    statistics: torch.Tensor,
    sequences: Sequences,
    window: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value, given that of the result and what :func:`attend` returned."""
    heads, groups = query.shape[1], key.shape[1]
    q, k, v = (_flat(each) for each in (query, key, value))
    flowing, out = (_padded(each.flatten(0, 1)) for each in (gradient, result))
    logarithms = statistics.flatten(0, 1)
    unused = torch.empty(2, dtype=torch.uint64, device=query.device)  # random state of a dropout that there is not
    if takes_flash(query, value):
        gradients = _aten._flash_attention_backward(
            flowing, q, k, v, out, logarithms.t().contiguous(), *sequences._ends, 0.0, sequences.causal and not window,
            unused, unused, scale=scale, **_sides(window),
        )  # fmt: skip
    else:
        k, v = (each.repeat_interleave(heads // groups, 1) for each in (k, v))
        shape = (len(sequences.starts) - 1, heads, -(-sequences.longest // 32) * 32)
        padded = logarithms.new_full(shape, float("inf"))  # infinite: no gradient flows from behind a document's end
        padded.transpose(1, 2)[_indices(sequences.starts, q.shape[0])] = logarithms
        whole = _aten._efficient_attention_backward(
            flowing[None], q[None], k[None], v[None], None, out[None], *sequences._ends, padded, 0.0, unused, unused,
            sequences._mask, False, scale=scale, window_size=window or None,
        )  # fmt: skip
        gradients = whole[0][0], *(each[0].unflatten(1, (groups, -1)).sum(2) for each in whole[1:3])
    inputs = (query, key, value)
    return tuple(_rows(each, like) for each, like in zip(gradients, inputs, strict=True))  # type: ignore[return-value]


def takes_flash(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether flash attention takes these, in the backward pass as well, on every card that is supported."""
    width = query.shape[-1]
    fits = query.dtype.itemsize == 2 and width == value.shape[-1] and (width <= 192 or 224 < width <= 256)
    return fits and (not query.is_cuda or torch.cuda.get_device_capability(query.device) >= (8, 0))


def _sides(window: int) -> dict[str, Any]:
    """Return how far tokens see before and behind themselves; -1: to the document's end."""
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


def _flat(value: torch.Tensor) -> torch.Tensor:
    return _padded(value.transpose(1, 2).flatten(0, 1))


def _padded(value: torch.Tensor) -> torch.Tensor:
    return functional.pad(value, (0, -value.shape[-1] % 8)) if value.shape[-1] % 8 else value


def _rows(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    rows, _, length, width = like.shape
    return flat[..., :width].unflatten(0, (rows, length)).transpose(1, 2)


def _indices(starts: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    token = torch.arange(tokens, dtype=torch.int32, device=starts.device)
    document = torch.bucketize(token, starts[1:], right=True)
    return document, token - starts[document]
