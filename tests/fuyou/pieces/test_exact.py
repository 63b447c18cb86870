"""Blocks in pieces give what ordinary blocks give, bit for bit: outputs, and the gradients of inputs and weights."""

import contextlib

import pytest
import torch
from peft import LoraConfig

from common.errors import UserError
from tests.helpers.models.piece_models import PieceModel
from tests.helpers.models.small_models import small_config
from tests.helpers.piece_driver import OrdinaryBlock, PieceDriver
from tests.helpers.rounding import ALIGNED_ALIKE

FAMILIES = ("llama", "gpt2", "qwen3_moe", "deepseek_v3", "gpt_oss", "mixtral")
TARGETS = {
    "gpt2": ["c_attn"], "deepseek_v3": ["q_a_proj", "kv_b_proj", "o_proj"],
}  # fmt: skip


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether they differ by what one rounding to bf16 makes of the largest, at most."""
    return bool((found - expected).abs().max() <= 1e-3 * expected.abs().max())


def compare(
    model: PieceModel, layer: int, rows: list[int], *, micro_major: bool = False, **inputs
) -> PieceDriver:
    """One forward and one backward pass of a block, both ways."""
    given = model.inputs(rows, **inputs)
    ordinary = OrdinaryBlock(model.stack, layer, model.of_block(layer))
    expected = [ordinary.forward(*one) for one in zip(given.hidden, given.calls, strict=True)]
    expected_gradients = [
        ordinary.backward(*one) for one in zip(given.hidden, given.calls, given.gradients, strict=True)
    ]
    base = model.base_of_block(layer)
    driver = PieceDriver(model.stack, layer, base)
    others = {
        name: torch.nn.Parameter(value.clone(), model.stack.model.get_parameter(name).requires_grad)
        for name, value in model.of_block(layer).items()
        if name not in base
    }
    with model.stack.bound(others) if others else contextlib.nullcontext():
        outputs = driver.forward(given.hidden, given.calls)
        gradients = driver.backward(
            given.hidden, given.calls, given.gradients, piece_by_piece=not micro_major
        )
    for got, wanted in zip(outputs + gradients, expected + expected_gradients, strict=True):
        assert torch.equal(got, wanted)
    whole = driver.whole_gradients()
    for name, leaf in ordinary.leaves.items():
        if name in others:
            found = others[name].grad
        else:
            found = whole.get(name)
        assert (found is None) == (leaf.grad is None), name
        if found is not None:
            same = ALIGNED_ALIKE or ".experts." not in name
            assert torch.equal(found, leaf.grad) or (not same and close(found, leaf.grad)), name
    assert len(driver.pieces) > 1  # few where a whole module is called once for each document
    return driver


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_trained(family, dtype):
    model = PieceModel(family, dtype)
    compare(model, len(model.stack.blocks) - 1, [2, 1, 2])


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_next",
        "llama4_text",
        "gemma4_text",
        "mamba",
        pytest.param("glm4_moe_lite", marks=pytest.mark.slow),
    ],
)
def test_other_kinds_of_blocks(family):
    """Linear attention, experts outside of transformers' interface, links between blocks."""
    model = PieceModel(family)
    for layer in (0, len(model.stack.blocks) - 1):
        compare(model, layer, [1, 2])


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss"])
def test_micro_batch_by_micro_batch_in_the_backward_pass(family):
    model = PieceModel(family)
    driver = compare(model, 0, [1, 2], micro_major=True)
    once = list(driver.order.forward) + [stage.piece for stage in driver.order.backward] * 2
    assert driver.uploads == once


