"""Gradients arrive in their flat buffer, each parameter in its place."""

import pytest
import torch

from fuyou.layout.record import Kind, Precision, Record
from fuyou.optimizer.gradient_sum import GradientSum

BF16 = Precision(torch.bfloat16)
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
    assert torch.equal(views["up"], torch.full((7, 5), 2.0)) and torch.equal(
        views["norm"], torch.full((5,), 2.0)
    )
