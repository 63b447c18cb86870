"""Stock trainers on the engine's facade train what they train in memory."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from trl.trainer.callbacks import SyncRefModelCallback

import fuyou
from common.errors import UserError
from fuyou.integrations import EngineOptimizer, as_model, as_reference
from fuyou.integrations.model import FusedOutput
from fuyou.model.loss.token_head import OUTPUTS
from tests.helpers.models.small_checkpoints import SIZES, small_checkpoint
from tests.helpers.trl_data import adapters, decided_by_rounding, records

STEPS, LR = 4, 1e-3


pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    small_checkpoint(root / "lm")
    return root


def engine(model: Path, ssd: Path, **options: Any) -> fuyou.Engine:
    ssd.mkdir()
    settings = {"host_memory": "600MiB", "dtype": "fp32", "lr": LR, "weight_decay": 0.0, "max_grad_norm": 1.0}
    return fuyou.Engine(model, ssd=[ssd], **{**settings, **options})


def arguments(kind: type, folder: Path, **options: Any) -> Any:
    given = {
        "max_steps": STEPS, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "learning_rate": LR,
        "logging_steps": 1, "report_to": [], "use_cpu": True, "save_strategy": "no", "weight_decay": 0.0,
        "lr_scheduler_type": "cosine", "seed": 3, "max_grad_norm": 1.0, "disable_tqdm": True, "bf16": False,
    }  # fmt: skip
    return kind(output_dir=str(folder), **{**given, **options})


def test_the_engine_has_each_output_that_trl_reads() -> None:
    """Some are read with options only (weighted DPO), so that a trainer would fail in its first step."""
    assert {field.name for field in fields(FusedOutput)} - {"loss", "label_mask", "aux_loss"} <= set(OUTPUTS)


def test_a_trainer_that_sees_two_gpus_uses_none_itself(checkpoints: Path, tmp_path: Path) -> None:
    """It would wrap the model in DataParallel, and take batches of twice the size."""
    with engine(checkpoints / "lm", tmp_path / "ssd") as trained:
        args = arguments(TrainingArguments, tmp_path)
        args._n_gpu = 2
        model = as_model(trained)
        trainer = Trainer(model, args, train_dataset=Texts(), optimizers=(EngineOptimizer(model), None))
        assert next(iter(trainer.get_train_dataloader()))["input_ids"].shape[0] == 4
        assert trainer._wrap_model(model) is model


def figures(trainer: Trainer) -> list[dict[str, float]]:
    """Everything that a trainer has logged, but times."""
    no = ("runtime", "per_second", "flos")
    return [{name: value for name, value in line.items() if not any(word in name for word in no)}
            for line in trainer.state.log_history]  # fmt: skip


def same(streamed: Trainer, memory: Trainer, trained: fuyou.Engine, model: nn.Module) -> None:
    """Both have logged the same, and their weights are equal."""
    for mine, theirs in zip(figures(streamed), figures(memory), strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine.keys() - decided_by_rounding(theirs):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=2e-6), name
    expected = dict(model.named_parameters())
    for name, value in trained.named_parameters():
        torch.testing.assert_close(value, expected[name].data, rtol=1e-5, atol=5e-6)


class _StopAfter(TrainerCallback):
    """Stops a trainer after this many steps."""

    def __init__(self, steps: int):
        self._steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        control.should_training_stop = state.global_step >= self._steps
        return control


class Texts(torch.utils.data.Dataset):
    """Random tokens, padded."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(3, 384, (24,), generator=generator)
        shown = torch.arange(24) < 10 + index % 14
        return {
            "input_ids": ids * shown,
            "attention_mask": shown.long(),
            "labels": ids.masked_fill(~shown, -100),
        }


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, weight_decay=0.0)


def test_trainer_of_transformers(checkpoints: Path, tmp_path: Path) -> None:
    """With a cosine schedule, clipping, evaluation and saving."""

    def trainer(model: PreTrainedModel, optimizer: torch.optim.Optimizer, folder: Path) -> Trainer:
        args = arguments(TrainingArguments, folder, eval_strategy="steps", eval_steps=2)
        return Trainer(model, args, train_dataset=Texts(), eval_dataset=Texts(), optimizers=(optimizer, None))

    model = AutoModelForCausalLM.from_pretrained(checkpoints / "lm", dtype=torch.float32)
    memory = trainer(model, adamw(model), tmp_path / "memory")
    memory.train()
    with engine(checkpoints / "lm", tmp_path / "ssd", micro_batch=3) as trained:
        facade = as_model(trained)
        assert type(facade).__name__ == "LlamaForCausalLM" and isinstance(facade, type(model))
        streamed = trainer(facade, EngineOptimizer(facade), tmp_path / "streamed")
        streamed.train()
        same(streamed, memory, trained, model)
        streamed.save_model(str(tmp_path / "saved"))
        with pytest.raises(UserError, match="this call has no labels"):
            facade(input_ids=torch.ones(1, 3, dtype=torch.int64))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    for name, value in model.named_parameters():
        torch.testing.assert_close(saved.get_parameter(name), value, rtol=1e-5, atol=1e-6)