@pytest.mark.parametrize(("family", "dtype"), list(zip(FAMILIES, ("fp32", "bf16") * 3, strict=True)))
def test_frozen_base_with_adapters(family, dtype):
    targets = TARGETS.get(family, ["q_proj", "v_proj"])
    model = PieceModel(family, dtype, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    driver = compare(model, len(model.stack.blocks) - 1, [1, 2])
    assert not driver.arrived
    assert not any(stage.trains for stage in driver.order.backward)


def test_loops_over_experts_are_rejected():
    model = PieceModel("qwen3_moe", experts="eager")
    with pytest.raises(
        UserError, match="implementation 'eager', which cannot be cut in pieces: use grouped_mm"
    ):
        PieceDriver(model.stack, 0, model.base_of_block(0))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_documents_of_packed_rows(family):
    """Micro-batches with their own documents take turns."""
    compare(PieceModel(family), 0, [1, 2, 1], documents=True)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_dropout_draws_the_same_numbers(dropout):
    config = small_config("gpt2")
    config.resid_pdrop = config.attn_pdrop = dropout
    model = PieceModel(config)
    given = model.inputs([2])
    ordinary = OrdinaryBlock(model.stack, 1, model.of_block(1))
    driver = PieceDriver(model.stack, 1, model.of_block(1))
    torch.manual_seed(11)
    expected = ordinary.forward(given.hidden[0], given.calls[0])
    after = torch.get_rng_state()
    torch.manual_seed(11)
    before = torch.get_rng_state()
    (got,) = driver.forward(given.hidden, given.calls)
    assert torch.equal(got, expected)
    assert torch.equal(torch.get_rng_state(), before)
    assert (dropout == 0.0) == torch.equal(after, before)
    torch.manual_seed(11)
    expected = ordinary.backward(given.hidden[0], given.calls[0], given.gradients[0])
    torch.manual_seed(12)
    (got,) = driver.backward(given.hidden, given.calls, given.gradients, random_state=(before,))
    assert torch.equal(got, expected)
    for name, gradient in driver.whole_gradients().items():
        assert torch.equal(gradient, ordinary.leaves[name].grad), name


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def adapted_experts(family: str) -> LoraConfig:
    """Adapters of everything: attention, routers, and all experts' parameters."""
    named = family == "gpt_oss"  # whose experts peft adapts only if they are named
    return LoraConfig(
        r=4, lora_alpha=12, target_modules=["q_proj"] if named else "all-linear",
        target_parameters=[*EXPERTS, "mlp.router.weight"] if named else None, init_lora_weights=False,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "mixtral"])
def test_adapters_of_experts(family, dtype):
    """Two micro-batches; in bf16 the factors are fp32, and the range's weights bf16."""
    model = PieceModel(family, dtype, adapted_experts(family))
    layer = len(model.stack.blocks) - 1
    driver = compare(model, layer, [1, 2])
    ranges = {part.experts for piece in driver.pieces for part in piece if part.experts is not None}
    assert len(ranges) > 1 and not driver.arrived
    adapted = {name.rpartition(".lora_")[0] for name in model.of_block(layer) if ".lora_A." in name}
    assert sum(".experts" in name for name in adapted) == 2
    assert any(name.endswith((".router", ".gate")) for name in adapted)


def test_adapters_of_experts_in_one_micro_batch():
    """Few tokens, so that ranges get none and all their factors' gradients are zero."""
    model = PieceModel("qwen3_moe", "bf16", adapted_experts("qwen3_moe"))
    compare(model, 0, [1], tokens=2)


def test_experts_and_their_adapters_trained_together():
    model = PieceModel("mixtral", "fp32", adapted_experts("mixtral"))
    for name, parameter in model.stack.model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or name.endswith("down_proj"))
    driver = compare(model, 0, [1, 2])
    assert {part.name.rpartition(".")[2] for part in driver.arrived} == {"down_proj"}


def test_several_adapters_at_once_are_rejected():
    model = PieceModel("mixtral", "fp32", adapted_experts("mixtral"))
    wrapper = model.stack.model.get_submodule("model.layers.0.mlp.experts")
    wrapper.update_layer("second", 2, 4, adapted_experts("mixtral"))
    wrapper._active_adapter = ["default", "second"]
    with pytest.raises(
        UserError, match=r"the active adapters .'default', 'second'.: in pieces there must be one"
    ):
        PieceDriver(model.stack, 0, model.base_of_block(0))
