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
from tests.helpers.models.small_models import model_of
from tests.helpers.piece_driver import OrdinaryBlock, PieceDriver


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gpt_oss"])
def test_a_whole_model_of_transformers(family):
    """Its own forward and backward pass give the same hidden states and the same gradients of all blocks."""
    twin = model_of(family).train()
    model = PieceModel(twin.config)
    stack = model.stack
    weights = {name: value.detach() for name, value in twin.named_parameters()}
    for name, buffer in twin.named_buffers():
        stack.model.get_buffer(name).copy_(buffer)
    ids = torch.randint(0, twin.config.vocab_size, (2, 11), generator=torch.Generator().manual_seed(2))
    expected = twin(input_ids=ids, use_cache=False).logits
    gradient = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3))
    expected.backward(gradient)

    prefix = f"{stack.block_prefix}."
    outer = {name: value for name, value in weights.items() if not name.startswith(prefix)}
    drivers = [
        PieceDriver(
            stack,
            layer,
            {name: value for name, value in weights.items() if name.startswith(f"{prefix}{layer}.")},
        )
        for layer in range(len(stack.blocks))
    ]
    with torch.no_grad(), stack.bound(outer, before=True):
        hidden, calls = stack.embed({"input_ids": ids})
    states = [hidden]
    for driver in drivers:
        states.append(driver.forward([states[-1]], [calls])[0])
    last = states[-1].detach().requires_grad_()
    with stack.bound(outer, before=False):
        logits = stack.head({"input_ids": ids}, last)
    assert torch.equal(logits, expected)
    logits.backward(gradient)
    upstream = last.grad
    for layer in reversed(range(len(drivers))):
        (upstream,) = drivers[layer].backward([states[layer]], [calls], [upstream])
        for name, value in drivers[layer].whole_gradients().items():
            assert torch.equal(value, twin.get_parameter(name).grad), name
    seen = {name for driver in drivers for name in driver.whole_gradients()}
    assert seen == {name for name in weights if name.startswith(prefix)}


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
        return replay.forward(layer, calls, run, buffer)[1]

    def backward() -> float:
        run = partial(driver.stack.block, layer, leaf, calls)
        output, fraction = replay.backward(layer, calls, run, buffer, first.result())
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
