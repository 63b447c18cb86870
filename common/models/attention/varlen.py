"""Flash attention by CUDA's kernels for sequences of different lengths. Not run on a GPU yet.

Rows are laid end to end, and one call does all documents, or all rows of a chunk.
"""

import itertools
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.nn import functional

_aten = torch.ops.aten


class Sequences(NamedTuple):
    """Sequences that are laid end to end, each of queries and of keys that they attend to."""

    starts: torch.Tensor  # First query of each, and the end of the last, int32
    key_starts: torch.Tensor  # The same of keys
    longest: int  # Queries of the longest
    longest_keys: int
    causal: bool = True  # Whether a query sees keys up to its token alone; the last query's is the last key

    @staticmethod
    def of_rows(query: torch.Tensor, key: torch.Tensor, causal: bool) -> "Sequences":
        """Return the rows of ``[B, H, q, D]``, each with its keys ``[B, G, n, D]``."""
        ends = torch.arange(query.shape[0] + 1, dtype=torch.int32, device=query.device)
        queries = query.shape[2]
        keys = key.shape[2]
        return Sequences(ends * queries, ends * keys, queries, keys, causal)

    @staticmethod
    # One copy to the device does for all layers; of each call, if documents share several
    @lru_cache(maxsize=16)
    def of_documents(starts: tuple[int, ...], rows: int, device: torch.device) -> "Sequences":
        """Return the documents of ``rows`` rows, whose first tokens, and the end of a row, are ``starts``.

        Copied from pinned memory: the host does not wait for the device."""
        ends = [row * starts[-1] + start for row in range(rows) for start in starts[:-1]] + [
            rows * starts[-1]
        ]
        on_host = torch.tensor(ends, dtype=torch.int32, pin_memory=device.type == "cuda")
        on_device = on_host.to(device, non_blocking=True)
        longest = max(b - a for a, b in itertools.pairwise(starts))
        return Sequences(on_device, on_device, longest, longest)


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
    q, k, v = _flat(query, key, value)
    out, logarithms, *_ = _aten._flash_attention_forward(
        q, k, v, *sequences[:4], 0.0, sequences.causal and not window, False, scale=scale, **_sides(window)
    )
    result = out[..., : value.shape[-1]].reshape(rows, length, heads, -1)
    return result, logarithms.t().contiguous().view(rows, length, heads)


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
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of query, key and value, given that of the result and what :func:`attend` returned."""
    flowing, out = (each.transpose(1, 2) for each in (gradient, result))
    flowing, out, q, k, v = _flat(flowing, out, query, key, value)
    # Random state of a dropout that there is not
    unused = torch.empty(2, dtype=torch.uint64, device=query.device)
    gradients = _aten._flash_attention_backward(
        flowing, q, k, v, out, statistics.flatten(0, 1).t().contiguous(), *sequences[:4], 0.0,
        sequences.causal and not window, unused, unused, scale=scale, **_sides(window),
    )  # fmt: skip
    return tuple(
        each[..., : like.shape[3]].unflatten(0, (like.shape[0], like.shape[2])).transpose(1, 2)
        for each, like in zip(gradients, (query, key, value), strict=True)
    )


def takes_flash(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether flash attention takes these, once they are padded."""
    fits = query.dtype.itemsize == 2 and max(query.shape[-1], value.shape[-1]) <= 256
    return fits and (not query.is_cuda or torch.cuda.get_device_capability(query.device) >= (8, 0))


def _sides(window: int) -> dict[str, Any]:
    """Return how far tokens see before and behind themselves; -1: to the document's end."""
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


def _flat(*parts: torch.Tensor) -> list[torch.Tensor]:
    """Lay rows ``[B, H, S, D]`` end to end, with zeros up to a width that the backward pass takes on every card."""
    width = max(part.shape[-1] for part in parts)
    width = 232 if 192 < width <= 224 else -(-width // 8) * 8
    flat = [part.transpose(1, 2).flatten(0, 1) for part in parts]
    return [
        functional.pad(each, (0, width - each.shape[-1])) if each.shape[-1] < width else each for each in flat
    ]
