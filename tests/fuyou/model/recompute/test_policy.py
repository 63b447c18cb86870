"""Kept outputs are worth what a hand count says, and leave training as it is, to the bit, wherever they are kept."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import flop_registry
from transformers import AutoModelForCausalLM, GPT2Config, GPTJConfig, LlamaConfig

import fuyou
from common.errors import UserError
from common.models.meta_model import build_meta_model
from fuyou.model.blocks.calls import BlockCalls
from fuyou.model.operators import makes_views
from fuyou.model.recompute import policy, replay
from fuyou.model.recompute.block_trace import BlockTrace, Tracer
from fuyou.model.recompute.policy import (
    ActivationPolicy,
    SavableOutput,
    best_fitting,
    savable_outputs,
    saved_outputs,
    trace_block,
)
from fuyou.model.recompute.replay import BlockReplay
from fuyou.model.streamed_model import StreamedModel
from tests.helpers.engines import batches, check, directories, engine, give_buffers
from tests.helpers.twin import tiny_configs

BF16 = torch.bfloat16

# -- what is worth keeping --------------------------------------------------------------------------------------------


@pytest.fixture
def flops_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "FLOPS_PER_BYTE", 0.0)


def listed(found: list[SavableOutput]) -> list[tuple[str, int, int, float]]:
    return [(one.operator, one.ordinal, one.nbytes, one.saved_flops) for one in found]


def traced(run: Callable[[], torch.Tensor]) -> BlockTrace:
    with Tracer() as tracer:
        result = run()
    return tracer.finish(result)


def test_a_network_counted_by_hand(flops_alone: None) -> None:
    """x [64, 32] -> 128 -> relu -> 16 -> relu -> 32: the last product is nobody's business."""
    x = torch.zeros(64, 32, requires_grad=True)
    first, second, third = (nn.Parameter(torch.zeros(shape)) for shape in ((32, 128), (128, 16), (16, 32)))
    trace = traced(lambda: ((x @ first).relu() @ second).relu() @ third)
    products = [2 * 64 * 32 * 128, 2 * 64 * 128 * 16, 2 * 64 * 16 * 32]
    assert trace.flops() == sum(products)
    assert trace.flops(trace.required()) == products[0] + products[1]
    # relu saves its result, which the next product saves as well: 64 x 16 and 64 x 128 fp32 values.
    found = savable_outputs(trace)
    assert saved_outputs(trace, ()).saved_fraction == products[2] / sum(products)
    assert listed(found) == [
        ("aten.relu.default", 1, 64 * 16 * 4, products[1]),
        ("aten.relu.default", 0, 64 * 128 * 4, products[0]),
    ]
    one = saved_outputs(trace, best_fitting(found, 64 * 16 * 4 + 5))
    assert one.operators == (("aten.relu.default", 1),) and one.nbytes == 64 * 16 * 4
    assert one.saved_fraction == (products[1] + products[2]) / sum(products)
    assert not best_fitting(found, 0)
    assert saved_outputs(trace, best_fitting(found, 1e9)).saved_fraction == 1.0
    assert [two.nbytes for two in savable_outputs(trace, rows=3)] == [
        3 * 64 * 16 * 4,
        3 * 64 * 128 * 4,
    ]