def test_a_trainer_continues_from_its_checkpoint(checkpoints: Path, tmp_path: Path) -> None:
    def train(
        ssd: Path, folder: Path, steps: int, again: bool, resume: bool
    ) -> tuple[list[Any], dict[str, torch.Tensor]]:
        options = {"host_memory": "600MiB", "dtype": "fp32", "lr": LR, "weight_decay": 0.0, "resume": resume}
        ssd.mkdir(exist_ok=True)
        with fuyou.Engine(checkpoints / "lm", ssd=[ssd], **options) as trained:
            model = as_model(trained)
            args = arguments(
                TrainingArguments, folder, save_strategy="steps", save_steps=2, max_grad_norm=0.0
            )
            trainer = Trainer(model, args, train_dataset=Texts(), optimizers=(EngineOptimizer(model), None))
            if steps < STEPS:
                trainer.add_callback(_StopAfter(steps))
            trainer.train(resume_from_checkpoint=again)
            return figures(trainer), {name: value.clone() for name, value in trained.named_parameters()}

    whole = train(tmp_path / "a", tmp_path / "whole", STEPS, False, False)
    train(tmp_path / "b", tmp_path / "broken", 2, False, False)
    broken = train(tmp_path / "b", tmp_path / "broken", STEPS, True, True)
    assert [line["loss"] for line in broken[0][:-1]] == [line["loss"] for line in whole[0][:-1]]
    for name, value in whole[1].items():
        assert torch.equal(value, broken[1][name]), name
    with pytest.raises(UserError, match="is of step 4, and the engine's store is at step 0"):
        train(tmp_path / "c", tmp_path / "broken", STEPS, True, False)


def test_what_a_trainer_cannot_do_is_reported(checkpoints: Path, tmp_path: Path) -> None:
    with engine(checkpoints / "lm", tmp_path / "ssd", max_grad_norm=None) as trained:
        model, ids = as_model(trained), torch.ones(1, 3, dtype=torch.int64)
        with pytest.raises(UserError, match="this run trains the weights themselves"):
            as_reference(trained)
        with pytest.raises(UserError, match="takes what as_model"):
            EngineOptimizer(AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)))
        for options, message in (
            ({"max_grad_norm": 0.01}, r"differ: max_grad_norm=0.01 \(0\)"),
            (
                {"gradient_accumulation_steps": 2, "max_grad_norm": 0.0},
                "set gradient_accumulation_steps to 1",
            ),
        ):
            args = arguments(TrainingArguments, tmp_path / "out", **options)
            trainer = Trainer(model, args, train_dataset=Texts(), optimizers=(EngineOptimizer(model), None))
            with pytest.raises(UserError, match=message):
                trainer.train()
            if trained.in_step:
                with torch.no_grad(), pytest.raises(UserError, match="set gradient_accumulation_steps to 1"):
                    model(input_ids=ids, labels=ids)
                trained.step()
        with torch.no_grad(), pytest.raises(UserError, match='with router_loss="on"'):
            model(input_ids=ids, labels=ids, output_router_logits=True, fused_lm_head=True)


IGNORED: list[tuple[dict[str, Any], str]] = [
    ({"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps",
      "save_steps": 2}, "load_best_model_at_end: the engine cannot go back"),
    ({"weight_decay": 0.1}, r"differ: weight_decay=0.1 \(0\)"),
    ({"adam_beta1": 0.8, "adam_epsilon": 1e-6}, r"differ: adam_beta1=0.8 \(0.9\), adam_epsilon=1e-06 \(1e-08\)"),
    ({"adam_beta2": 0.95}, "differ: adam_beta2"),
    ({"max_grad_norm": 0.0}, r"differ: max_grad_norm=0 \(1\)"),
    ({"learning_rate": 3e-3}, r"differ: learning_rate=0.003 \(0.001\)"),
    ({"torch_compile": True}, "torch_compile: the engine runs blocks one by one, uncompiled"),
    ({"optim": "adafactor"}, "optim='adafactor': the engine was opened with optimizer='adamw'"),
    ({"optim": "stable_adamw"}, "optim='stable_adamw': the engine was opened with optimizer='adamw'"),
]  # fmt: skip


def test_arguments_that_the_engine_would_ignore_are_rejected_before_the_first_step(
    checkpoints: Path, tmp_path: Path
) -> None:
    with engine(checkpoints / "lm", tmp_path / "ssd") as trained:
        model = as_model(trained)
        given: Any = {
            "train_dataset": Texts(),
            "eval_dataset": Texts(),
            "optimizers": (EngineOptimizer(model), None),
        }
        for options, message in IGNORED:
            trainer = Trainer(model, arguments(TrainingArguments, tmp_path / "out", **options), **given)
            with pytest.raises(UserError, match=message):
                trainer.train()
            assert trained.step_count == 0 and not trained.in_step
        trainer = Trainer(
            model, arguments(TrainingArguments, tmp_path / "out"), **given, compute_metrics=lambda _: {}
        )
        with pytest.raises(UserError, match="compute_metrics needs the logits"):
            trainer.evaluate()
        with pytest.raises(ValueError, match="cycle_momentum"):  # betas are the engine's for the whole run
            OneCycleLR(given["optimizers"][0], max_lr=LR, total_steps=4)
        schedule = OneCycleLR(given["optimizers"][0], max_lr=LR, total_steps=4, cycle_momentum=False)
        assert schedule.get_last_lr() == [pytest.approx(LR / 25)]


