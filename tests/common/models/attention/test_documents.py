"""Attention cut at documents against attention over whole rows with a mask."""

from typing import Any

import psutil
import pytest
import torch
from torch import nn

from common.data.documents import Documents, separate_documents
from common.models.attention import tiles, varlen
from common.models.attention.chunked import attend as attend_by_chunk
from common.models.attention.documents import _by_document
from tests.helpers.cuda_branch import cuda_branch

ROWS = ([5, 20, 12], [30, 7])


def positions() -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in ROWS])


def masked(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int, scale: float
) -> torch.Tensor:
    """Softmax in plain sight, with a mask of ``[S, S]``."""
    times = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    document = (positions() == 0).cumsum(1)
    token = torch.arange(document.shape[1])
    seen = (document[:, :, None] == document[:, None, :]) & (token <= token[:, None])
    if window:
        seen &= token > token[:, None] - window
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~seen[:, None], float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("window", [0, 7, 64])
# Shared heads; values of another width
@pytest.mark.parametrize(("heads", "width"), [(2, 8), (4, 8), (4, 6)])
def test_values_and_gradients(window: int, heads: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "_BANDED_QUERIES", 8)  # so that a document takes several tiles
    torch.manual_seed(0)
    sizes = ((4, 8), (heads, 8), (heads, width))
    inputs = [torch.randn(2, h, 37, d, dtype=torch.float64, requires_grad=True) for h, d in sizes]
    module = nn.Identity()
    with separate_documents(Documents.of(positions())):
        ours, weights = _by_document(module, *inputs, None, scaling=0.3, sliding_window=window or None)
    assert weights is None
    theirs = masked(*inputs, window, 0.3)
    torch.testing.assert_close(ours, theirs)
    gradient = torch.randn_like(ours)
    for one, two in zip(
        *(torch.autograd.grad(each, inputs, gradient) for each in (ours, theirs)), strict=True
    ):
        torch.testing.assert_close(one, two)


def attend(inputs: list[torch.Tensor], window: int) -> list[torch.Tensor]:
    """Return the result within documents, and the gradients of its sum of squares."""
    with separate_documents(Documents.of(positions())):
        result, _ = _by_document(nn.Identity(), *inputs, None, scaling=0.3, sliding_window=window or None)
    return [result, *torch.autograd.grad(result.square().sum(), inputs)]


@pytest.mark.parametrize("window", [0, 7, 64])
@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 8), (torch.bfloat16, 12), (torch.bfloat16, 16)])
def test_cudas_branch_has_the_values_of_the_cpus(
    dtype: torch.dtype, width: int, heads: int, window: int
) -> None:
    """With stand-ins for its kernels, which take their arguments by PyTorch's own schema; fp32 takes products."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, h, 37, width, dtype=dtype, requires_grad=True) for h in (4, heads, heads)]
    expected = attend(inputs, window)
    with cuda_branch():
        for ours, theirs in zip(attend(inputs, window), expected, strict=True):
            if width == 16 and not window:  # neither padded nor cut elsewhere
                assert torch.equal(ours, theirs)
            else:
                torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("window", [0, 7])
def test_cudas_branch_takes_values_of_another_width(window: int) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, 4, 37, width, dtype=torch.bfloat16, requires_grad=True) for width in (12, 12, 8)]
    expected = attend(inputs, window)
    with cuda_branch():
        for ours, theirs in zip(attend(inputs, window), expected, strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("window", [0, 7])
def test_cudas_calls_take_no_more_memory_for_short_documents(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each document of a call, the backward pass has fp32 sums of 128 tokens more."""
    monkeypatch.setattr(tiles, "_LEAST_DOCUMENTS", 2)
    torch.manual_seed(0)
    inputs = [torch.randn(2, heads, 37, 16, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)]
    expected = attend(inputs, window)
    backward, documents = varlen.attend_backward, []

    def noted(*arguments: Any) -> Any:
        documents.append(len(arguments[6].starts) - 1)
        return backward(*arguments)

    monkeypatch.setattr(varlen, "attend_backward", noted)
    with cuda_branch():
        for ours, theirs in zip(attend(inputs, window), expected, strict=True):
            torch.testing.assert_close(ours, theirs)
    assert max(documents) == 2 and sum(documents) == int((positions() == 0).sum())


def test_one_operator_whose_shapes_do_not_depend_on_the_documents() -> None:
    inputs = [torch.empty(1, heads, 74, 8, device="meta") for heads in (4, 2, 2)]
    result, statistics = attend_by_chunk(*inputs, None, 0, 0, 0, [0, 5, 37], 1.0, 0.0)
    assert result.shape == (1, 74, 4, 8) and statistics.shape == (1, 74, 4)


@pytest.mark.parametrize("extra", [{"softcap": 3.0}, {"s_aux": torch.zeros(4)}, {"is_causal": False}])
def test_what_cannot_be_cut_is_not_computed(extra: dict) -> None:
    inputs = [torch.zeros(2, 4, 37, 8) for _ in range(3)]
    with separate_documents(Documents.of(positions())), pytest.raises(NotImplementedError):
        _by_document(nn.Identity(), *inputs, None, **extra)


def test_memory_does_not_grow_with_every_new_length() -> None:
    """In bf16, PyTorch compiles its kernel for each length where the processor can multiply that, and keeps it."""

    def attend(length: int) -> None:
        query = torch.randn(1, 2, 256, 64, dtype=torch.bfloat16, requires_grad=True)
        attend_by_chunk(query, query, query, None, 0, 0, 0, [0, length], 0.125, 0.0)[0].sum().backward()

    for length in range(32, 256, 32):  # every rounded length, once
        attend(length - 1)
    before = psutil.Process().memory_info().rss
    for length in range(8, 248, 2):
        attend(length)
    assert psutil.Process().memory_info().rss - before < 64 << 20  # 400 MiB if each were compiled alone