def test_a_block_of_llama_and_one_of_gpt2(flops_alone: None) -> None:
    """By FLOPs alone, bytes in hidden sizes per token: what is kept and what it saves, for 1024 tokens."""
    h, n = 64, 1024
    llama = StreamedModel(
        build_meta_model(
            LlamaConfig(
                hidden_size=h,
                intermediate_size=3 * h,
                num_hidden_layers=2,
                num_attention_heads=4,
                vocab_size=100,
            ),
            dtype=BF16,
        ),
        torch.device("cpu"),
    )
    trace = trace_block(llama, n, "cuda", BF16)
    found = savable_outputs(trace, 2)
    product, attention = 2 * 2 * n * h * h, 2 * 4 * n * n * h  # of 2 rows
    assert 2 * trace.flops() == 4 * product + 9 * product + attention
    assert 2 * (trace.flops() - trace.flops(trace.required())) == 3 * product  # the down projection
    saved = {(one.operator, one.ordinal): one for one in found}
    # Attention needs q, k, v and gives a result and a float32 per head and token, which is what its backward saves.
    kernel = saved["aten._scaled_dot_product_flash_attention.default", 0]
    assert kernel.saved_flops == attention
    # And two random numbers unused
    assert 2 * n * (2 * h + 4 * 4) <= kernel.nbytes <= 2 * n * (2 * h + 4 * 4) + 2048
    # The product is first added to, or turned by its position: what is saved there is kept.
    for name in (
        ("aten.add.Tensor", 1),
        ("aten.add.Tensor", 2),
        ("aten.mm.default", 2),
        ("aten.add.Tensor", 3),
    ):
        assert saved[name].saved_flops == product and saved[name].nbytes == 2 * n * h * 2
    for name in ("aten.mm.default", 4), ("aten.mm.default", 5):
        assert saved[name].saved_flops == 3 * product and saved[name].nbytes == 2 * n * 3 * h * 2
    assert saved_outputs(trace, best_fitting(found, 1e12)).saved_fraction == 1.0
    benefits = [one.saved_flops / one.nbytes for one in found]
    assert benefits == sorted(benefits, reverse=True)

    gpt2 = StreamedModel(
        build_meta_model(
            GPT2Config(n_embd=h, n_head=4, n_layer=2, vocab_size=100, n_positions=n), dtype=BF16
        ),
        torch.device("cpu"),
    )
    gpt2.model.eval()  # without dropout
    trace = trace_block(gpt2, n, "cpu", BF16)
    assert trace.flops() == n * (24 * h * h + 4 * n * h)
    assert (
        trace.flops() - trace.flops(trace.required()) == n * 8 * h * h
    )  # 4h to h: the paper's table has its swap benefit highest


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_attention_is_counted_by_our_own_formula(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.11's refuses heads that share keys and values."""

    def refuse(*_: Any, **__: Any) -> int:
        raise AssertionError("sdpa_flop_count: query/key/value shapes are incompatible")

    for packet in [packet for packet in flop_registry if "scaled_dot_product" in str(packet)]:
        monkeypatch.setitem(flop_registry, packet, refuse)
    config = tiny_configs()["llama"]
    stack = StreamedModel(build_meta_model(config, dtype=BF16), torch.device("cpu"))
    attention = [one for one in trace_block(stack, 32, device, BF16).operators if "attention" in one.name]
    width = config.hidden_size // config.num_attention_heads
    assert [one.flops for one in attention] == [4 * config.num_attention_heads * 32 * 32 * width]


def test_what_cannot_be_kept_is_rejected() -> None:
    stack = StreamedModel(build_meta_model(tiny_configs()["llama"], dtype=BF16), torch.device("cpu"))
    trace = trace_block(stack, 16, "cpu", BF16)
    assert saved_outputs(trace, [("aten.mm.default", 0)]).nbytes == 16 * 48 * 2
    for operator in (("aten.mm.default", 7), ("aten.addmm.default", 0), ("aten.clone.default", 0)):
        with pytest.raises(UserError, match=r"no outputs of aten"):
            saved_outputs(trace, [operator])


# -- recomputing ------------------------------------------------------------------------------------------------------


class Doubled(torch.autograd.Function):
    """Keeps what its backward pass needs where no hook sees it, and its forward pass does not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.hidden = y
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * ctx.hidden, None


def plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w).t().contiguous().t() @ w


def in_place(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    z = torch.tanh(x @ w)
    y = x @ w
    y.mul_(3).tanh_()
    return y @ z


def normalised(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    values, indices = torch.topk(x @ w, 4, dim=-1)
    values /= values.sum(dim=-1, keepdim=True)  # with gradients, a copy of them is made first
    return torch.tanh(torch.zeros_like(x).scatter(1, indices, values) @ w) @ w


def strided(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x.view(2, 4, 8).transpose(0, 1) * 2.0  # its result keeps the strides of what it reads
    return ((y + 1).sin() * y).transpose(0, 1).reshape(8, 8) @ w


def several(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    values, indices = torch.topk(x @ w, 4, dim=-1)
    return nn.functional.layer_norm(torch.zeros_like(x).scatter(1, indices, values), (8,)) @ w


def random(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return nn.functional.dropout(torch.tanh(nn.functional.dropout(x @ w, 0.3) @ w), 0.5) @ w


def custom(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return Doubled.apply(x, (x.detach() @ w.detach()).tanh()) @ w  # type: ignore[no-any-return]


def by_value(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    return y + 1 if float(x.detach()[0, 0]) > 0 else y.sin()  # the product is needed, or not


def by_mask(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(x @ w)
    return torch.zeros_like(y).masked_scatter(y > 0, y[y > 0].exp()) @ w


@torch.library.custom_op("tests::with_state", mutates_args=())
def with_state(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a result, and a state on another device, as attention kernels of CUDA do."""
    return x.tanh(), torch.empty((), device="meta")


def with_state_backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    result, state = ctx.saved_tensors
    assert state.is_meta
    return gradient * (1 - result * result)


with_state.register_autograd(
    with_state_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*output)
)


