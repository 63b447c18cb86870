"""Gradients arrive in their flat buffer, each parameter in its place."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fuyou.layout.record import Kind, Precision, Record
from fuyou.optimizer import gradient_sum as gradients
from fuyou.optimizer.gradient_sum import GradientSum, round_in_place, sum_of_squares

BF16 = Precision(torch.bfloat16, torch.float32)
SHAPES = {"up": (7, 5), "norm": (5,), "down": (5, 7), "scale": (1,)}


def record() -> Record:
    parameters = [((name,), shape, len(shape) > 1) for name, shape in SHAPES.items()]
    return Record.build(0, "block 0", Kind.BLOCK, BF16, parameters)


def leaves(dtype: torch.dtype) -> dict[str, torch.nn.Parameter]:
    return {name: torch.nn.Parameter(torch.randn(shape).to(dtype)) for name, shape in SHAPES.items()}


def padding(layout: Record) -> torch.Tensor:
    outside = torch.ones(layout.numel, dtype=torch.bool)
    for slot in layout.parameters:
        outside[slot.offset : slot.offset + slot.numel] = False
    return outside


def pass_through(weights: dict[str, torch.nn.Parameter], x: torch.Tensor) -> torch.Tensor:
    hidden = torch.nn.functional.silu(x @ weights["up"].T) @ weights["down"].T
    return (hidden * weights["norm"] * weights["scale"]).sum()


@pytest.mark.parametrize(
    ("dtype", "sum_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
)
@pytest.mark.parametrize("micro_batches", [1, 2, 5])
def test_sums_over_micro_batches(dtype: torch.dtype, sum_dtype: torch.dtype, micro_batches: int) -> None:
    layout = record()
    flat = torch.full((layout.numel + 100,), float("nan"), dtype=sum_dtype)
    ours = GradientSum(layout, flat)
    weights = leaves(dtype)
    expected = {name: torch.zeros(shape, dtype=sum_dtype) for name, shape in SHAPES.items()}
    for micro in range(micro_batches):
        x = torch.randn(3, 5).to(dtype)
        copies = {name: torch.nn.Parameter(weight.detach()) for name, weight in weights.items()}
        ours.attach(copies)
        pass_through(copies, x).backward()
        assert all(copy.grad is None for copy in copies.values())
        gradients = torch.autograd.grad(pass_through(weights, x), list(weights.values()))
        for name, gradient in zip(weights, gradients, strict=True):
            expected[name] = gradient.to(sum_dtype) if micro == 0 else expected[name] + gradient.to(sum_dtype)
    ours.finish()
    for name, view in layout.views(flat[: layout.numel]).items():
        assert torch.equal(view, expected[name]), name
    assert not flat[: layout.numel][padding(layout)].any()
    assert bool(flat[layout.numel :].isnan().all())  # beyond the record nothing was touched


def test_a_leaf_used_twice_counts_twice() -> None:
    layout = Record.build(0, "outer", Kind.NON_BLOCK, BF16, [(("embedding", "head"), (6, 4), True)])
    ours = GradientSum(layout, torch.full((layout.numel,), 7.0))
    leaf = torch.nn.Parameter(torch.randn(6, 4))
    ours.attach({"embedding": leaf})
    (leaf.sum() + (2 * leaf).sum()).backward()
    ours.finish()
    assert torch.equal(layout.views(ours.flat)["embedding"], torch.full((6, 4), 3.0))


def test_parameters_that_nothing_flowed_into_have_a_gradient_of_zero() -> None:
    """As experts have that no token was sent to."""
    layout = record()
    ours = GradientSum(layout, torch.full((layout.numel,), float("nan")))
    weights = leaves(torch.float32)
    ours.attach(weights)
    weights["up"].sum().backward()
    ours.finish()
    views = layout.views(ours.flat)
    assert torch.equal(views["up"], torch.ones(7, 5))
    assert all(not views[name].any() for name in ("norm", "down", "scale"))
    assert not ours.flat[padding(layout)].any()


def test_a_parameter_that_only_the_second_micro_batch_reaches() -> None:
    layout = record()
    ours = GradientSum(layout, torch.full((layout.numel,), float("nan")))
    for names in (["up"], ["up", "norm"], ["norm"]):
        weights = leaves(torch.float32)
        ours.attach(weights)
        torch.stack([weights[name].sum() for name in names]).sum().backward()
    ours.finish()
    views = layout.views(ours.flat)
    assert torch.equal(views["up"], torch.full((7, 5), 2.0)) and torch.equal(views["norm"], torch.full((5,), 2.0))


@given(st.integers(0, 700_000), st.sampled_from([torch.float32, torch.bfloat16]))
def test_sum_of_squares(count: int, dtype: torch.dtype) -> None:
    flat = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)
    total = sum_of_squares(flat)
    assert total.dtype == torch.float64 and total.shape == ()
    assert float(total) == pytest.approx(float((flat.double().numpy() ** 2).sum()), rel=1e-13)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_sum_of_squares_shows_nonfinite_values(value: float) -> None:
    flat = torch.zeros(300_000)
    flat[200_001] = value
    assert not bool(torch.isfinite(sum_of_squares(flat)))


def test_sum_of_squares_does_not_overflow_where_fp32_would() -> None:
    assert float(sum_of_squares(torch.full((10,), 1e30))) == pytest.approx(1e61)


@pytest.mark.parametrize("count", [1, 7, 1000, 4099])
def test_rounding_in_place(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "_ROUNDING_ELEMENTS", 512)
    memory = torch.empty(4 * count, dtype=torch.uint8)
    wide, narrow = memory.view(torch.float32), memory[: 2 * count].view(torch.bfloat16)
    values = torch.randn(count)
    wide.copy_(values)
    round_in_place(wide, narrow)
    assert torch.equal(narrow, values.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 63, 64, 1000, 200_000])
def test_squares_in_groups_are_those_of_float64(
    count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "_CUDA_NORM_ELEMENTS", 1 << 13)  # several passes
    flat = (torch.randn(count) * torch.logspace(-9, 3, count)).to(dtype)
    expected = float(flat.double().square().sum())
    found = gradients.sum_of_squares_in_groups(flat)
    assert found.dtype == torch.float64
    assert abs(float(found) - expected) <= expected * (1e-6 if count < 1000 else 1e-7)


def test_the_error_of_squares_in_groups_is_bounded_and_cancels() -> None:
    """The worst group: one large term, and small ones that are lost if each is added to it."""
    flat = torch.full((64,), 2.0**-13)
    flat[0] = 1.0
    expected = float(flat.double().square().sum())
    assert abs(float(gradients.sum_of_squares_in_groups(flat)) - expected) <= 66 * 2.0**-24 * expected
    many = torch.randn(4_000_000, generator=torch.Generator().manual_seed(2))
    expected = float(many.double().square().sum())
    assert abs(float(gradients.sum_of_squares_in_groups(many)) - expected) <= 1e-9 * expected


def test_gpus_that_are_slow_at_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = {}
    for name, capability in {"4090": (8, 9), "5090": (12, 0), "A100": (8, 0), "H100": (9, 0), "B200": (10, 0)}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        gradients._slow_at_fp64.cache_clear()
        slow[name] = gradients._slow_at_fp64(torch.device("cuda"))
    gradients._slow_at_fp64.cache_clear()
    assert slow == {"4090": True, "5090": True, "A100": False, "H100": False, "B200": False}
