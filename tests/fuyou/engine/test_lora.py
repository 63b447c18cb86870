"""Adapters out of core equal the same peft model trained in memory by PyTorch's own AdamW, bit for bit."""

import math
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

import fuyou
from common.errors import UserError
from common.models.adapters.options import AdapterOptions
from fuyou.layout.record import Kind
from fuyou.schedule.memory_planner import MemoryPlanner
from tests.helpers import classifiers
from tests.helpers.adapters import DTYPES, InMemory, compare, train
from tests.helpers.engines import STEPS, batches, directories
from tests.helpers.engines import engine as plain_engine
from tests.helpers.twin import save_checkpoints

pytestmark = pytest.mark.filterwarnings("ignore")  # peft says that it sets fan_in_fan_out for GPT-2


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoints(
        tmp_path_factory.mktemp("checkpoints"), ("llama", "llama-tied", "gpt2", "gemma3", "qwen3-moe")
    )


def in_memory(model: Path, dtype: str, adapters: PeftConfig, clip: float | None = None) -> InMemory:
    real = AutoModelForCausalLM.from_pretrained(model, dtype=DTYPES[dtype])
    torch.manual_seed(0)
    return InMemory(get_peft_model(real, adapters), clip)


@pytest.mark.parametrize(("family", "dtype", "micro", "clip", "config"), [
    ("llama", "fp32", 2, None, {}),
    ("llama", "bf16", 4, 0.2, {"use_rslora": True}),
    ("gpt2", "fp32", 3, 0.1, {"use_dora": True}),
    pytest.param("gpt2", "bf16", 1, None, {}, marks=pytest.mark.slow),
    ("gemma3", "bf16", 3, None, {"use_dora": True, "target_modules": ["q_proj"], "layers_to_transform": [1]}),
    ("llama-tied", "fp32", 4, None, {"r": 16, "target_modules": ["q_proj", "embed_tokens"]}),
    pytest.param("llama", "bf16", 4, None, {"r": 16, "target_modules": ["v_proj", "lm_head"]}, marks=pytest.mark.slow),
    ("qwen3-moe", "bf16", 2, None, {}),  # experts are adapted too, as parameters
    pytest.param("llama", "fp32", 4, 0.2, {"modules_to_save": ["lm_head"]}, marks=pytest.mark.slow),
    ("llama", "fp32", 2, None, {"modules_to_save": ["embed_tokens", "lm_head", "model.norm"]}),
    ("llama-tied", "fp32", 4, None, {"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]}),
    ("gemma3", "fp32", 4, None, {"trainable_token_indices": [3, 5, 8, 90]}),  # tied
    ("llama", "fp32", 2, None, {"trainable_token_indices": {"embed_tokens": [3, 9, 11], "lm_head": [7]}, "r": 16}),
])  # fmt: skip
def test_equals_peft_in_memory(
    family: str, dtype: str, micro: int, clip: float | None, config: dict, checkpoints: Path, tmp_path: Path
) -> None:
    def adapters() -> LoraConfig:
        return LoraConfig(
            **{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | config
        )

    model = checkpoints / family
    twin = in_memory(model, dtype, adapters(), clip)
    options = {"adapters": adapters(), "micro_batch": micro, "max_grad_norm": clip}
    with plain_engine(model, directories(tmp_path, 1), dtype, **options) as trained:
        train(trained, twin, batches(STEPS, packed=True), micro)
        compare(trained, twin.model.get_base_model())
        assert trained.trainable_parameters == sum(parameter.numel() for parameter in twin.trained)
        assert trained.io_bytes() == trained.planned_io_bytes()
        moved = [
            r.parameter_nbytes + r.state_nbytes for r in trained._run.layout.records if r.kind is Kind.ADAPTER
        ]
        assert trained.io_bytes()[1] == STEPS * sum(moved)  # nothing but adapters is ever written
        # Padding to pages is most of it here
        assert sum(moved) < 1.5 * 12 * trained.trainable_parameters + 40_000

        trained.save_pretrained(tmp_path / "adapter", merge=True)
        tokens = batches(1, packed=False)[0]["input_ids"]
        base = AutoModelForCausalLM.from_pretrained(model, dtype=DTYPES[dtype])
        tuned = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        with torch.no_grad():
            assert torch.equal(tuned(tokens).logits, twin.model.eval()(tokens).logits)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter" / "merged", dtype=DTYPES[dtype])
        if trained._run.model.adapters.unties:  # peft's merge changes the head as well
            with torch.no_grad():
                torch.testing.assert_close(merged(tokens).logits, tuned(tokens).logits, rtol=1e-4, atol=1e-5)
            return
        for name, value in tuned.merge_and_unload().named_parameters():
            assert torch.equal(merged.get_parameter(name), value), name


@pytest.mark.parametrize(
    "streamed", [pytest.param(False, marks=pytest.mark.slow), True], ids=["resident", "streamed"]
)
def test_resume_in_the_middle(
    streamed: bool, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps, a resume, two more; updates done again; where memory is too short for adapters, deferred and
    committed every second step."""
    if streamed:
        monkeypatch.setattr(MemoryPlanner, "_adapter_ladder", lambda self: [(2, 1)])
    model, feed, ssd = checkpoints / "llama", batches(5, packed=True), directories(tmp_path, 2)
    twin = in_memory(model, "bf16", AdapterOptions(4, targets=("all-linear",)).peft_config(), clip=0.2)
    how = {"commit_every": 2} if streamed else {"clip_by": "speculation"}
    options = {"micro_batch": 2, "max_grad_norm": 0.2, **how}
    with plain_engine(model, ssd, adapters=AdapterOptions(4, targets=("all-linear",)), **options) as trained:
        assert bool(trained.memory_plan.resident) is not streamed
        train(trained, twin, feed[:3], 2)
    with pytest.raises(UserError, match="another model"):
        plain_engine(
            model, ssd, adapters=AdapterOptions(4, alpha=3, targets=("all-linear",)), resume=True, **options
        )
    with plain_engine(
        model, ssd, adapters=AdapterOptions(4, targets=("all-linear",)), resume=True, **options
    ) as trained:
        assert trained.step_count == 3
        train(trained, twin, feed[3:], 2)
        compare(trained, twin.model.get_base_model())
        assert trained.io_bytes() == trained.planned_io_bytes()


@pytest.mark.parametrize(("family", "dtype", "config"), [
    ("llama", "bf16", {"use_rslora": True}),
    pytest.param("gemma3", "bf16", {"use_dora": True, "target_modules": ["q_proj"]}, marks=pytest.mark.slow),
    pytest.param("gpt2", "fp32", {"bias": "all"}, marks=pytest.mark.slow),
    ("llama", "fp32", {"modules_to_save": ["lm_head"], "trainable_token_indices": {"embed_tokens": [3, 9]}}),
])  # fmt: skip
def test_continue_an_adapter(
    family: str, dtype: str, config: dict, checkpoints: Path, tmp_path: Path
) -> None:
    """What peft has trained and saved is trained further as peft would, over a resume."""
    feed, ssd, saved = batches(4, packed=False), directories(tmp_path, 1), tmp_path / "saved"
    first = LoraConfig(
        **{"r": 16, "lora_alpha": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | config
    )
    began = in_memory(checkpoints / family, dtype, first)
    for batch in feed[:2]:
        began.step(batch, 4)
    began.model.save_pretrained(saved)
    base = AutoModelForCausalLM.from_pretrained(checkpoints / family, dtype=DTYPES[dtype])
    twin = InMemory(PeftModel.from_pretrained(base, saved, is_trainable=True))
    for resume, part in ((False, feed[2:3]), (True, feed[3:])):
        options = {"adapters": saved, "micro_batch": 4, "resume": resume}
        with plain_engine(checkpoints / family, ssd, dtype, **options) as trained:
            train(trained, twin, part, 4)
            compare(trained, twin.model.get_base_model())
            assert trained.io_bytes() == trained.planned_io_bytes()


@pytest.mark.parametrize(("family", "trained_names", "deferred"), [
    ("llama", ["model.layers.2.*", "model.layers.*.mlp.down_proj.weight", "lm_head.weight"], 0.0),
    ("gpt2", ["transformer.wte.weight", "*.ln_1.*"], 0.5),  # tied: the head and the embedding train it
])  # fmt: skip
def test_only_some_parameters(
    family: str, trained_names: list[str], deferred: float, checkpoints: Path, tmp_path: Path
) -> None:
    """Chosen parameters train, others stay, whole blocks and parts of blocks; in fp32 the twin needs no care."""
    from fnmatch import fnmatchcase

    real = AutoModelForCausalLM.from_pretrained(checkpoints / family, dtype=torch.float32)
    for name, parameter in real.named_parameters():
        parameter.requires_grad_(any(fnmatchcase(name, pattern) for pattern in trained_names))
    twin, ssd = InMemory(real), directories(tmp_path, 1)
    options = {"trainable": trained_names, "micro_batch": 4, "deferred_fraction": deferred}
    with plain_engine(checkpoints / family, ssd, "fp32", **options) as trained:
        feed = batches(STEPS, packed=True)
        if family == "gpt2":  # head and embedding add to one gradient in another order than autograd
            for batch in feed:
                out = trained(**batch)
                out.loss.backward()
                trained.step()
                assert math.isclose(out.loss.item(), twin.step(batch, 4), rel_tol=1e-6)
            trained.flush()
        else:
            train(trained, twin, feed, 4)
            compare(trained, real)
        assert trained.io_bytes() == trained.planned_io_bytes()


def test_classifier_with_its_head(tmp_path: Path) -> None:
    """With the task of peft for classifiers, the head is trained as a whole next to adapters, and saved."""
    config = LlamaConfig(**classifiers.SIZES)
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "model")
    real = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    model = get_peft_model(real, LoraConfig(r=4, target_modules=["q_proj"], task_type="SEQ_CLS"))
    named = {name: value for name, value in model.named_parameters() if value.requires_grad}
    assert any("score.modules_to_save" in name for name in named)
    optimizer = torch.optim.AdamW(named.values(), lr=1e-3, weight_decay=0)
    options = {"lr": 1e-3, "weight_decay": 0, "dtype": "fp32", "micro_batch": 2, "host_memory": "600MiB"}
    adapters = LoraConfig(r=4, target_modules=["q_proj"], task_type="SEQ_CLS")
    with fuyou.Engine(
        tmp_path / "model", ssd=directories(tmp_path, 1), adapters=adapters, **options
    ) as trained:
        for seed in range(3):
            given = classifiers.batch("sequence", seed)
            out = trained(**given)
            out.loss.backward()
            trained.step()
            loss = model.train()(**given).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert out.loss.item() == pytest.approx(loss.item(), abs=1e-6)
        trained.save_pretrained(tmp_path / "adapter", merge=True)
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    given.pop("labels")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "adapter" / "merged")
    with torch.no_grad():
        expected = model.eval()(**given).logits
        for tuned in (PeftModel.from_pretrained(base, tmp_path / "adapter"), merged):
            torch.testing.assert_close(tuned.eval()(**given).logits, expected, rtol=1e-5, atol=1e-5)


def test_nothing_to_train(checkpoints: Path, tmp_path: Path) -> None:
    ssd = directories(tmp_path, 1)
    with pytest.raises(UserError, match="no parameter is called 'lm_haed"):
        plain_engine(checkpoints / "llama", ssd, trainable=["lm_haed.weight"])
    with pytest.raises(UserError, match="either adapters or trainable"):
        plain_engine(checkpoints / "llama", ssd, trainable=["lm_head.weight"], adapters=AdapterOptions(2))
