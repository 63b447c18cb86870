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

from common.hardware.kernels import force_kernels

_aten = torch.ops.aten


@contextmanager
def cuda_branch() -> Iterator[None]:
    """Let a CPU compute in the branches for CUDA while the context is open."""
    library = torch.library.Library("aten", "IMPL")
    for function in (
        _flash_attention_forward,
        _flash_attention_backward,
        _efficient_attention_forward,
        _efficient_attention_backward,
    ):
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


def _check(query, key, value, starts, longest, dropout, aligned):
    assert starts.dtype == torch.int32 and starts.is_contiguous() and not dropout
    assert longest == int(starts.diff().max()) and int(starts[-1]) == len(query)
    for each in (query, key, value):
        assert each.stride(-1) == 1 and each.shape[-1] % aligned == 0


def _mask(count, padded, window, like):
    if not window or count <= window:
        return None
    token = torch.arange(padded)
    seen = (token <= token[:, None]) & (token > token[:, None] - window)
    return torch.zeros(seen.shape, dtype=like.dtype).masked_fill_(~seen, float("-inf"))


def _parts(start, end, *values):
    """Return a document of each ``[T, H, D]`` as ``[1, H, tokens, D]``, in 16 bits with tokens added as on a CPU."""
    for value in values:
        part = value[start:end].transpose(0, 1)[None]
        yield functional.pad(part, (0, 0, 0, -(end - start) % 32)) if value.dtype.itemsize == 2 else part


def _forward(query, key, value, starts, window, scale):
    result = query.new_empty(*query.shape[:2], value.shape[-1])
    logarithms = torch.empty(query.shape[:2])
    for start, end in pairwise(starts.tolist()):
        q, k, v = _parts(start, end, query, key, value)
        mask = _mask(end - start, q.shape[2], window, q)
        if q.shape[-1] == v.shape[-1]:
            out, each = _aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale
            )
        else:
            scores = _scores(q, k, mask, scale)
            out, each = scores.softmax(-1) @ v, scores.logsumexp(-1)
        result[start:end] = out[0].transpose(0, 1)[: end - start]
        logarithms[start:end] = each[0].transpose(0, 1)[: end - start]
    return result, logarithms


def _scores(q, k, mask, scale):
    if mask is None:
        mask = torch.full((q.shape[2],) * 2, float("-inf")).triu(1)
    return q @ k.transpose(2, 3) * scale + mask


def _backward(gradient, query, key, value, out, logarithms, starts, window, scale):
    gradients = [torch.empty_like(each) for each in (query, key, value)]
    for start, end in pairwise(starts.tolist()):
        g, q, k, v, o = _parts(start, end, gradient, query, key, value, out)
        mask = _mask(end - start, q.shape[2], window, q)
        if q.shape[-1] == v.shape[-1]:
            each = functional.pad(logarithms[start:end].t()[None], (0, q.shape[2] - (end - start))).contiguous()
            parts = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                g, q, k, v, o, each, 0.0, mask is None, attn_mask=mask, scale=scale
            )
        else:
            chances = _scores(q, k, mask, scale).softmax(-1)
            flowing = g @ v.transpose(2, 3)
            flowing = chances * (flowing - (flowing * chances).sum(-1, keepdim=True)) * scale
            parts = flowing @ k, flowing.transpose(2, 3) @ q, chances.transpose(2, 3) @ g
        for whole, part in zip(gradients, parts, strict=True):
            whole[start:end] = part[0].transpose(0, 1)[: end - start]
    return gradients


def _flash_attention_forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
    scale=None, window_size_left=None, window_size_right=None, **_,
):  # fmt: skip
    _check(query, key, value, cum_seq_q, max_q, dropout_p, 8)
    assert query.dtype.itemsize == 2 and query.shape[-1] == value.shape[-1] <= 256
    assert is_causal == (window_size_left is None) and window_size_right == (None if is_causal else 0)
    window = 0 if is_causal else window_size_left + 1
    result, logarithms = _forward(query, key, value, cum_seq_q, window, scale)
    state = torch.zeros(2, dtype=torch.uint64)
    return result, logarithms.t().contiguous(), state, state.clone(), query.new_empty(0)


def _flash_attention_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state,
    unused, *, scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    _check(query, key, value, cum_seq_q, max_q, dropout_p, 8)
    assert logsumexp.shape == (query.shape[1], len(query)) and logsumexp.is_contiguous()
    window = 0 if is_causal else window_size_left + 1
    return tuple(_backward(grad_out, query, key, value, out, logsumexp.t(), cum_seq_q, window, scale))


def _efficient_attention_forward(
    query, key, value, bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, custom_mask_type,
    compute_log_sumexp=False, *, scale=None, seqlen_k=None, window_size=None,
):  # fmt: skip
    query, key, value = (each.squeeze(0) for each in (query, key, value))
    _check(query, key, value, cu_seqlens_q, max_seqlen_q, dropout_p, 4)
    assert query.shape[1] == key.shape[1] == value.shape[1] and custom_mask_type == 1 and compute_log_sumexp
    result, logarithms = _forward(query, key, value, cu_seqlens_q, window_size or 0, scale)
    by_document = torch.full((len(cu_seqlens_q) - 1, query.shape[1], -(-max_seqlen_q // 32) * 32), float("inf"))
    for number, (start, end) in enumerate(pairwise(cu_seqlens_q.tolist())):
        by_document[number, :, : end - start] = logarithms[start:end].t()
    seed = torch.zeros((), dtype=torch.long)
    return result[None], by_document, seed, seed.clone(), max_seqlen_q, max_seqlen_k


def _efficient_attention_backward(
    grad_out_, query, key, value, bias, out, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, logsumexp,
    dropout_p, philox_seed, philox_offset, custom_mask_type, bias_requires_grad, *, scale=None, num_splits_key=None,
    window_size=None, shared_storage_dqdkdv=False,
):  # fmt: skip
    grad_out, query, key, value, out = (each.squeeze(0) for each in (grad_out_, query, key, value, out))
    _check(query, key, value, cu_seqlens_q, max_seqlen_q, dropout_p, 4)
    assert query.shape[1] == key.shape[1] and custom_mask_type == 1 and out.is_contiguous()
    ends = list(pairwise(cu_seqlens_q.tolist()))
    assert logsumexp.shape == (len(ends), query.shape[1], -(-max_seqlen_q // 32) * 32)
    for number, (start, end) in enumerate(ends):
        assert logsumexp[number, :, end - start :].isinf().all()
    logarithms = torch.cat([logsumexp[number, :, : end - start].t() for number, (start, end) in enumerate(ends)])
    gradients = _backward(grad_out, query, key, value, out, logarithms, cu_seqlens_q, window_size or 0, scale)
    return *(each[None] for each in gradients), query.new_empty(0)