def stateful(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return with_state(x @ w)[0] @ w


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize(
    ("block", "saves"),
    [
        (plain, True), (in_place, True), (normalised, True), (strided, True), (several, True), (random, True),
        (custom, None), (stateful, None),
        (by_value, False), (by_mask, False),
    ],
)  # fmt: skip
def test_gradients_are_those_of_full_recomputation(block: Any, saves: bool | None, everything: bool) -> None:
    """Three visits; in the second and third outputs are kept, and the values are others each time."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 8, generator=generator)
    weight = torch.randn(8, 8, generator=generator)
    trace = traced(lambda: block(x.clone().requires_grad_(), weight.clone().requires_grad_()))
    chosen = [(one.name, one.ordinal) for one in trace.operators if one.savable] if everything else []
    recomputations = BlockReplay([0], chosen, 1 << 16)
    calls = BlockCalls(arguments=[((), {})])
    for visit in range(4):
        hidden = torch.randn(8, 8, generator=generator)
        hidden[0, 0] = (-1) ** visit
        buffer = torch.full((1 << 16,), 0xFF, dtype=torch.uint8)

        def run_on(x: torch.Tensor, w: torch.Tensor, visit: int = visit) -> torch.Tensor:
            torch.manual_seed(visit)
            return block(x, w)

        with torch.no_grad():
            expected = run_on(hidden, weight)
            state = torch.get_rng_state()
            result, recorded = recomputations.forward(0, calls, lambda: run_on(hidden, weight), buffer)  # noqa: B023
        assert torch.equal(result, expected)
        gradients, saved = [], 0.0
        for again in (False, True):
            leaf, parameter = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
            if again:
                out, saved = recomputations.backward(
                    0, calls, lambda: run_on(leaf, parameter), buffer, recorded  # noqa: B023
                )  # fmt: skip
                assert torch.equal(torch.get_rng_state(), state)
            else:
                out = run_on(leaf, parameter)
            out.backward(torch.ones(8, 8))
            gradients.append((leaf.grad, parameter.grad))
        for one, other in zip(*gradients, strict=True):
            assert torch.equal(one, other), visit
        if visit and saves and everything:
            assert saved == pytest.approx(1.0)
        elif visit and saves is not None:
            assert (saved > 0) == saves


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Network(nn.Module):
    """What it looks up is needed by nothing in the backward pass; ``turn`` changes what it does, unseen by a trace."""

    def __init__(self, looks_up: bool) -> None:
        super().__init__()
        self.first, self.second, self.last = Product(), Product(), Product()
        self.looks_up, self.turn = looks_up, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.second(torch.tanh(self.first(x))))
        if self.turn:
            return y.sin()
        found = torch.eye(8)[self.last(x).detach()[:, 0].abs().long() % 8] if self.looks_up else 0.0
        return self.last(y) + found


@pytest.mark.parametrize("kept", [(), ("aten.tanh.default", 0), ("aten.mm.default", 1)], ids=str)
@pytest.mark.parametrize("looks_up", [False, True])
def test_a_recomputation_follows_only_the_modules_with_short_cuts(
    kept: tuple[str, int], looks_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    followed: list[Any] = []

    def note(function: Any) -> bool:
        followed.append(function)
        return makes_views(function)

    monkeypatch.setattr(replay, "makes_views", note)
    block = Network(looks_up)
    recomputations = BlockReplay([0], [kept] if kept else [], 1 << 10)
    calls, buffer, counts, saved = (
        BlockCalls(arguments=[((), {})]),
        torch.zeros(1 << 10, dtype=torch.uint8),
        [],
        [],
    )
    for visit in range(5):
        block.turn = visit == 4
        x = torch.randn(8, 8)
        gradients = []
        for again in (False, True):
            leaf = x.clone().requires_grad_()
            block.zero_grad()
            if again:
                with torch.no_grad():
                    _, recorded = recomputations.forward(0, calls, lambda: block(x), buffer)  # noqa: B023
                followed.clear()
                out, part = recomputations.backward(0, calls, lambda: block(leaf), buffer, recorded)  # noqa: B023
                counts.append(len(followed))
                saved.append(part)
            else:
                out = block(leaf)
            out.sum().backward()
            gradients.append([leaf.grad, *(parameter.grad for parameter in block.parameters())])
        for ours, expected in zip(*gradients, strict=True):
            assert (ours is None and expected is None) or torch.equal(ours, expected), visit
    assert counts[0] == 0 and 0 < counts[2] == counts[3]
    assert counts[2] == counts[1] if looks_up or kept[:1] == ("aten.tanh.default",) else counts[2] < counts[1]
    assert 0 < saved[1] == saved[2] == saved[3] and saved[4] == 0


# -- training ---------------------------------------------------------------------------------------------------------

#: Buffers of kept outputs, 3 layers: on the device, on the host, on SSD, as many as can be there.
TIERS = {
    "device": {"device_saved": 12},
    "host": {"device_saved": 1, "host_saved": 12},
    "ssd": {"device_saved": 2, "host_saved": 2, "ssd_saved": 12},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    for name in ("llama", "gpt2", "llama-tied", "mixtral"):
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(tiny_configs()[name]).save_pretrained(root / name)
    return root


def place(counts: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every plan have these buffers of kept outputs."""
    give_buffers(monkeypatch, {"device_saved": 0, "host_saved": 0, "ssd_saved": 0, **counts})


@pytest.mark.parametrize(("family", "dtype", "micro", "tier", "kept", "clip"), [
    ("llama", "bf16", 1, "ssd", "1MiB", None),
    ("llama", "fp32", 4, "device", "64KiB", None),
    ("gpt2", "bf16", 3, "host", "1MiB", 0.5),  # the last micro-batch is smaller; tied
    ("llama-tied", "fp32", 3, "ssd", ActivationPolicy((("aten.mm.default", 5), ("aten.mm.default", 4)), 2), None),
    ("mixtral", "bf16", 3, "host", "1MiB", None),
])  # fmt: skip
def test_training_equals_the_plain_loop(
    family: str, dtype: str, micro: int, tier: str, kept: Any, clip: float | None, checkpoints: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    place(TIERS[tier], monkeypatch)
    reports = []
    original = fuyou.Engine.step
    monkeypatch.setattr(fuyou.Engine, "step", lambda self: reports.append(original(self)) or reports[-1])
    check(
        checkpoints / family, directories(tmp_path, 1), dtype=dtype, micro_batch=micro, clip=clip, steps=3,
        saved_activations=kept,
    )  # fmt: skip
    assert reports[0].recomputation_saved == 0.0  # the first one is watched
    layers = 2 if isinstance(kept, ActivationPolicy) else 3
    for report in reports[1:]:
        assert (
            report.saved_activation_bytes % (layers * math.ceil(4 / micro))
            == 0
            < report.saved_activation_bytes
        )
        if kept == "1MiB":
            assert report.recomputation_saved == pytest.approx(1.0)
        else:
            assert 0.2 < report.recomputation_saved < 0.9


def test_dropout_and_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_configs()["gpt2"]
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.2
    runs = []
    for name in ("full", "kept"):
        (tmp_path / name).mkdir()
        with monkeypatch.context() as patch:
            place(TIERS["ssd"], patch)
            if name == "full":  # recompute everything, even what was kept

                def full(self: Any, layer: int, calls: Any, run: Any, *_: Any) -> Any:
                    return run(), 0.0

                patch.setattr(BlockReplay, "backward", full)
            with engine(
                config, directories(tmp_path / name, 1), micro_batch=2, saved_activations="1MiB"
            ) as trained:  # type: ignore[arg-type]
                losses = []
                for batch in batches(3, packed=False):
                    out = trained(**batch)
                    out.loss.backward()
                    saved = trained.step().recomputation_saved
                    losses.append(out.loss.item())
                runs.append((losses, {name: value.clone() for name, value in trained.named_parameters()}))
                assert (saved > 0.8) == (name == "kept")
    assert runs[0][0] == runs[1][0]
    for name, value in runs[0][1].items():
        assert torch.equal(value, runs[1][1][name]), name


def test_tracing_leaves_a_block_as_it_was() -> None:
    """GPT-J's attention moves its table of positions to where its input is."""
    config = GPTJConfig(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=32, rotary_dim=8)
    stack = StreamedModel(build_meta_model(config), torch.device("cpu"))
    trace_block(stack, 16, "cpu", torch.float32)
    assert not any(buffer.is_meta for buffer in stack.model.buffers())


def test_what_python_reads_is_computed_again() -> None:
    """No operator says that a list was made of a tensor's values (JetMoE splits by one)."""
    source = torch.randn(6, requires_grad=True)
    with Tracer() as tracer:
        sizes = (source > 0).long()
        result = source * sum(sizes.tolist())
    trace = tracer.finish(result)
    names = [trace.operators[index].name for index in sorted(trace.required())]
    assert "aten.gt.Scalar" in names
    assert "aten._to_copy.default" in names
