"""What links blocks next to hidden states is streamed with its gradients, or the model is refused."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from common.errors import UserError
from common.models.meta_model import build_meta_model
from common.models.miniature import miniature
from common.models.structure import parameter_names
from fuyou.model.recompute.replay import BlockReplay
from fuyou.model.streamed_model import StreamedModel

CPU = torch.device("cpu")
Batch = Mapping[str, torch.Tensor]


class LinkedConfig(PreTrainedConfig):
    model_type = "linked"

    def __init__(self, link: str = "none", **kwargs: Any):
        super().__init__(**kwargs)
        self.hidden_size, self.vocab_size, self.num_hidden_layers = 24, 31, 4
        self.link = link


class LinkedBlock(nn.Module):
    """One product, and one more for each kind of link."""

    def __init__(self, size: int, index: int):
        super().__init__()
        self.linear, self.gate = nn.Linear(size, size), nn.Linear(size, size)
        self.index = index

    def forward(
        self, hidden: torch.Tensor, extra: torch.Tensor | None = None, shared: dict[str, Any] | None = None
    ) -> Any:
        result = hidden + torch.tanh(self.linear(hidden))
        if extra is not None:
            result = result + self.gate(hidden) * extra
        if shared is not None:
            if self.index in (0, 1):  # the second one takes the place of the first one's
                shared["keys"] = (self.gate(hidden), hidden * 0.5)
            if self.index > 0:
                result = result + shared["keys"][0] * shared["keys"][1]
        return result


class HandingBlock(LinkedBlock):
    """Returns a value for the next block, and one that nobody wants."""

    def forward(self, hidden: torch.Tensor, handed: torch.Tensor | None = None, _: Any = None) -> Any:
        return super().forward(hidden, handed), self.gate(hidden).sigmoid(), None, hidden.mean()


class LinkedModel(PreTrainedModel):
    """Four blocks, linked as ``config.link`` says."""

    config_class = LinkedConfig

    def __init__(self, config: LinkedConfig):
        super().__init__(config)
        size = config.hidden_size
        self.embedding, self.inputs = (
            nn.Embedding(config.vocab_size, size),
            nn.Embedding(config.vocab_size, 4 * size),
        )
        self.scale = nn.Parameter(torch.ones(size))  # of no module that is called
        kind = HandingBlock if config.link == "handed" else LinkedBlock
        self.layers = nn.ModuleList([kind(size, index) for index in range(config.num_hidden_layers)])
        self.between, self.norm = nn.LayerNorm(size), nn.LayerNorm(size)
        self.head = nn.Linear(size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None, use_cache: bool = False
    ) -> CausalLMOutput:
        link = self.config.link
        hidden = self.embedding(input_ids) * self.scale
        extras = self.inputs(input_ids).unflatten(-1, (4, -1))
        first, shared, handed, before = hidden, {}, None, hidden
        for index, layer in enumerate(self.layers):
            match link:
                case "carried":  # an input of each layer, and the same tensor for all of them
                    hidden = layer(hidden, extras[..., index, :] + first)
                case "shared":
                    hidden = layer(hidden, shared=shared)
                case "handed":
                    hidden, handed, _, _ = layer(hidden, handed)
                case "edited":
                    hidden = layer(hidden)
                    if index < 2:
                        hidden = hidden.clone()
                        chosen = input_ids % 2 == 0
                        hidden[chosen, :] = hidden[chosen, :] + extras[..., index, :][chosen]
                case "edited in place":
                    hidden = layer(hidden)
                    if index < 2:
                        hidden.mul_(0.5)
                case "parameters between":
                    hidden = self.between(layer(hidden))
                case "earlier block":
                    before, hidden = hidden, layer(hidden + before)
                case "argument of a block":
                    hidden = layer(hidden, hidden * 0.5)
                case "decision":
                    hidden = layer(hidden)
                    hidden = hidden * 2 if hidden.sum() > 0 else hidden
                case _:
                    hidden = layer(hidden)
        return CausalLMOutput(logits=self.head(self.norm(hidden)))


def randomise(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)


def linked_pair(link: str) -> tuple[PreTrainedModel, StreamedModel]:
    torch.manual_seed(0)
    whole = LinkedModel(LinkedConfig(link))
    randomise(whole)
    with torch.device("meta"):
        meta = LinkedModel(LinkedConfig(link))
    return whole, StreamedModel(meta, CPU)


def family_pair(family: str) -> tuple[PreTrainedModel, StreamedModel]:
    config = miniature(CONFIG_MAPPING[family]())
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32).train()
    randomise(whole)
    stack = StreamedModel(build_meta_model(config), CPU)
    for name, buffer in whole.named_buffers():
        stack.model.get_buffer(name).copy_(buffer)
    for module in (*whole.modules(), *stack.model.modules()):
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return whole, stack


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Pass:
    """A forward and a backward pass part by part, as the engine makes it; parameters of one part at a time."""

    def __init__(self, whole: PreTrainedModel, stack: StreamedModel):
        self.stack, self.again = stack, BlockReplay()
        self.parameters = {name: nn.Parameter(value.detach()) for name, value in whole.named_parameters()}
        names = {aliases[0]: aliases for aliases in parameter_names(whole)}
        bound = {alias: value for name, value in self.parameters.items() for alias in names[name]}
        prefix = f"{stack.block_prefix}."
        self.outer = {name: value for name, value in bound.items() if not name.startswith(prefix)}
        self.blocks = [
            {name: value for name, value in bound.items() if name.startswith(f"{prefix}{index}.")}
            for index in range(len(stack.blocks))
        ]

    def run(self, batch: Batch) -> float:
        stack, inputs, recorded = self.stack, [], []
        for parameter in self.parameters.values():
            parameter.grad = None
        with torch.no_grad():
            with stack.bound(self.outer, before=True):
                hidden, calls = stack.embed(batch)
            for index, parameters in enumerate(self.blocks):
                inputs.append(hidden)
                with stack.bound(parameters):
                    hidden, script = self.again.forward(index, calls, self._block(index, hidden, calls), None)
                recorded.append(script)
        leaf = hidden.detach().requires_grad_()
        with stack.bound(self.outer, before=False):
            loss = loss_of(stack.head(batch, leaf), batch["input_ids"])
            loss.backward()
        gradient = leaf.grad
        for index in reversed(range(len(self.blocks))):
            leaf = inputs[index].detach().requires_grad_()
            with stack.bound(self.blocks[index]):
                run = self._block(index, leaf, calls)
                result, _ = self.again.backward(index, calls, run, None, recorded[index])
                assert gradient is not None
                calls.backward(result, gradient)
            gradient = leaf.grad
        with stack.bound(self.outer, before=True):
            hidden, second = stack.embed(batch)
            values, gradients = calls.embedding_gradients(second)
            torch.autograd.backward([*values, hidden], [*gradients, gradient])
        return loss.item()

    def _block(self, index: int, hidden: torch.Tensor, calls: Any) -> Callable[[], torch.Tensor]:
        return lambda: self.stack.block(index, hidden, calls)


def check(whole: PreTrainedModel, stack: StreamedModel, vocabulary: int) -> None:
    """Twice: the second backward pass takes the short cuts that the first one has found."""
    streamed = Pass(whole, stack)
    for seed in (1, 2):
        batch = {
            "input_ids": torch.randint(1, vocabulary, (2, 24), generator=torch.Generator().manual_seed(seed))
        }
        whole.zero_grad()
        loss = loss_of(whole(**batch, use_cache=False).logits, batch["input_ids"])
        loss.backward()
        assert streamed.run(batch) == loss.item()
        for name, parameter in whole.named_parameters():
            expected, found = parameter.grad, streamed.parameters[name].grad
            if expected is None:
                assert found is None or not found.any(), name
            else:
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("link", ["none", "carried", "shared", "handed", "edited", "edited in place"])
def test_gradients_flow_through_links(link: str) -> None:
    whole, stack = linked_pair(link)
    check(whole, stack, 31)


def test_links_are_found_and_counted() -> None:
    counted = {}
    for link in ("none", "carried", "shared", "handed", "edited"):
        _, stack = linked_pair(link)
        counted[link] = stack.links, stack.carried_bytes(10)
    value = 10 * 24 * 4 * 2  # of a row of ten tokens, with its gradient
    assert not counted["none"][0] and counted["none"][1] == 0
    assert len(counted["carried"][0].carried) == 4 and counted["carried"][1] == 4 * value
    assert counted["shared"][0].shared and counted["shared"][1] == 4 * value  # twice two
    assert (
        counted["handed"][0].consumed == {(index, 1) for index in range(3)}
        and counted["handed"][1] == 3 * value
    )
    assert not counted["edited"][0]  # edits are found when they are made


@pytest.mark.parametrize(("link", "message"), [
    ("parameters between", "gives block 1 another input than the output of the block before it"),
    ("earlier block", "gives block 2 another input than the output of the block before it"),
    ("argument of a block", "computes an argument of block 1 from the outputs of blocks before it"),
    ("decision", "decides by values that its blocks compute"),
])  # fmt: skip
def test_what_cannot_be_split_is_rejected(link: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        linked_pair(link)


@pytest.mark.parametrize(
    "family", ["gemma3n_text", "gemma4_text", "glm_moe_dsa", "deepseek_v4", "zaya", "bamba", "hy_v4", "xlnet"]
)
def test_families(family: str) -> None:
    """Inputs of each layer, shared keys and values, indices handed on, several streams, tuples, other orders."""
    whole, stack = family_pair(family)
    check(whole, stack, 100)


@pytest.mark.parametrize("family", ["zaya", "mamba"])
def test_hidden_states_that_stay_in_fp32_are_not_rounded_in_silence(family: str) -> None:
    """The first block's input of one, what the blocks of the other return."""
    config = miniature(CONFIG_MAPPING[family]())
    with pytest.raises(
        UserError, match=r"hidden states in float32 .* weights are bfloat16: train it with dtype fp32"
    ):
        StreamedModel(build_meta_model(config, dtype=torch.bfloat16), CPU)


def test_gradients_reach_adapters_behind_frozen_modules() -> None:
    """Gemma 4's inputs of each layer pass a frozen norm after an adapted projection."""
    model = build_meta_model(miniature(CONFIG_MAPPING["gemma4_text"]()))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("per_layer_model_projection" in name)
    assert StreamedModel(model, CPU).links.carried


def test_tracing_on_meta_leaves_no_trace() -> None:
    """GPT-J's blocks move a buffer to the device of what they are called with."""
    _, stack = family_pair("gptj")
    stack.carried_bytes(16)
    assert not any(buffer.is_meta for buffer in stack.model.buffers())
