"""Losses made of log-probabilities out of core equal the same losses of whole logits in memory."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig

import fuyou
import fuyou.engine.opening
from common.errors import FinetuneError, UserError
from common.models.adapters.options import AdapterOptions
from common.units import parse_bytes
from tests.helpers.adapters import DTYPES, compare
from tests.helpers.engines import batches, directories, engine, train
from tests.helpers.own_loss import Loss, OwnLossInMemory, dpo, kto, pairs
from tests.helpers.twin import tiny_configs

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.filterwarnings("ignore")  # peft says that it sets fan_in_fan_out for GPT-2
ROUTED = "mixtral, router loss on"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, configs = tmp_path_factory.mktemp("checkpoints"), tiny_configs()
    dropping, routed = configs["gpt2"], configs["mixtral"]
    dropping.resid_pdrop = dropping.embd_pdrop = dropping.attn_pdrop = 0.2
    routed.output_router_logits = True
    plain = {name: configs[name] for name in ("llama", "llama-tied")}
    for name, config in {
        **plain,
        "gpt2, dropout": dropping,
        ROUTED: routed,
        "gpt2": tiny_configs()["gpt2"],
    }.items():
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config).save_pretrained(root / name)
    return root


def adapters(**more: Any) -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", **more)


def in_memory(
    model: Path, dtype: str, clip: float | None = None, lora: bool = True, **more: Any
) -> OwnLossInMemory:
    real = AutoModelForCausalLM.from_pretrained(model, dtype=DTYPES[dtype])
    torch.manual_seed(0)
    return OwnLossInMemory(get_peft_model(real, adapters(**more)) if lora else real, clip)


def cross_entropy_step(trained: fuyou.Engine, batch: dict[str, torch.Tensor]) -> float:
    """The ordinary loss, by way of log-probabilities; returns it."""
    out = trained.tokens(**batch)
    loss = -out.log_probs.sum() / out.mask.sum()
    if out.aux_loss is not None:
        assert out.aux_coefficient == trained.config.router_aux_loss_coef
        loss = loss + out.aux_coefficient * out.aux_loss
    trained.backward(loss)
    return loss.item()


@pytest.mark.parametrize(("family", "dtype", "micro", "options"), [
    ("llama", "bf16", 1, {"max_grad_norm": 0.5}),
    ("llama", "bf16", 3, {"deferred_fraction": 0.67, "commit_every": 2}),
    ("gpt2, dropout", "fp32", 1, {"saved_activations": "1MiB"}),
    (ROUTED, "bf16", 1, {}),
])  # fmt: skip
@pytest.mark.slow
def test_cross_entropy_is_the_engines_own(
    family: str, dtype: str, micro: int, options: dict, checkpoints: Path, tmp_path: Path
) -> None:
    """All weights bit for bit; the loss itself is summed in another order."""
    results = []
    for name in ("own", "tokens"):
        (tmp_path / name).mkdir()
        ssd = directories(tmp_path / name, 1)
        with engine(checkpoints / family, ssd, dtype, micro_batch=micro, **options) as trained:
            steps = []
            for batch in batches(3, packed=True):
                if name == "own":
                    out = trained(**batch)
                    out.loss.backward()
                    loss = out.loss.item()
                else:
                    loss = cross_entropy_step(trained, batch)
                report = trained.step()
                assert report.loss == pytest.approx(loss, rel=1e-7)
                steps.append(
                    (loss, report.grad_norm, report.planned_read_bytes, report.planned_written_bytes)
                )
            masters = {key: value.clone() for key, value in trained.named_parameters()}
            assert trained.io_bytes() == trained.planned_io_bytes()
        results.append((steps, masters))
    for own, tokens in zip(results[0][0], results[1][0], strict=True):
        assert tokens[0] == pytest.approx(own[0], rel=1e-6)
        assert tokens[1:] == own[1:]
    for key, value in results[0][1].items():
        assert torch.equal(value, results[1][1][key]), key


@pytest.mark.parametrize(("loss_of", "family", "dtype", "micro", "clip"), [
    (dpo, "llama", "bf16", 1, 0.1),
    (dpo, "llama-tied", "fp32", 3, None),
    pytest.param(dpo, "gpt2", "bf16", 3, None, marks=pytest.mark.slow),
    (kto, "gpt2", "fp32", 1, 0.1),
])  # fmt: skip
def test_preferences_with_adapters(
    loss_of: Loss, family: str, dtype: str, micro: int, clip: float | None, checkpoints: Path, tmp_path: Path
) -> None:
    """The reference is the model without adapters, and reads nothing that training does not read anyway."""
    twin = in_memory(checkpoints / family, dtype, clip)
    options = {"adapters": adapters(), "micro_batch": micro, "max_grad_norm": clip}
    with engine(checkpoints / family, directories(tmp_path, 1), dtype, **options) as trained:
        read = []
        for number, batch in enumerate(pairs(5)):
            if number == 1:  # an ordinary step in between
                out = trained(**batch)
                out.loss.backward()
                trained.step()
                assert out.loss.item() == twin.step(batch, micro)
                continue
            out = trained.tokens(**batch, reference=True)
            loss = loss_of({"log_probs": out.log_probs}, out.reference.log_probs)
            trained.backward(loss)
            report = trained.step()
            assert loss.item() == twin.loss_step(batch, micro, loss_of, reference=True)
            assert report.loss == loss.item()
            assert math.isclose(report.grad_norm, twin.grad_norm, rel_tol=1e-12)
            read.append(report.planned_read_bytes)
        compare(trained, twin.model.get_base_model())
        assert len(set(read[2:])) == 1
        assert trained.io_bytes() == trained.planned_io_bytes()
        given = trained.tokens(**batch, reference=True)  # gradients are enabled: a step that is not ended
        with pytest.raises(FinetuneError, match="before the last step was ended"):
            trained.tokens(**batch)
        del given


@pytest.mark.parametrize(("dtype", "more"), [
    ("fp32", {}),
    pytest.param("bf16", {}, marks=pytest.mark.slow),
    pytest.param("fp32", {"modules_to_save": ["embed_tokens", "lm_head", "model.norm"]}, marks=pytest.mark.slow),
    ("fp32", {"modules_to_save": ["lm_head"], "trainable_token_indices": [1, 2, 3]}),
])  # fmt: skip
def test_reference_is_what_the_model_gives_without_adapters(
    dtype: str, more: dict[str, Any], checkpoints: Path, tmp_path: Path
) -> None:
    twin, options = (
        in_memory(checkpoints / "llama", dtype, **more),
        {"adapters": adapters(**more), "micro_batch": 3},
    )
    batch = pairs(1)[0]
    with engine(checkpoints / "llama", directories(tmp_path, 1), dtype, **options) as trained:
        for _ in range(2):
            out = trained(**batch)
            out.loss.backward()
            trained.step()
            twin.step(batch, 3)
        expected = twin.reference(batch, 3)
        outputs = ("log_probs", "entropy", "log_sum_sq_probs", "is_top1")
        with torch.no_grad():
            both = trained.tokens(**batch, outputs=outputs, reference=True)
            with trained.disable_adapters():
                off = trained.tokens(**batch, outputs=outputs)
                loss = trained.eval_loss(**batch)
            with_adapters = trained.eval_loss(**batch)
        for name in outputs:
            assert torch.equal(both.reference[name], off[name]), name
            if name == "is_top1":
                assert torch.equal(off[name], expected[name])
            else:
                torch.testing.assert_close(off[name], expected[name], rtol=1e-6, atol=1e-6)
        assert not torch.equal(both.log_probs, off.log_probs)
        assert loss == pytest.approx(-off.log_probs.sum().item() / off.mask.sum().item(), rel=1e-6)
        assert with_adapters != loss
        with (
            trained.disable_adapters(),
            pytest.raises(UserError, match="Without its adapters the model is not tr"),
        ):
            trained.tokens(**batch)
        with (
            trained.disable_adapters(),
            pytest.raises(UserError, match="Without its adapters the model is not tr"),
        ):
            trained(**batch)


def test_all_outputs_at_once_with_all_weights_trained(checkpoints: Path, tmp_path: Path) -> None:
    """Clipped policy gradients with a KL penalty to log-probabilities from before, and entropy."""
    model = checkpoints / "llama"
    twin = in_memory(model, "fp32", lora=False)
    generator = torch.Generator().manual_seed(2)
    advantages, old = torch.randn(4, 1, generator=generator), torch.rand(4, 32, generator=generator) - 6.0

    def loss(numbers: dict[str, torch.Tensor], _: torch.Tensor | None) -> torch.Tensor:
        ratio = (numbers["log_probs"] - old).exp()
        policy = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        kl = (old - numbers["log_probs"]).exp() - (old - numbers["log_probs"]) - 1
        return policy + 0.1 * kl.mean() - 0.2 * numbers["entropy"].mean()

    names = ("log_probs", "entropy")
    with engine(model, directories(tmp_path, 2), "fp32", micro_batch=3) as trained:
        for batch in pairs(3):
            out = trained.tokens(**batch, outputs=names)
            value = loss({name: out[name] for name in names}, None)
            value.backward()  # not reported then
            assert math.isnan(trained.step().loss)
            assert value.item() == pytest.approx(twin.loss_step(batch, 3, loss), rel=1e-6)
        expected = dict(twin.model.named_parameters())
        for name, master in trained.named_parameters():
            torch.testing.assert_close(master, expected[name], rtol=1e-5, atol=1e-6)


def test_head_function_gets_its_inputs_and_counts_in_the_plan(checkpoints: Path, tmp_path: Path) -> None:
    """Distillation from a teacher's eight best tokens (KL of what both give them)."""
    model = checkpoints / "llama-tied"
    generator = torch.Generator().manual_seed(2)
    best = torch.rand(4, 32, 211, generator=generator).topk(8, -1).indices
    theirs = torch.randn(4, 32, 8, generator=generator).log_softmax(-1)

    def head(logits: torch.Tensor, tokens: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        assert (
            logits.shape == (len(tokens["best"]), 211)
            and tokens["targets"].shape == tokens["input_ids"].shape
        )
        return {"student": logits.float().gather(-1, tokens["best"]).log_softmax(-1)}

    real = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    batch = pairs(1)[0]
    logits = real(input_ids=batch["input_ids"], use_cache=False).logits
    expected = functional.kl_div(
        logits.gather(-1, best).log_softmax(-1), theirs, log_target=True, reduction="sum"
    )
    expected.backward()
    with engine(model, directories(tmp_path, 1), "fp32", micro_batch=3) as trained:
        out = trained.tokens(**batch, outputs=(), head=head, inputs={"best": best})
        assert trained.memory_plan.batch.loss.outputs == 8
        loss = functional.kl_div(out.student, theirs, log_target=True, reduction="sum")
        trained.backward(7 * loss)  # in any scale
        report = trained.step()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        norm = math.sqrt(
            sum(float(parameter.grad.double().square().sum()) for parameter in real.parameters())
        )
        assert report.grad_norm == pytest.approx(7 * norm, rel=1e-6)


def test_a_missing_thing_is_reported_in_one_sentence(checkpoints: Path, tmp_path: Path) -> None:
    batch = pairs(1)[0]
    with engine(checkpoints / "llama", directories(tmp_path, 1), "fp32", micro_batch=2) as trained:
        for asked, message in (
            ({"outputs": ("log_prob",)}, r"no output 'log_prob'\. Did you mean 'log_probs'"),
            ({"outputs": ()}, "needs the name of at least one output"),
            ({"outputs": ("logits",)}, "too many to be kept"),
            ({"reference": True}, "this run trains the weights themselves"),
            ({"head": lambda logits, _: {"mean": logits.mean()}}, "returns \\[\\] as 'mean'"),
            ({"inputs": {"other": torch.zeros(4, 31)}}, r"inputs\['other'\] is \[4, 31\]"),
        ):
            with pytest.raises(UserError, match=message):
                trained.tokens(**batch, **asked)
        with (
            pytest.raises(UserError, match="this run trains the weights themselves"),
            trained.disable_adapters(),
        ):
            pass
        with pytest.raises(FinetuneError, match=r"comes after engine\.tokens"):
            trained.backward(torch.zeros(()))
        out = trained.tokens(**batch)
        with pytest.raises(AttributeError, match="called for log_probs, and not for 'entropy'"):
            _ = out.entropy
        out.log_probs.mean().backward(retain_graph=True)
        with pytest.raises(FinetuneError, match="called twice"):
            out.log_probs.mean().backward()
        trained.step()
        train(trained, batches(1, packed=True))  # and it continues
    with (
        pytest.raises(UserError, match="this run trains the weights themselves"),
        engine(checkpoints / "llama", [tmp_path], run_name="other", token_outputs=1, reference=True),
    ):
        pass


@pytest.mark.real_start  # a forked process has less memory itself
@pytest.mark.slow
def test_memory_and_bytes_with_a_large_vocabulary_and_a_reference(tmp_path: Path) -> None:
    """In its own process, and not a forked one: pages that are there already would count when they are used."""
    code = "import sys; sys.path.append('scripts'); "  # of the memory meter
    code += f"from {__name__} import train_with_a_large_vocabulary as train; train({str(tmp_path)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def train_with_a_large_vocabulary(folder: str) -> None:
    """Two steps within budget; logits of one batch alone would be 630 MB, twice."""
    from memory_meter import PeakMeter

    fuyou.engine.opening.PeakMeter = PeakMeter  # type: ignore[misc]  # which misses hardly anything
    config = LlamaConfig(
        vocab_size=150_000, hidden_size=32, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4
    )
    budget, rows, length = "560MiB", 8, 128
    with fuyou.Engine(
        config, ssd=[folder], host_memory=budget, host_cache=0, batch_shape=(rows, length), micro_batch=4, dtype="fp32",
        adapters=AdapterOptions(rank=4, alpha=8), token_outputs=2, reference=True,
    ) as trained:  # fmt: skip
        for _ in range(2):
            ids = torch.randint(0, 150_000, (rows, length))
            out = trained.tokens(input_ids=ids, outputs=("log_probs", "entropy"), reference=True)
            loss = dpo({"log_probs": out.log_probs}, out.reference.log_probs) - 0.1 * out.entropy.mean()
            trained.backward(loss)
            trained.step()
        trained.flush()
        assert trained.io_bytes() == trained.planned_io_bytes()
        assert trained.host_peak_bytes - trained.host_baseline_bytes <= parse_bytes(budget)
        assert trained.memory_plan.head_columns * 4 * 150_000 * 2 < 100 << 20


class Elsewhere(torch.Tensor):
    """A tensor that says it is on another device, whose values only ``cpu()`` gives."""

    device = torch.device("meta")  # type: ignore[assignment]

    @classmethod
    def of(cls, value: torch.Tensor) -> "Elsewhere":
        made = torch.Tensor._make_subclass(cls, value.float())
        made.values = value
        return made

    def detach(self) -> "Elsewhere":
        return self

    def cpu(self) -> torch.Tensor:
        return self.values


def test_a_batch_on_another_device_gets_its_answer_there(checkpoints: Path, tmp_path: Path) -> None:
    batch = batches(1, packed=True)[0]
    moved = {name: Elsewhere.of(value) for name, value in batch.items()}
    weights = torch.rand(batch["input_ids"].shape)
    with engine(checkpoints / "llama", directories(tmp_path, 1)) as trained:
        with torch.no_grad():
            head = lambda logits, given: {"weighted": logits.float().mean(-1) * given["weights"]}  # noqa: E731
            out = trained.tokens(**moved, head=head, inputs={"weights": Elsewhere.of(weights)})
            assert {out.mask.device.type, out.log_probs.device.type, out.weighted.device.type} == {"meta"}
            assert trained(**moved).loss.device.type == "meta" and trained(**batch).loss.device.type == "cpu"
        assert trained(**moved).loss.device.type == "meta"
        trained.abandon()
