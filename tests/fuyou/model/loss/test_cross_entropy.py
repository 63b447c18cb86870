"""The loss in passes against PyTorch's and transformers' own: equal bit for bit."""

import pytest
import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import fuyou.model.loss.cross_entropy
from fuyou.model.loss.cross_entropy import cross_entropy, pass_bytes, shifted_labels


def test_labels_move_left_by_one() -> None:
    labels = torch.tensor([[1, -100, 3], [4, 5, 6]])
    assert shifted_labels(labels).tolist() == [[-100, 3, -100], [5, 6, -100]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("rows", "length", "vocabulary"), [(1, 1, 2), (2, 37, 300), (3, 130, 1), (1, 5, 70_001)]
)
@pytest.mark.parametrize("per_pass", [1, 999, 1 << 20])
def test_loss_and_gradient_are_those_of_pytorch(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    rows: int,
    length: int,
    vocabulary: int,
    per_pass: int,
) -> None:
    monkeypatch.setattr(fuyou.model.loss.cross_entropy, "_CPU_LOGITS", per_pass)
    generator = torch.Generator().manual_seed(rows * length)
    logits = (4 * torch.randn(rows, length, vocabulary, generator=generator)).to(dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (rows, length), generator=generator)
    targets[:, 1::3] = -100
    items = (targets != -100).sum()
    flat = logits.float().view(-1, vocabulary)
    expected = functional.cross_entropy(flat, targets.view(-1), ignore_index=-100, reduction="sum") / items
    expected.backward()

    loss, gradient = cross_entropy(logits, targets, items, gradient=True)
    assert gradient is not None and torch.equal(loss, expected) and torch.equal(gradient, logits.grad)
    with torch.no_grad():
        alone, none = cross_entropy(logits, targets, items, gradient=False)
    assert none is None and torch.equal(alone, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_loss_is_that_of_transformers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=97,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype)
    labels = torch.randint(0, 97, (2, 21))
    labels[:, :3] = -100
    with torch.no_grad():
        result = model(input_ids=labels.clamp(min=0), labels=labels, use_cache=False)
        targets = shifted_labels(labels)
        assert torch.equal(
            cross_entropy(result.logits, targets, (targets != -100).sum(), False)[0], result.loss
        )


def test_a_batch_without_targets_has_no_finite_loss() -> None:
    targets = torch.full((1, 3), -100)
    assert cross_entropy(torch.randn(1, 3, 5), targets, (targets != -100).sum(), gradient=True)[0].isnan()


def test_a_pass_is_small_for_every_vocabulary() -> None:
    # 20 tokens make just less than a million logits
    assert pass_bytes(4096, 50_257, "cpu") == 20 * 50_257 * 20
    assert pass_bytes(4096, 3 << 20, "cpu") == (3 << 20) * 20
    assert pass_bytes(7, 100, "cuda") == 700 * 20
    # Of 4,096 tokens, an eighth at once; of few, as many as make a kernel worth its launch
    assert pass_bytes(4096, 128_256, "cuda") == 512 * 128_256 * 20
    assert pass_bytes(64, 128_256, "cuda") == 64 * 128_256 * 20
