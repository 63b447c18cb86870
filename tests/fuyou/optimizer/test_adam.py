"""AdamW over flat ranges equals AdamW over tensors."""

from dataclasses import replace

import pytest
import torch

from fuyou.optimizer import chunk_update
from fuyou.optimizer.adam import Update
from fuyou.optimizer.chunk_update import ChunkOptimizer
from fuyou.optimizer.moments import OptimizerStates
from tests.helpers.adam import CONFIG, SplitRange, randn

#: Multiples of 128 elements, as in records: around the size of a pass, which is made small here.
SIZES = [128, 384, 1024, 1152, 2048, 5248]


@pytest.fixture(autouse=True)
def small_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_update, "PASS_ELEMENTS", 1024)


def twin_step(
    master: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, gradient: torch.Tensor, update: Update,
    decay: bool,
) -> None:  # fmt: skip
    """The whole range at once, fp32."""
    config = update.adam
    torch._fused_adamw_(
        [master], [gradient], [mean], [variance], [], [torch.tensor(float(update.step))],
        amsgrad=False, lr=config.lr, beta1=config.betas[0], beta2=config.betas[1],
        weight_decay=config.weight_decay if decay else 0.0, eps=config.eps, maximize=False,
    )  # fmt: skip


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.37])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_split_weights_equal_a_plain_master(
    count: int, decay: bool, scale: float, dtype: torch.dtype
) -> None:
    master = randn(count, 1)
    ours = SplitRange(master)
    mean, variance = torch.zeros(count), torch.zeros(count)
    for step in range(1, 5):
        update = Update(step, replace(CONFIG, lr=CONFIG.lr / step), gradient_scale=scale)
        gradient = randn(count, 10 + step).to(dtype)
        kept = gradient.clone()
        ours.step(gradient, update, decay)
        twin_step(master, mean, variance, gradient.float() * scale, update, decay)
        assert torch.equal(ours.master, master)
        assert torch.equal(ours.mean, mean) and torch.equal(ours.variance, variance)
        assert torch.equal(gradient, kept)


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_fp32_is_updated_in_place(count: int, scale: float) -> None:
    master, mean, variance = randn(count, 2), torch.zeros(count), torch.zeros(count)
    ours = [tensor.clone() for tensor in (master, mean, variance)]
    places = [tensor.data_ptr() for tensor in ours]
    adam = ChunkOptimizer()
    for step in range(1, 4):
        update, gradient = Update(step, CONFIG, gradient_scale=scale), randn(count, 20 + step)
        kept = gradient.clone()
        adam.update(OptimizerStates(ours[0], None, (ours[1], ours[2])), gradient, update, decay=True)
        twin_step(master, mean, variance, gradient * scale, update, True)
        assert torch.equal(gradient, kept)
    for mine, theirs in zip(ours, (master, mean, variance), strict=True):
        assert torch.equal(mine, theirs)
    assert [tensor.data_ptr() for tensor in ours] == places


def test_any_bf16_gradient_at_all() -> None:
    """NaNs of every payload, infinities and what overflows stay what they are in fp32, step after step."""
    gradient = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    master = randn(gradient.numel(), 7)
    ours, mean, variance = SplitRange(master), torch.zeros_like(master), torch.zeros_like(master)
    for step in (1, 2, 3):
        ours.step(gradient, Update(step, CONFIG))
        twin_step(master, mean, variance, gradient.float(), Update(step, CONFIG), True)
        assert torch.equal(ours.high.isnan(), master.isnan())
        torch.testing.assert_close(ours.master, master, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(ours.mean, mean, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(ours.variance, variance, rtol=0, atol=0, equal_nan=True)


def test_results_do_not_depend_on_threads_or_pass_size(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, results = torch.get_num_threads(), []
    count = 50_048
    try:
        for elements, number in ((128, 1), (1024, 3), (1 << 15, 1), (1 << 16, 2)):
            torch.set_num_threads(number)
            monkeypatch.setattr(chunk_update, "PASS_ELEMENTS", elements)
            ours = SplitRange(randn(count, 9))
            for step in (1, 2):
                ours.step(randn(count, 90 + step).bfloat16(), Update(step, CONFIG, gradient_scale=0.7))
            results.append((ours.high, ours.low, ours.mean, ours.variance))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(results[0], other, strict=True))
