"""Seconds of a block's parts against sums done by hand, and the host's work as a bound from below."""

from types import SimpleNamespace

import pytest
from transformers import LlamaConfig

from common.hardware.compute_rates import AttentionRates, ComputeRates
from common.models.adapters.options import AdapterOptions
from fuyou.layout.model_layout import Phase
from fuyou.model.recompute.policy import chunk_attention_flops
from fuyou.planner import describe_training
from fuyou.planner.evaluate import Evaluator
from fuyou.planner.machine import Machine
from fuyou.planner.roofline import block_seconds
from fuyou.planner.simulator import TaskRates

RATES = ComputeRates(100e12, 50e12, {"flash2": AttentionRates(40e12, 20e12)}, 1e12)


def operator(name, flops, moved):
    return SimpleNamespace(name=name, flops=flops, moved_bytes=moved)


def trace(*operators):
    return SimpleNamespace(operators=operators, required=lambda: range(len(operators) - 1))


def test_every_kind_of_operator_has_its_rate():
    calls = trace(
        operator("aten._scaled_dot_product_flash_attention.default", 8e12, 0),
        operator("aten._grouped_mm.default", 50e12, 0),
        operator("aten.mul.Tensor", 0.0, 2e12),
        operator("aten.mm.default", 100e12, 0),
    )
    seconds = block_seconds(calls, RATES, trained=True)
    assert seconds.forward == pytest.approx(0.1 + 1.0 + 2.0 + 1.0)  # half of the pairs of tokens are computed
    assert seconds.again == pytest.approx(seconds.forward - 1.0)  # the last product is not needed
    assert seconds.gradients == pytest.approx(2.5 * 4 / 20 + 2 * 1.0 + 2 * 2.0 + 2 * 1.0)
    frozen = block_seconds(calls, RATES, trained=False)
    assert frozen.gradients == pytest.approx(seconds.gradients - 1.0 - 1.0)


def test_small_products_take_as_long_as_their_bytes():
    seconds = block_seconds(trace(operator("aten.mm.default", 1e12, 3e12)), RATES, trained=False)
    assert seconds.forward == pytest.approx(3.0)


@pytest.mark.parametrize("targets", ["q_proj", "all-linear"])
def test_chunks_attend_at_the_rates_of_attention_whatever_is_adapted(targets):
    """The rest of a block, which adapters make slower, has no part in it."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=128,
    )  # fmt: skip
    adapters = AdapterOptions(2, targets=(targets,)).peft_config()
    job = describe_training(config, 1, 128, adapters=adapters, chunk=32)
    slow = TaskRates(1e12, 1, 1, 1, 1, 1)
    evaluator = Evaluator(job, Machine("a GPU", "a drive", slow, 1 << 30, 1 << 30, compute=RATES))
    rates, counted = evaluator.rates, chunk_attention_flops(job.stack, 128, 32)
    for flops, (forward, backward) in zip(counted, evaluator._chunk_flops, strict=True):
        assert forward / rates.flops_per_second == pytest.approx(flops / 40e12)
        assert backward / rates.backward_flops_per_second == pytest.approx(
            flops / 40e12 + 2.5 * flops / 20e12
        )


@pytest.mark.parametrize(("phase", "host"), [(Phase.BLOCK_FORWARD, 0.002), (Phase.BLOCK_BACKWARD, 0.006)])
def test_a_visit_takes_at_least_the_hosts_work(phase, host):
    rates = TaskRates(1e12, 1, 1, 1, 1, 1, host_seconds=(0.002, 0.006))
    visit = SimpleNamespace(phase=phase, part=None, completes=())
    task = SimpleNamespace(visit=visit, flops=1e6, tokens=1, last=False)
    assert rates.compute_seconds(task) == host
    task.flops = 1e12
    assert rates.compute_seconds(task) == pytest.approx(1.0)
    visit.part = object()  # pieces of a block share its work
    task.flops = 1e6
    assert rates.compute_seconds(task) == pytest.approx(1e-6)


def test_what_is_done_to_weights_does_not_grow_with_rows():
    name = "aten.baddbmm.default"
    row, half = trace(operator(name, 2e12, 8e12)), trace(operator(name, 2e12, 7e12))  # 6e12 bytes of weights
    assert block_seconds(row, RATES, trained=False, rows=4, shorter=half).forward == pytest.approx(6 + 4 * 2)
    assert block_seconds(row, RATES, trained=False, rows=4).forward == pytest.approx(4 * 8)
    assert (
        block_seconds(trace(operator("aten.set_.source_Tensor", 0.0, 8e12)), RATES, trained=False).forward
        == 0
    )
