"""Attention cut at documents against attention over whole rows with a mask."""

import psutil
import pytest
import torch
from torch import nn

from common.data.documents import Documents, separate_documents
from common.models.attention import documents as document_attention
from common.models.attention.documents import _by_document, attention_by_document

ROWS = ([5, 20, 12], [30, 7])


def positions() -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in ROWS])


def masked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int, scale: float) -> torch.Tensor:
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
@pytest.mark.parametrize(("heads", "width"), [(2, 8), (4, 8), (4, 6)])  # shared heads; values of another width
def test_values_and_gradients(window: int, heads: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_attention, "_WINDOW_QUERIES", 8)  # so that a document takes several pieces
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
    for one, two in zip(*(torch.autograd.grad(each, inputs, gradient) for each in (ours, theirs)), strict=True):
        torch.testing.assert_close(one, two)


def test_one_operator_whose_shapes_do_not_depend_on_the_documents() -> None:
    documents = Documents.of(positions())
    assert documents is not None
    inputs = [torch.empty(2, heads, 37, 8, device="meta") for heads in (4, 2, 2)]
    result, statistics = attention_by_document(*inputs, documents.flat, 0, 1.0)
    assert result.shape == (2, 37, 4, 8) and statistics.shape == (2, 37, 4)


@pytest.mark.parametrize("extra", [{"softcap": 3.0}, {"s_aux": torch.zeros(4)}, {"is_causal": False}])
def test_what_cannot_be_cut_is_not_computed(extra: dict) -> None:
    inputs = [torch.zeros(2, 4, 37, 8) for _ in range(3)]
    with separate_documents(Documents.of(positions())), pytest.raises(NotImplementedError):
        _by_document(nn.Identity(), *inputs, None, **extra)


def test_memory_does_not_grow_with_every_new_length() -> None:
    """In bf16, PyTorch compiles its kernel for each length where the processor can multiply that, and keeps it."""

    def attend(length: int) -> None:
        query = torch.randn(1, 2, 256, 64, dtype=torch.bfloat16, requires_grad=True)
        attention_by_document(query, query, query, [0, 0, length, 0, length, 256], 0, 0.125)[0].sum().backward()

    for length in range(32, 256, 32):  # every rounded length, once
        attend(length - 1)
    before = psutil.Process().memory_info().rss
    for length in range(8, 248, 2):
        attend(length)
    assert psutil.Process().memory_info().rss - before < 64 << 20  # 400 MiB if each were compiled by itself
