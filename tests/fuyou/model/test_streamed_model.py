"""Three parts make the whole model again, bit for bit, in ten families and without their code being touched."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, Trainer
from transformers.modeling_outputs import CausalLMOutput

from common.errors import FinetuneError, UserError
from common.models.meta_model import build_meta_model
from common.models.structure import parameter_names
from fuyou.layout.record import Kind, Precision
from fuyou.model.model_records import fingerprint, model_records
from fuyou.model.streamed_model import StreamedModel
from tests.helpers.models.families import FAMILIES, family_config

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
    return {
        "input_ids": torch.randint(3, 199, (rows, SEQ_LEN), generator=generator),
        "position_ids": positions,
    }


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


# -- binding ----------------------------------------------------------------------------------------------------------


def weights_of(stack: StreamedModel) -> list[tuple[str, torch.Tensor]]:
    """What the modules really hold, plain tensors included."""
    return [
        (f"{prefix}.{name}" if prefix else name, value)
        for prefix, module in stack.model.named_modules()
        for name, value in module._parameters.items()
        if value is not None
    ]


# -- records of a model -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_records_hold_every_parameter_once(family: str, tied: bool) -> None:
    stack = streamed(family, torch.bfloat16, tie_word_embeddings=tied)
    layout = model_records(stack, Precision(torch.bfloat16))
    held = [slot.names for record in layout.records for slot in record.parameters]
    assert sorted(held) == sorted(parameter_names(stack.model))
    decayed = Trainer.get_decay_parameter_names(None, stack.model)
    for record in layout.records:
        for slot in record.parameters:
            parameter = stack.model.get_parameter(slot.name)
            assert slot.shape == tuple(parameter.shape)
            assert slot.decay == (slot.name in decayed)
            assert (record.kind is Kind.NON_BLOCK) != slot.name.startswith(f"{stack.block_prefix}.")
    assert [record.index for record in layout.records] == list(range(len(layout.records)))
    assert [layout.records[index].name for (index,) in layout.blocks] == ["block 0", "block 1", "block 2"]
    if tied:
        assert layout.embedding == layout.head and len(layout.records) == 4
    else:
        assert [record.name for record in layout.records[:2]] == ["embedding", "head"] and len(
            layout.records
        ) == 5
        assert {slot.name for slot in layout.records[layout.embedding].parameters} == {
            name for name, _ in weights_of(stack)
            if not name.startswith(f"{stack.block_prefix}.") and stack.runs_before_blocks(name)
        }  # fmt: skip


def test_fingerprints_tell_layouts_apart() -> None:
    precision = Precision(torch.float32)
    prints = [
        fingerprint(model_records(streamed("llama", torch.float32, **changes), precision).records)
        for changes in (
            {},
            {},
            {"tie_word_embeddings": True},
            {"num_hidden_layers": 2},
            {"intermediate_size": 56},
        )
    ]
    assert prints[0] == prints[1] and len(set(prints)) == 4


# -- models that are not like the others ------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.mix = nn.Linear(size, size)

    def forward(
        self, hidden: torch.Tensor, scale: float = 1.0, use_cache: bool = False
    ) -> tuple[torch.Tensor, None]:
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


def test_a_model_that_skips_a_block_is_rejected() -> None:
    with pytest.raises(FinetuneError, match="called 3 of its 4 blocks"):
        tuple_stack(skip=1)


def test_a_model_that_cannot_run_without_its_weights_is_rejected() -> None:
    with pytest.raises(UserError, match=r"cannot be split at its blocks.*RuntimeError: no such kernel"):
        tuple_stack(broken=True)
