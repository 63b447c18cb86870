"""Compiled blocks next to a plain loop in memory: they differ by rounding alone."""

import math
from pathlib import Path

import pytest
import torch
from functorch.compile import make_boxed_func
from peft import LoraConfig
from torch._dynamo.backends.common import aot_autograd
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedConfig

from common.errors import UserError
from fuyou.model.recompute import compiled_blocks
from tests.helpers.engines import OPTIONS, TOKENS, batches, directories, engine, train
from tests.helpers.twin import Twin, tiny_configs


@pytest.fixture
def not_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop before code is generated: the operators of both graphs, forward and backward, run as in eager mode."""
    monkeypatch.setattr(compiled_blocks, "BACKEND", "aot_eager")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return saved(tiny_configs()["llama"], tmp_path)


def saved(config: PreTrainedConfig, root: Path) -> Path:
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(root / "model")
    return root / "model"


def compare(model: Path, ssd: list[Path], dtype: str, *, packed: bool, micro_batch: int, resume_at: int) -> None:
    """Train four steps, with a resume, next to a loop in memory: losses and norms to what gradients summed in another
    order make of them."""
    twin = Twin(str(model), bf16=dtype == "bf16", max_grad_norm=0.5, **OPTIONS)
    feed, near = batches(4, packed), 1e-5 if dtype == "fp32" else 1e-2
    for steps, resume in ((feed[:resume_at], False), (feed[resume_at:], True)):
        options = {"micro_batch": micro_batch, "max_grad_norm": 0.5, "resume": resume}
        with engine(model, ssd, dtype, compile=True, **options) as trained:
            for batch in steps:
                out = trained(**batch)
                out.loss.backward()
                report = trained.step()
                assert math.isclose(out.loss.item(), twin.step(batch, micro_batch), rel_tol=near)
                assert math.isclose(report.grad_norm, twin.grad_norm, rel_tol=10 * near)


@pytest.mark.usefixtures("not_generated")
@pytest.mark.parametrize(("family", "dtype", "packed"), [("llama", "fp32", True), ("llama", "bf16", False)])
@pytest.mark.slow
def test_graphs_are_right(family: str, dtype: str, packed: bool, tmp_path: Path) -> None:
    """Micro-batches of three sequences and of one: two shapes, with gradients and without."""
    model = saved(tiny_configs()[family], tmp_path)
    compare(model, directories(tmp_path, 1), dtype, packed=packed, micro_batch=3, resume_at=3)


def test_a_recomputation_leaves_out_what_only_the_output_needs(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a Llama's seven products it does six, and the backward pass two for each of the seven."""
    products: list[int] = []
    torch._dynamo.reset()  # other tests' shapes are forgotten

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        products.append(sum(node.target is torch.ops.aten.mm.default for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    monkeypatch.setattr(compiled_blocks, "BACKEND", aot_autograd(fw_compiler=count))
    with engine(checkpoint, directories(tmp_path, 1), "fp32", compile=True, prove=False, micro_batch=2) as trained:
        train(trained, batches(1, packed=False))
    assert [number for number in products if number] == [7, 6, 14]


@pytest.mark.usefixtures("not_generated")
@pytest.mark.slow
def test_adapters(checkpoint: Path, tmp_path: Path) -> None:
    first, second = directories(tmp_path, 2)
    feed = batches(3, packed=True)
    options = {"adapters": LoraConfig(r=2, target_modules=["q_proj", "down_proj"]), "prove": False}
    with engine(checkpoint, [first], "fp32", **options) as plain:
        expected = train(plain, feed)
    with engine(checkpoint, [second], "fp32", compile=True, **options) as trained:
        assert train(trained, feed) == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_generated_code_differs_by_rounding_and_drops_out_the_same(tmp_path: Path) -> None:
    model = saved(
        GPT2Config(vocab_size=211, n_embd=32, n_layer=2, n_head=2, n_positions=TOKENS, attn_pdrop=0.0), tmp_path
    )
    first, second = directories(tmp_path, 2)
    feed = batches(3, packed=False)
    with engine(model, [first], "fp32", micro_batch=2, prove=False) as plain:
        expected = train(plain, feed)
    with engine(model, [second], "fp32", micro_batch=2, prove=False, compile=True) as trained:
        assert train(trained, feed) == pytest.approx(expected, rel=1e-5)


def test_without_a_compiler(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("/nowhere/g++",))
    torch._dynamo.reset()
    with pytest.raises(UserError, match=r"needs a compiler.*leave compile out"):
        engine(checkpoint, directories(tmp_path, 1), compile=True)


@pytest.mark.usefixtures("not_generated")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"piece_size": "4KiB"}, "Compiled blocks cannot be in pieces"),
        ({"kept_activations": "1MiB"}, "keep no activations"),
    ],
)
def test_what_compiled_blocks_cannot_do(
    options: dict[str, str], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        engine(checkpoint, directories(tmp_path, 1), compile=True, **options)


@pytest.mark.usefixtures("not_generated")
def test_router_losses_are_refused(tmp_path: Path) -> None:
    model = saved(tiny_configs()["mixtral"], tmp_path)
    with pytest.raises(UserError, match="router loss"):
        engine(model, directories(tmp_path, 1), compile=True, router_loss="on")