def test_a_checkpoint_of_weights_alone_that_is_of_another_step(checkpoints: Path, tmp_path: Path) -> None:
    with engine(checkpoints / "lm", tmp_path / "ssd") as trained:
        model = as_model(trained)
        args = arguments(
            TrainingArguments, tmp_path / "out", save_strategy="steps", save_steps=2, save_only_model=True
        )

        def trainer() -> Trainer:
            return Trainer(model, args, train_dataset=Texts(), optimizers=(EngineOptimizer(model), None))

        trainer().train()
        with pytest.raises(UserError, match="is of step 2, and the engine's store is at step 4"):
            trainer().train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-2"))
        assert trained.step_count == STEPS


@pytest.mark.parametrize(("kind", "options", "message"), [
    ("SFT", {"peft_config": adapters()}, "open it with adapters=peft_config"),
    ("DPO", {}, r"give DPOTrainer or KTOTrainer ref_model=as_reference\(engine\)"),
    ("KTO", {}, r"give DPOTrainer or KTOTrainer ref_model=as_reference\(engine\)"),
    ("GRPO", {"reward_funcs": lambda completions, **_: [0.0] * len(completions)}, "GRPOTrainer beta=0"),
])  # fmt: skip
def test_what_trl_would_load_or_adapt_is_rejected(
    kind: str, options: dict[str, Any], message: str, checkpoints: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoints / "lm")
    beta = {"beta": 0.1, "num_generations": 4} if kind == "GRPO" else {}
    args = arguments(getattr(trl, f"{kind}Config"), tmp_path / "out", **beta)
    with engine(
        checkpoints / "lm", tmp_path / "ssd", adapters=adapters() if kind == "GRPO" else None
    ) as trained:
        model = as_model(trained)
        if kind == "GRPO":  # it has a reference
            reference, ids = as_reference(trained), torch.ones(1, 3, dtype=torch.int64)
            SyncRefModelCallback._sync_target_model(model, reference, 0.6)  # as with sync_ref_model
            with torch.no_grad(), pytest.raises(UserError, match="leave sync_ref_model out"):
                reference(input_ids=ids, labels=ids)
        with pytest.raises(UserError, match=message):
            getattr(trl, f"{kind}Trainer")(
                model, args=args, train_dataset=records(kind.lower()), processing_class=tokenizer,
                optimizers=(EngineOptimizer(model), None), **options,
            )  # fmt: skip


@pytest.mark.parametrize("labels", [1, 3])
def test_a_classifier_has_the_loss_of_its_family(labels: int, tmp_path: Path) -> None:
    config = LlamaConfig(**{**SIZES, "pad_token_id": 0}, num_labels=labels)
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(config)
    model.save_pretrained(tmp_path / "classifier")
    ids = torch.randint(3, 384, (4, 12), generator=torch.Generator().manual_seed(0))
    wanted = torch.tensor([0.5, -1.0, 2.0, 0.0]) if labels == 1 else torch.tensor([0, 2, 1, 1])
    expected = model(input_ids=ids, labels=wanted)
    expected.loss.backward()
    with engine(tmp_path / "classifier", tmp_path / "ssd") as trained:
        found = as_model(trained)(input_ids=ids, labels=wanted)
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-6)
        found.loss.backward()
        norm = torch.stack(
            [value.grad.norm() for value in model.parameters() if value.grad is not None]
        ).norm()
        assert trained.gradient_norm() == pytest.approx(float(norm), rel=1e-5)
        trained.step()


def test_a_plain_loop_with_accelerate(checkpoints: Path, tmp_path: Path) -> None:
    from accelerate import Accelerator

    losses = []
    for name in ("memory", "streamed"):
        accelerator = Accelerator(cpu=True)
        trained = engine(checkpoints / "lm", tmp_path / "ssd") if name == "streamed" else None
        if trained is not None:
            model: Any = as_model(trained)
            optimizer: Any = EngineOptimizer(model)
        else:
            model = AutoModelForCausalLM.from_pretrained(checkpoints / "lm", dtype=torch.float32)
            optimizer = adamw(model)
        data = torch.utils.data.DataLoader(Texts(), batch_size=8)  # type: ignore[arg-type]
        model, optimizer, data = accelerator.prepare(model, optimizer, data)
        found = []
        for batch in data:
            loss = model(**batch).loss
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            found += [loss.item(), float(norm)]
        losses.append(found)
        if trained is not None:
            trained.close()
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
