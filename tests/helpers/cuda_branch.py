"""CUDA's branches on a CPU: stand-ins for its attention kernels, registered under the operators' own names.

A stand-in takes what PyTorch's schema has and returns what CUDA's kernel returns, in its shapes; each document goes
through the CPU's kernel. It refuses what CUDA's refuses. Backward passes run in a thread of autograd's, as on CUDA.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from common.hardware import force_kernels

_aten = torch.ops.aten


@contextmanager
def cuda_branch() -> Iterator[None]:
    """Let a CPU compute in the branches for CUDA while the context is open."""
    library = torch.library.Library("aten", "IMPL")
    for function in (_flash_attention_forward, _flash_attention_backward):
        library.impl(function.__name__, function, "CPU")
    try:
        with force_kernels("cuda"), autograd_thread():
            yield
    finally:
        library._destroy()


@contextmanager
def autograd_thread() -> Iterator[None]:
    """Let backward passes run in another thread, as on CUDA, unless ``set_multithreading_enabled`` keeps them here.

    As in PyTorch, dispatch modes go there with them; Python's thread-local and context variables do not.
    """
    here = threading.local()

    def moved(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            modes, threads = _get_current_dispatch_mode_stack(), torch.get_num_threads()

            def work() -> Any:
                here.is_autograds = True
                torch.set_num_threads(threads)
                with ExitStack() as opened:
                    for mode in modes:
                        opened.enter_context(mode)
                    return function(*args, **kwargs)

            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            stays = all(tensor.is_meta for tensor in tensors) or not torch._C._is_multithreading_enabled()
            if stays or hasattr(here, "is_autograds"):
                return function(*args, **kwargs)
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(work).result()

        return run

    before = {name: getattr(torch.autograd, name) for name in ("backward", "grad")}
    try:
        for name, function in before.items():
            setattr(torch.autograd, name, moved(function))
        yield
    finally:
        for name, function in before.items():
            setattr(torch.autograd, name, function)


def _check(query, key, value, starts, key_starts, longest, longest_keys, dropout, aligned):
    assert not dropout
    for each, ends, most in (
        (query, starts, longest),
        (key, key_starts, longest_keys),
        (value, key_starts, longest_keys),
    ):
        assert ends.dtype == torch.int32 and ends.is_contiguous()
        assert most == int(ends.diff().max()) and int(ends[-1]) == len(each)
    for each in (query, key, value):
        assert each.stride(-1) == 1 and each.shape[-1] % aligned == 0


def _mask(queries, keys, padded, causal, window, like):
    """Return a mask of padded queries and keys, causal from the bottom right; None: causal squares, or all see all."""
    if not causal or (queries == keys and not 0 < window < queries):
        return None
    token, key = (torch.arange(-(-count // padded) * padded) for count in (queries, keys))
    token = token[:, None] + keys - queries
    seen = (key <= token) & (key < keys)
    if window:
        seen &= key > token - window
    seen |= (token >= keys) & (key == 0)
    return torch.zeros(seen.shape, dtype=like.dtype).masked_fill_(~seen, float("-inf"))


def _parts(start, end, padded, *values):
    """Return a sequence of each ``[T, H, D]`` as ``[1, H, tokens, D]``, with tokens added."""
    for value in values:
        yield functional.pad(value[start:end].transpose(0, 1)[None], (0, 0, 0, (start - end) % padded))


def _sequences(starts, key_starts, query, causal, window):
    """Yield the tokens and keys of each sequence, to what their numbers are rounded as on a CPU, and the mask."""
    for tokens, keys in zip(pairwise(starts.tolist()), pairwise(key_starts.tolist()), strict=True):
        padded = 32 if query.dtype.itemsize == 2 and causal else 1
        lengths = tokens[1] - tokens[0], keys[1] - keys[0]
        yield tokens, keys, padded, _mask(*lengths, padded, causal, window, query)


def _forward(query, key, value, starts, key_starts, causal, window, scale):
    result = query.new_empty(*query.shape[:2], value.shape[-1])
    logarithms = torch.empty(query.shape[:2])
    for (start, end), keys, padded, mask in _sequences(starts, key_starts, query, causal, window):
        (q,), (k, v) = _parts(start, end, padded, query), _parts(*keys, padded, key, value)
        if q.shape[-1] == v.shape[-1]:
            out, each = _aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, causal and mask is None, attn_mask=mask, scale=scale
            )
        else:
            scores = _scores(q, k, causal, mask, scale)
            out, each = scores.softmax(-1).to(v.dtype) @ v, scores.float().logsumexp(-1)
        result[start:end] = out[0].transpose(0, 1)[: end - start]
        logarithms[start:end] = each[0].transpose(0, 1)[: end - start]
    return result, logarithms


def _scores(q, k, causal, mask, scale):
    if causal and mask is None:
        mask = torch.full((q.shape[2],) * 2, float("-inf")).triu(1)
    return q @ k.transpose(2, 3) * scale + (0 if mask is None else mask)


def _backward(gradient, query, key, value, out, logarithms, starts, key_starts, causal, window, scale):
    gradients = [torch.empty_like(each) for each in (query, key, value)]
    for (start, end), keys, padded, mask in _sequences(starts, key_starts, query, causal, window):
        (g, q, o), (k, v) = (
            _parts(start, end, padded, gradient, query, out),
            _parts(*keys, padded, key, value),
        )
        each = functional.pad(logarithms[start:end].t()[None], (0, q.shape[2] - (end - start))).contiguous()
        if q.shape[-1] == v.shape[-1]:
            parts = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                g, q, k, v, o, each, 0.0, causal and mask is None, attn_mask=mask, scale=scale
            )
        else:
            chances = (_scores(q, k, causal, mask, scale) - each[..., None]).exp().to(q.dtype)
            flowing = g @ v.transpose(2, 3)
            flowing = chances * (flowing - (g * o).sum(-1, keepdim=True)) * scale
            parts = flowing @ k, flowing.transpose(2, 3) @ q, chances.transpose(2, 3) @ g
        for whole, part, (first, last) in zip(gradients, parts, ((start, end), keys, keys), strict=True):
            whole[first:last] = part[0].transpose(0, 1)[: last - first]
    return gradients


def _flash_attention_forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
    scale=None, window_size_left=None, window_size_right=None, **_,
):  # fmt: skip
    _check(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, 8)
    assert query.dtype.itemsize == 2 and query.shape[-1] == value.shape[-1] <= 256
    assert (window_size_left is None) == (window_size_right is None) and not (is_causal and window_size_left)
    assert not is_causal or max_q == max_k
    window = 0 if window_size_left is None else window_size_left + 1
    causal = is_causal or window > 0
    result, logarithms = _forward(query, key, value, cum_seq_q, cum_seq_k, causal, window, scale)
    state = torch.zeros(2, dtype=torch.uint64)
    return result, logarithms.t().contiguous(), state, state.clone(), query.new_empty(0)


def _flash_attention_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state,
    unused, *, scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    _check(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, 8)
    assert logsumexp.shape == (query.shape[1], len(query)) and logsumexp.is_contiguous()
    window = 0 if window_size_left is None else window_size_left + 1
    ends, causal = (cum_seq_q, cum_seq_k), is_causal or window > 0
    return tuple(_backward(grad_out, query, key, value, out, logsumexp.t(), *ends, causal, window, scale))
