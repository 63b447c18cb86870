"""Pieces next to everything else: whole models, recomputation with saved outputs, dtypes, memory."""

import gc
from functools import partial

import pytest
import torch

from fuyou.model.blocks.calls import BlockCalls
from fuyou.model.recompute.block_trace import Tracer
from fuyou.model.recompute.policy import savable_outputs, saved_outputs
from fuyou.model.recompute.replay import BlockReplay, SavedForward
from fuyou.pieces.run import PieceRun
from tests.helpers.models.piece_models import PieceModel
from tests.helpers.piece_driver import OrdinaryBlock, PieceDriver


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_recomputation_with_saved_outputs(family):
    """Tracing, saving outputs, and leaving operators out: all as for a block in one piece, where there is anything to
    leave out (behind a custom autograd function there is not)."""
    model = PieceModel(family)
    layer = len(model.stack.blocks) - 1
    given = model.inputs([2])
    one = given.hidden[0], given.calls[0], given.gradients[0]
    ordinary = OrdinaryBlock(model.stack, layer, model.of_block(layer))
    expected = ordinary.backward(*one)
    with model.stack.bound(ordinary.leaves), Tracer() as tracer:
        result = model.stack.block(layer, one[0].detach().requires_grad_(), one[1])
    operators = [(each.operator, each.ordinal) for each in savable_outputs(tracer.finish(result))][:2]
    nbytes = saved_outputs(tracer.finish(result), operators).nbytes
    replay = BlockReplay({layer}, operators, nbytes)
    fractions = []
    for _ in range(3):
        driver = PieceDriver(model.stack, layer, model.of_block(layer))
        gradient, fraction = replayed(driver, replay, torch.empty(nbytes, dtype=torch.uint8), *one)
        assert torch.equal(gradient, expected)
        for name, value in driver.whole_gradients().items():
            assert torch.equal(value, ordinary.leaves[name].grad), name
        fractions.append(fraction > 0)
    assert fractions == [False, family == "llama", family == "llama"]


def replayed(
    driver: PieceDriver, replay: BlockReplay, buffer: torch.Tensor, hidden: torch.Tensor, calls: BlockCalls,
    gradient: torch.Tensor,
) -> tuple[torch.Tensor, float]:  # fmt: skip
    """The input's gradient, and the part of the recomputation that was left out."""
    leaf, layer = hidden.detach().requires_grad_(), driver.layer

    def forward() -> SavedForward:
        run = partial(driver.stack.block, layer, hidden, calls)
        return replay.forward(layer, hidden, calls, run, buffer)[1]

    def backward() -> float:
        run = partial(driver.stack.block, layer, leaf, calls)
        output, fraction = replay.backward(layer, leaf, calls, run, buffer, first.result())
        calls.backward(output, gradient)
        return fraction

    with driver.handles.bound():
        with torch.no_grad():
            first = PieceRun(forward)
            driver.go(driver.order.forward, [first])
        second = PieceRun(backward)
        driver.go([stage.piece for stage in driver.order.backward], [second])
    assert leaf.grad is not None
    return leaf.grad, second.result()


def test_nothing_of_full_size_stays():
    """After a backward pass, with its handles alive, there is no gradient and no weight left anywhere."""

    def live() -> set[int]:
        gc.collect()
        return {id(one) for one in gc.get_objects() if type(one) is torch.Tensor and not one.is_meta}

    model = PieceModel("qwen3_moe")
    given = model.inputs([2, 1])
    driver = PieceDriver(model.stack, 0, model.of_block(0))
    sizes = []
    driver.handles.source.on_gradient = lambda part, gradient: sizes.append(gradient.numel())
    before = live()
    driver.backward(given.hidden, given.calls, given.gradients)
    assert sum(sizes) == 2 * sum(value.numel() for value in model.of_block(0).values())
    assert not live() - before
    assert all(handle.grad is None for handle in driver.handles.parameters.values())
