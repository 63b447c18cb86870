"""How blocks are cut, and in which order their pieces are needed."""

import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import AutoConfig

from common.errors import UserError
from common.models.meta_model import build_meta_model
from fuyou.layout.record_parts import PiecePart
from fuyou.model.expert_modules import expert_modules, expert_output_bytes
from fuyou.model.streamed_model import StreamedModel
from fuyou.pieces import division, recording
from fuyou.pieces.division import divide, find_order
from fuyou.pieces.handles import PieceHandles
from tests.helpers.models.piece_models import PieceModel
from tests.helpers.models.routed import RoutedConfig
from tests.helpers.models.small_models import small_config
from tests.helpers.piece_driver import OrdinaryBlock, PieceDriver


def cut(model: PieceModel, layer: int, limit: int) -> tuple[tuple[PiecePart, ...], ...]:
    base = model.base_of_block(layer)
    return divide(model.stack, layer, limit, list(base), lambda name: base[name].nbytes)


@pytest.mark.parametrize("family", ["llama", "gpt2", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
def test_pieces_hold_every_parameter_once_within_the_limit(family, share):
    model = PieceModel(family)
    layer = len(model.stack.blocks) - 1
    base = model.base_of_block(layer)
    limit = int(share * sum(value.nbytes for value in base.values()))
    pieces = cut(model, layer, limit)
    covered: dict[str, int] = {}
    for piece in pieces:
        size = 0
        for part in piece:
            rows = base[part.name].shape[0] if part.experts is None else part.experts[1] - part.experts[0]
            covered[part.name] = covered.get(part.name, 0) + rows
            size += base[part.name].nbytes // base[part.name].shape[0] * rows
        one_expert = part.experts is not None and part.experts[1] - part.experts[0] == 1
        uncuttable = len({part.name.rpartition(".")[0] for part in piece}) == 1 and part.experts is None
        for_each_document = family == "gpt_oss" and all(".self_attn." in part.name for part in piece)
        assert size <= limit or one_expert or uncuttable or for_each_document
    assert covered == {name: value.shape[0] for name, value in base.items()}


def test_experts_whose_output_is_saved_are_computed_again():
    """A norm behind the experts saves its input."""

    class Normed(nn.Module):
        def __init__(self, inner: nn.Module):
            super().__init__()
            self.inner, self.norm = inner, nn.LayerNorm(inner.experts.hidden_dim)

        def forward(self, hidden):
            return self.norm(self.inner(hidden))

    plain = build_meta_model(small_config("qwen3_moe"))
    with torch.device("meta"):
        for block in plain.model.layers:
            block.mlp = Normed(block.mlp)
    stack = StreamedModel(plain, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: torch.randn(value.shape, generator=generator) * 0.2
        for name, value in plain.named_parameters()
        if name.startswith("model.layers.0.")
    }
    driver = PieceDriver(stack, 0, weights)
    seen = [stage.piece for stage in driver.order.backward]
    ranges = [index for index, piece in enumerate(driver.pieces) if piece[0].experts is not None]
    assert all(seen.count(index) == 2 or index == ranges[-1] for index in ranges)
    _, calls = stack.embed_without_weights({"input_ids": torch.zeros(1, 9, dtype=torch.long)})
    hidden, gradient = (torch.randn(calls.hidden_shape, generator=generator) for _ in range(2))
    ordinary = OrdinaryBlock(stack, 0, weights)
    expected = ordinary.backward(hidden, calls, gradient)
    assert torch.equal(driver.forward([hidden], [calls])[0], ordinary.forward(hidden, calls))
    assert torch.equal(driver.backward([hidden], [calls], [gradient])[0], expected)
    for name, value in driver.whole_gradients().items():
        assert torch.equal(value, ordinary.leaves[name].grad), name


def test_equal_blocks_of_a_large_mixture_are_learnt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek-V3 as published: 61 blocks of two kinds."""
    stack = StreamedModel(
        build_meta_model(AutoConfig.for_model("deepseek_v3"), dtype=torch.bfloat16), torch.device("cpu")
    )
    passes, counts, runs = [], [], []

    def record(*given: object, **named: object) -> object:
        passes.append(given)
        return recording.record(*given, **named)

    monkeypatch.setattr(division, "record", record)
    for layer in range(len(stack.blocks)):
        prefix = f"{stack.block_prefix}.{layer}."
        own = {
            name: value.nbytes for name, value in stack.model.named_parameters() if name.startswith(prefix)
        }
        pieces = divide(stack, layer, 1 << 30, list(own), own.__getitem__)
        find_order(stack, layer, pieces)
        counts.append(len(pieces))
        runs.append(len(passes))
    assert len(counts) == 61 and set(counts[:3]) == {counts[0]} and set(counts[3:]) == {counts[3]}
    assert counts[3] > 20 and 0 < runs[0] == runs[2] < runs[3] == runs[-1], "once for each kind"


# -- what cannot be cut ------------------------------------------------------------------------------------------------


def test_rejects_blocks_that_look_at_values() -> None:
    """Experts in a list: which of them get tokens is known only with values."""
    with pytest.raises(UserError, match="cannot be cut in pieces: running it without values"):
        cut(PieceModel(RoutedConfig(layers=2)), 0, 1)


def handles(model: PieceModel) -> PieceHandles:
    pieces = cut(model, 0, 20_000)
    return PieceHandles(model.stack, 0, pieces, set(), lambda part, gradient: None)


def test_takes_experts_of_the_oldest_transformers():
    """Version 5.17 has neither of these attributes."""
    model = PieceModel("mixtral")
    for layer, block in enumerate(model.stack.blocks):
        for later in ("_is_expert_parallel", "has_post_expert_norm"):
            vars(block.mlp.experts).pop(later, None)
        assert list(expert_modules(model.stack, layer))
    assert expert_output_bytes(model.stack) > 0
    handles(model)


@pytest.mark.parametrize(("attribute", "message"), [
    (None, "'batched_mm', which cannot be cut"), ("has_post_expert_norm", "norm with parameters"),
])  # fmt: skip
def test_rejects_experts_that_compute_otherwise(attribute, message):
    model = PieceModel("mixtral", experts=None if attribute else "batched_mm")
    experts = model.stack.blocks[0].mlp.experts
    if attribute is not None:
        setattr(experts, attribute, True)
        experts.post_expert_norm = nn.LayerNorm(8, device="meta")
    with pytest.raises(UserError, match=message):
        handles(model)


@pytest.mark.parametrize(("change", "message"), [
    (lambda weight: weight.add_(1.0), "changes its parameter .*q_proj"),
    (lambda weight: weight.data_ptr(), "cannot be cut in pieces"),
    (lambda weight: weight.view(torch.int32), "in another dtype"),
])  # fmt: skip
def test_rejects_what_handles_cannot_do(change, message):
    model = PieceModel("llama")
    projection = model.stack.blocks[0].self_attn.q_proj
    forward = projection.forward

    def changed(values):
        with torch.no_grad():
            change(projection.weight)
        return forward(values)

    projection.forward = changed
    with pytest.raises(UserError, match=message):
        cut(model, 0, 1)


def test_rejects_adapters_of_experts_that_are_not_computed_in_ranges():
    config = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["feed_forward.experts.down_proj"])
    with pytest.raises(UserError, match="has an adapter of down_proj, the weights of all experts"):
        cut(PieceModel("llama4_text", adapters=config), 0, 1)


def test_rejects_modules_that_keep_values_of_a_pass():
    """Passes of several micro-batches take turns, and would find each other's."""
    model = PieceModel("llama")
    block = model.stack.blocks[0]
    forward = block.mlp.forward

    def keeping(values):
        block.mlp.latest = values
        return forward(values)

    block.mlp.forward = keeping
    with pytest.raises(UserError, match="leaves values of a pass in modules"):
        cut(model, 0, 1)
