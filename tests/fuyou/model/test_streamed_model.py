"""Three parts make the whole model again, bit for bit, in ten families and without their code being touched."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, BigBirdConfig, PreTrainedConfig, PreTrainedModel, Trainer
from transformers.modeling_outputs import CausalLMOutput

from common.errors import FinetuneError, UserError
from common.models.meta_model import build_meta_model
from common.models.structure import parameter_names
from fuyou.layout.record import Kind, Precision
from fuyou.model.loss.cross_entropy import cross_entropy, shifted_labels
from fuyou.model.model_records import fingerprint, model_records
from fuyou.model.streamed_model import StreamedModel
from tests.helpers.models.families import FAMILIES, MIXED, family_config

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
SEQ_LEN = 12


def reference(family: str, dtype: torch.dtype, **changes: object) -> PreTrainedModel:
    """The whole model in memory, random everywhere; dropout off."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(family_config(family, **changes), dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape).to(dtype) * 0.1)
    return model.eval()


def streamed(family: str, dtype: torch.dtype, **changes: object) -> StreamedModel:
    stack = StreamedModel(build_meta_model(family_config(family, **changes), dtype=dtype), CPU)
    stack.model.eval()
    return stack


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters(remove_duplicate=False))


def unpacked(rows: int = 2) -> dict[str, torch.Tensor]:
    """One document in each row."""
    generator = torch.Generator().manual_seed(1)
    positions = torch.arange(SEQ_LEN).expand(rows, -1).contiguous()
    return {"input_ids": torch.randint(3, 199, (rows, SEQ_LEN), generator=generator), "position_ids": positions}


@contextmanager
def only(stack: StreamedModel, parameters: dict[str, torch.Tensor], part: str) -> Iterator[None]:
    """Bind what one part needs and nothing else: the rest stays on the meta device."""
    prefix = f"{stack.block_prefix}."
    outer = {name: value for name, value in parameters.items() if not name.startswith(prefix)}
    if part in ("embedding", "head"):
        with stack.bound(outer, before=part == "embedding"):
            yield
    else:
        mine = {name: value for name, value in parameters.items() if name.startswith(f"{prefix}{part}.")}
        with stack.bound(mine):
            yield


