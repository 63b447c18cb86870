"""Training some experts alone equals the same in memory, bit for bit, and leaves all others as they are."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import fuyou
from common.errors import UserError
from common.models.experts import expert_modules
from common.store import load_manifest
from fuyou.layout.record import Kind
from tests.helpers.adapters import DTYPES, InMemory, train
from tests.helpers.engines import STEPS, batches, directories
from tests.helpers.engines import engine as plain_engine
from tests.helpers.models.mixtures import MIXTURES, save_mixtures
from tests.helpers.twin import tiny_configs

pytestmark = pytest.mark.filterwarnings("ignore")
SHARE = 0.5


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mixtures(tmp_path_factory.mktemp("checkpoints"))


class _Rows(nn.Module):
    """A parametrisation that puts trained fp32 rows into a frozen parameter."""

    def __init__(self, master: torch.Tensor, chosen: tuple[int, ...]):
        super().__init__()
        self.chosen = torch.tensor(chosen)
        self.rows = nn.Parameter(master.detach()[self.chosen].clone())

    def forward(self, whole: torch.Tensor) -> torch.Tensor:
        merged = whole.clone()
        merged[self.chosen] = self.rows.to(whole.dtype)
        return merged


def in_memory(model: Path, dtype: str, experts: dict[str, tuple[int, ...]], clip: float | None = None) -> InMemory:
    """The model as anybody would train it: everything frozen, and PyTorch's own parametrisation for the rows."""
    masters = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    real = AutoModelForCausalLM.from_pretrained(model, dtype=DTYPES[dtype]).requires_grad_(False)
    for path, (module, count) in expert_modules(real).items():
        for name, whole in list(module.named_parameters(recurse=False)):
            assert whole.shape[0] == count
            rows = _Rows(masters.get_parameter(f"{path}.{name}"), experts[path])
            nn.utils.parametrize.register_parametrization(module, name, rows, unsafe=True)
    return InMemory(real, clip)


def whole_parameters(twin: InMemory) -> dict[str, torch.Tensor]:
    """By their names in the plain model, with the rows in them."""
    plain = {}
    for path, module in twin.model.named_modules():
        if nn.utils.parametrize.is_parametrized(module):
            plain |= {f"{path}.{name}": getattr(module, name).detach() for name in module.parametrizations}
    frozen = {name: value for name, value in twin.model.named_parameters() if "parametrizations" not in name}
    return plain | frozen


def open_engine(model: Path, ssd: list[Path], dtype: str, **options) -> fuyou.Engine:
    """Unproven, unless asked for otherwise: here the twin proves it."""
    return plain_engine(model, ssd, dtype, **{"train_experts": SHARE, "prove": False, **options})


def choose(engine: fuyou.Engine, feed: list[dict[str, torch.Tensor]]) -> dict[str, tuple[int, ...]]:
    return fuyou.choose_experts(engine, fuyou.profile_experts(engine, feed)).experts


@pytest.mark.parametrize(("dtype", "micro", "clip"), [("fp32", 3, 0.1), ("bf16", 2, None)])
@pytest.mark.parametrize("family", MIXTURES)
def test_equals_training_in_memory(
    family: str, dtype: str, micro: int, clip: float | None, checkpoints: Path, tmp_path: Path
) -> None:
    model, feed = checkpoints / family, batches(STEPS, packed=False)
    with open_engine(model, directories(tmp_path, 1), dtype, micro_batch=micro, max_grad_norm=clip) as engine:
        before = engine.eval_loss(**feed[0])
        experts = choose(engine, feed[:2])
        assert engine.eval_loss(**feed[0]) == before  # with the first values in their places
        written = engine.io_bytes()[1]
        twin = in_memory(model, dtype, experts, clip)
        train(engine, twin, feed, micro)
        engine.flush()
        rows = [record for record in engine._run.shape.records if record.trainable]
        assert {record.kind for record in rows} == {Kind.ADAPTER}
        assert engine.io_bytes()[1] - written == STEPS * sum(one.parameter_nbytes + one.state_nbytes for one in rows)
        assert engine.io_bytes() == engine.planned_io_bytes()
        assert engine.trainable_parameters == sum(one.numel() for one in twin.trained)
        plain = AutoModelForCausalLM.from_pretrained(model, dtype=DTYPES[dtype])
        assert engine.parameters == sum(one.numel() for one in plain.parameters())
        engine.save_pretrained(tmp_path / "tuned")
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned", dtype=DTYPES[dtype])
    expected = whole_parameters(twin)
    for name, value in tuned.named_parameters():
        assert torch.equal(value, expected[name]), name
    for path, (module, count) in expert_modules(tuned).items():
        others = [number for number in range(count) if number not in experts[path]]
        for name, value in module.named_parameters():
            assert torch.equal(value[others], plain.get_parameter(f"{path}.{name}")[others])
            assert not torch.equal(value, plain.get_parameter(f"{path}.{name}"))