def run(stack: StreamedModel, parameters: dict[str, torch.Tensor], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """All parts, one after the other; the last block's output."""
    with only(stack, parameters, "embedding"):
        hidden, calls = stack.embed(batch)
    for layer in range(len(stack.blocks)):
        with only(stack, parameters, str(layer)):
            hidden = stack.block(layer, hidden, calls)
    return hidden


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_parts_equal_the_whole(family: str, dtype: torch.dtype) -> None:
    whole, stack, batch = reference(family, dtype), streamed(family, dtype), unpacked()
    expected = whole(**batch, use_cache=False, output_hidden_states=True)
    parameters = weights(whole)
    with only(stack, parameters, "embedding"):
        hidden, calls = stack.embed(batch)
    assert torch.equal(hidden, expected.hidden_states[0]) and hidden.shape[-1] == stack.hidden_size
    for layer in range(3):
        with only(stack, parameters, str(layer)):
            hidden = stack.block(layer, hidden, calls)
        if layer < 2:
            assert torch.equal(hidden, expected.hidden_states[layer + 1]), f"after block {layer}"
    with only(stack, parameters, "head"):
        logits = stack.head(batch, hidden)
    assert torch.equal(logits, expected.logits)
    assert all(parameter.is_meta for parameter in stack.model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_the_head_in_ranges_of_tokens(family: str) -> None:
    whole, stack, batch = reference(family, torch.float32), streamed(family, torch.float32), unpacked()
    parameters = weights(whole)
    hidden = run(stack, parameters, batch)
    expected = whole(**batch, use_cache=False).logits
    for width in (1, 5, SEQ_LEN):
        parts = []
        for start in range(0, SEQ_LEN, width):
            columns = slice(start, start + width)
            with only(stack, parameters, "head"):
                parts.append(stack.head({name: value[:, columns] for name, value in batch.items()}, hidden[:, columns]))
        torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-5, atol=1e-5)


class Waits(TorchDispatchMode):
    """Counts how often the host asks for a value on the device, and the masks that are made."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.waits, self.masks = length, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.waits += func is torch.ops.aten._local_scalar_dense.default
        result = func(*args, **(kwargs or {}))
        self.masks += isinstance(result, torch.Tensor) and result.shape[-2:] == (self.length, self.length)
        return result


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_waits_for_nothing_and_makes_no_mask(family: str) -> None:
    whole, stack = reference(family, torch.float32), streamed(family, torch.float32)
    length = 13  # no size of a small model
    hidden = torch.randn(2, length, stack.hidden_size)
    if stack.token_dim:
        ids = torch.zeros(2, length, dtype=torch.long)
        with only(stack, weights(whole), "head"), torch.no_grad(), Waits(length) as seen:
            stack.head({"input_ids": ids, "position_ids": torch.arange(length).expand(2, -1)}, hidden)
        assert (seen.waits, seen.masks) == (0, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_parts_equal_those_of_the_whole(family: str) -> None:
    """Backward through head, blocks and embedding, each recomputed on its own."""
    whole, stack, batch = reference(family, torch.float32), streamed(family, torch.float32), unpacked()
    labels = batch["input_ids"]
    whole(**batch, labels=labels, use_cache=False).loss.backward()
    parameters = {name: nn.Parameter(value.detach()) for name, value in whole.named_parameters()}
    aliases = {names[0]: names for names in parameter_names(whole)}
    bound = {alias: value for name, value in parameters.items() for alias in aliases[name]}
    targets = shifted_labels(labels)

    with torch.no_grad():
        with only(stack, bound, "embedding"):
            first, calls = stack.embed(batch)
        inputs = [first]
        for layer in range(3):
            with only(stack, bound, str(layer)):
                inputs.append(stack.block(layer, inputs[-1], calls))
    hidden = inputs[3].requires_grad_()
    with only(stack, bound, "head"):
        logits = stack.head(batch, hidden)
        _, gradient = cross_entropy(logits, targets, (targets != -100).sum(), gradient=True)
        torch.autograd.backward(logits, gradient)
    for layer in reversed(range(3)):
        gradient, hidden = hidden.grad, inputs[layer].detach().requires_grad_()
        with only(stack, bound, str(layer)):
            torch.autograd.backward(stack.block(layer, hidden, calls), gradient)
    with only(stack, bound, "embedding"):
        torch.autograd.backward(stack.embed(batch)[0], hidden.grad)
    for name, parameter in whole.named_parameters():
        ours, theirs = parameters[name].grad, parameter.grad
        if theirs is None:
            assert ours is None or not ours.any(), name
        elif len(aliases[name]) > 1 or (family in MIXED and ours is None):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)  # summed in another order
        else:
            assert torch.equal(ours, theirs), name


# -- documents --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_documents_of_a_row_are_computed_as_if_each_were_alone(family: str) -> None:
    whole, stack, batch = reference(family, torch.float32), streamed(family, torch.float32), unpacked()
    batch["position_ids"] = torch.cat([torch.arange(3), torch.arange(SEQ_LEN - 3)]).expand(2, -1).contiguous()
    batch["position_ids"][1] = torch.arange(SEQ_LEN).remainder(7)
    hidden = run(stack, weights(whole), batch)
    with only(stack, weights(whole), "head"):
        logits = stack.head(batch, hidden)
    for row, starts in enumerate(([0, 3, SEQ_LEN], [0, 7, SEQ_LEN])):
        for start, end in pairwise(starts):
            alone = whole(input_ids=batch["input_ids"][row : row + 1, start:end], use_cache=False).logits
            torch.testing.assert_close(logits[row : row + 1, start:end], alone, rtol=1e-5, atol=1e-5)


# -- binding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_is_as_it_was_afterwards(family: str) -> None:
    stack = streamed(family, torch.float32)
    before = {name: (id(parameter), parameter.is_meta) for name, parameter in weights(stack.model).items()}
    forwards = [module for module in stack.model.modules() if "forward" in vars(module)]
    parameters = {name: torch.zeros(value.shape) for name, value in weights(stack.model).items()}
    with torch.no_grad(), stack.bound(parameters):
        assert all(value is parameters[name] for name, value in weights_of(stack))
    with pytest.raises(ZeroDivisionError), stack.bound(parameters):
        _ = 1 / 0
    with torch.no_grad():
        run(stack, parameters, unpacked(1))
    assert {name: (id(value), value.is_meta) for name, value in weights(stack.model).items()} == before
    assert [module for module in stack.model.modules() if "forward" in vars(module)] == forwards == []
    assert list(stack.model.get_submodule(stack.block_prefix)) == stack.blocks


def weights_of(stack: StreamedModel) -> list[tuple[str, torch.Tensor]]:
    """What the modules really hold, plain tensors included."""
    return [
        (f"{prefix}.{name}" if prefix else name, value)
        for prefix, module in stack.model.named_modules()
        for name, value in module._parameters.items()
        if value is not None
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_runs_before_the_blocks(family: str) -> None:
    stack = streamed(family, torch.float32)
    prefix = f"{stack.block_prefix}."
    before = {name for name, _ in weights_of(stack) if not name.startswith(prefix) and stack.runs_before_blocks(name)}
    expected = {
        "gpt2": {"transformer.wte.weight", "transformer.wpe.weight"},
        "opt": {"model.decoder.embed_tokens.weight", "model.decoder.embed_positions.weight"},
        "gpt_neox": {"gpt_neox.embed_in.weight"},
    }
    assert before == expected.get(family, {"model.embed_tokens.weight"})


# -- records of a model -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_records_hold_every_parameter_once(family: str, tied: bool) -> None:
    stack = streamed(family, torch.bfloat16, tie_word_embeddings=tied)
    shape = model_records(stack, Precision(torch.bfloat16, torch.float32))
    held = [slot.names for record in shape.records for slot in record.parameters]
    assert sorted(held) == sorted(parameter_names(stack.model))
    decayed = Trainer.get_decay_parameter_names(None, stack.model)
    for record in shape.records:
        for slot in record.parameters:
            parameter = stack.model.get_parameter(slot.name)
            assert slot.shape == tuple(parameter.shape)
            assert slot.decay == (slot.name in decayed)
            assert (record.kind is Kind.NON_BLOCK) != slot.name.startswith(f"{stack.block_prefix}.")
    assert [record.index for record in shape.records] == list(range(len(shape.records)))
    assert [shape.records[index].name for (index,) in shape.blocks] == ["block 0", "block 1", "block 2"]
    if tied:
        assert shape.embedding == shape.head and len(shape.records) == 4
    else:
        assert [record.name for record in shape.records[:2]] == ["embedding", "head"] and len(shape.records) == 5
        assert {slot.name for slot in shape.records[shape.embedding].parameters} == {
            name for name, _ in weights_of(stack)
            if not name.startswith(f"{stack.block_prefix}.") and stack.runs_before_blocks(name)
        }  # fmt: skip


def test_fingerprints_tell_layouts_apart() -> None:
    precision = Precision(torch.float32, torch.float32)
    prints = [
        fingerprint(model_records(streamed("llama", torch.float32, **changes), precision).records)
        for changes in ({}, {}, {"tie_word_embeddings": True}, {"num_hidden_layers": 2}, {"intermediate_size": 56})
    ]
    assert prints[0] == prints[1] and len(set(prints)) == 4


# -- models that are not like the others ------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.mix = nn.Linear(size, size)

    def forward(self, hidden: torch.Tensor, scale: float = 1.0, use_cache: bool = False) -> tuple[torch.Tensor, None]:
        return hidden + torch.tanh(self.mix(hidden)) * scale, None


class TupleConfig(PreTrainedConfig):
    model_type = "tuple_blocks"

    def __init__(self, skip: int = 0, broken: bool = False, **kwargs: object):
        super().__init__(**kwargs)
        self.hidden_size, self.vocab_size, self.num_hidden_layers = 24, 31, 4
        self.skip, self.broken = skip, broken


class TupleModel(PreTrainedModel):
    """Blocks return a tuple and are called with a separate argument each."""

    config_class = TupleConfig

    def __init__(self, config: TupleConfig):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Block(config.hidden_size) for _ in range(config.num_hidden_layers)])
        self.norm = nn.LayerNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None, use_cache: bool = False
    ) -> CausalLMOutput:
        hidden = self.embedding(input_ids)
        if self.config.broken:
            raise RuntimeError("no such kernel")
        for index, layer in enumerate(self.layers[: len(self.layers) - self.config.skip]):
            hidden = layer(hidden, index + 0.5, use_cache=use_cache)[0]
        return CausalLMOutput(logits=self.head(self.norm(hidden)))


def tuple_stack(**options: object) -> StreamedModel:
    with torch.device("meta"):
        model = TupleModel(TupleConfig(**options))
    return StreamedModel(model.eval(), CPU)


@torch.no_grad()
def test_blocks_that_return_tuples() -> None:
    torch.manual_seed(0)
    whole, stack, batch = TupleModel(TupleConfig()).eval(), tuple_stack(), unpacked()
    batch["input_ids"] %= 31
    expected = whole(**batch).logits
    parameters = weights(whole)
    for _ in range(2):
        hidden = run(stack, parameters, batch)
        with only(stack, parameters, "head"):
            assert torch.equal(stack.head(batch, hidden), expected)


def test_a_model_that_skips_a_block_is_rejected() -> None:
    with pytest.raises(FinetuneError, match="called 3 of its 4 blocks"):
        tuple_stack(skip=1)


def test_a_model_that_cannot_run_without_its_weights_is_rejected() -> None:
    with pytest.raises(UserError, match=r"cannot be split at its blocks.*RuntimeError: no such kernel"):
        tuple_stack(broken=True)


def test_a_model_that_replaces_its_modules_is_rejected() -> None:
    """As BigBird does, whose short rows have another attention."""
    config = BigBirdConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=6, num_attention_heads=4, intermediate_size=96,
        max_position_embeddings=64, is_decoder=True,
    )  # fmt: skip
    with pytest.raises(UserError, match="replaces its own modules in a forward pass"):
        StreamedModel(build_meta_model(config), torch.device("cpu"))