def test_resumed_in_the_middle(checkpoints: Path, tmp_path: Path) -> None:
    """Before experts are chosen, after that, and after three steps; weight decay included."""
    model, ssd, feed = checkpoints / "qwen3_moe", directories(tmp_path, 2), batches(5, packed=True)
    options = {"micro_batch": 2}
    with open_engine(model, ssd, "bf16", **options) as engine:
        assert engine._run.experts_are_open
        engine.save_pretrained(tmp_path / "untouched")
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    for name, value in AutoModelForCausalLM.from_pretrained(tmp_path / "untouched").named_parameters():
        assert torch.equal(value, plain.get_parameter(name)), name
    with open_engine(model, ssd, "bf16", resume=True, **options) as engine:
        with pytest.raises(UserError, match="has not been chosen"):
            engine(**feed[0])
        experts = choose(engine, feed[:1])
        with pytest.raises(UserError, match="stay the same"):
            choose(engine, feed[:1])
    twin = in_memory(model, "bf16", experts)
    with open_engine(model, ssd, "bf16", resume=True, **options) as engine:
        assert engine.step_count == 0 and engine._run.model.experts.numbers == experts
        train(engine, twin, feed[:3], 2)
    with open_engine(model, ssd, "bf16", resume=True, **options) as engine:
        assert engine.step_count == 3
        train(engine, twin, feed[3:4], 2)
        engine.abandon()
        train(engine, twin, feed[4:], 2)
        engine.save_pretrained(tmp_path / "tuned")
    expected = whole_parameters(twin)
    for name, value in AutoModelForCausalLM.from_pretrained(tmp_path / "tuned").named_parameters():
        assert torch.equal(value, expected[name]), name
    for folder in ssd[0].iterdir():
        assert load_manifest(folder)["experts"] == {name: list(own) for name, own in experts.items()}


def test_with_a_single_slot_the_reference_is_the_model_as_it_was(checkpoints: Path, tmp_path: Path) -> None:
    model, feed = checkpoints / "deepseek_v3", batches(2, packed=False)
    with open_engine(model, directories(tmp_path, 1), "bf16", single_slot=True, frozen_dtype="int8") as engine:
        with torch.no_grad():
            before = engine.tokens(**feed[0]).log_probs
        choose(engine, feed)
        engine(**feed[1]).loss.backward()
        engine.step()
        out = engine.tokens(**feed[0], reference=True)
        assert torch.equal(out.reference.log_probs, before) and not torch.equal(out.log_probs, before)
        out.log_probs.sum().backward()
        engine.step()
        with torch.no_grad(), engine.disable_adapters():
            assert torch.equal(engine.tokens(**feed[0]).log_probs, before)


def test_what_is_refused(checkpoints: Path, tmp_path: Path) -> None:
    from common.models.adapters.options import AdapterOptions

    ssd = directories(tmp_path, 1)
    with pytest.raises(UserError, match="neither adapters nor trainable"):
        open_engine(checkpoints / "mixtral", ssd, "fp32", adapters=AdapterOptions(2))
    for share in (0.0, 1.5):
        with pytest.raises(UserError, match="more than 0 and at most 1"):
            plain_engine(checkpoints / "mixtral", ssd, train_experts=share)
    with pytest.raises(UserError, match="LlamaForCausalLM has none that are fused"):
        plain_engine(tiny_configs()["llama"], ssd, train_experts=0.5)
    with (
        plain_engine(checkpoints / "mixtral", ssd, "fp32") as engine,
        pytest.raises(UserError, match="give the engine train_experts"),
    ):
        choose(engine, batches(1, packed=False))


@pytest.mark.parametrize(
    ("family", "dtype", "implementation"), [("qwen3_moe", "bf16", "grouped_mm"), ("deepseek_v3", "fp32", "eager")]
)
def test_blocks_in_pieces(
    family: str, dtype: str, implementation: str, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PreTrainedModel, "get_correct_experts_implementation", lambda *_: implementation)
    model, feed = checkpoints / family, batches(3, packed=family == "qwen3_moe")
    options = {"micro_batch": 2, "piece_size": "16KiB", "max_grad_norm": 0.2, "prove": True}
    with open_engine(model, directories(tmp_path, 1), dtype, **options) as engine:
        shape = engine._run.shape
        cut = {slot.experts for record in shape.of_kind(Kind.BLOCK) for slot in record.parameters if slot.experts}
        assert len(cut) > 1 and engine._run.model.stack.model.config._experts_implementation == implementation
        before = engine.eval_loss(**feed[0])
        experts = choose(engine, feed[:2])
        assert engine.eval_loss(**feed[0]) == before
        twin = in_memory(model, dtype, experts, 0.2)
        train(engine, twin, feed, 2)
        engine.save_pretrained(tmp_path / "tuned")
    expected = whole_parameters(twin)
    for name, value in AutoModelForCausalLM.from_pretrained(tmp_path / "tuned").named_parameters():
        assert torch.equal(value, expected[name]), name
