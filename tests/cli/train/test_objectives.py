"""The command's objectives against TRL's own trainers in memory, on the same data in the same order."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
)

from common.data.pack import draw_rows
from tests.cli.conftest import Finetune
from tests.helpers.command.histories import losses, metrics

PLACE = (
    "--gpu",
    "cpu",
    "--host-memory",
    "600MiB",
    "--dtype",
    "fp32",
    "--schedule",
    "constant",
    "--lr",
    "1e-3",
)
STEPS, ITEMS, LR, DECAY = 5, 8, 1e-3, 0.01
EPS = 1e-4
"""With Adam's usual one, a gradient that is next to nothing makes a part of a step of its rounding, which differs from
processor to processor."""


pytestmark = pytest.mark.filterwarnings("ignore")


PAIRS = [
    {
        "prompt": f"{i} plus {i} is",
        "chosen": f" surely {2 * i}.",
        "rejected": f" maybe {i * i + 1}, who knows.",
    }
    for i in range(ITEMS)
]
TEXTS = [
    {"text": f"{i} and {i * i} are numbers", "label": ("odd", "even", "odder")[i % 3]} for i in range(ITEMS)
]
MARGINS = [{**pair, "margin": 0.25 * (i % 3)} for i, pair in enumerate(PAIRS)]


def in_our_order(records: list[dict[str, Any]]) -> Dataset:
    """The records of all steps, as the command draws them."""
    draws = [draw_rows(range(step * ITEMS, (step + 1) * ITEMS), ITEMS, 0) for step in range(STEPS)]
    return Dataset.from_list([records[int(row)] for drawn in draws for row in drawn])


def settings(kind: type, folder: Path, **options: Any) -> Any:
    return kind(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=ITEMS, learning_rate=LR, logging_steps=1,
        report_to=[], use_cpu=True, save_strategy="no", lr_scheduler_type="constant", max_grad_norm=0.0,
        disable_tqdm=True, bf16=False, train_sampling_strategy="sequential", gradient_checkpointing=False, **options,
    )  # fmt: skip


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": [p for p in trained if p.dim() > 1], "weight_decay": DECAY}]
    groups += [{"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LR, eps=EPS)


class Classes(Trainer):
    """A trainer that notes how many are right."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        out = model(**inputs)
        right = (out.logits.argmax(-1) == inputs["labels"]).float().mean()
        self.log({"accuracy": right.item(), "loss": out.loss.item()})
        return out.loss


def with_trl(
    objective: str, model: nn.Module, tokenizer: Any, records: list[dict[str, Any]], folder: Path,
    reference_path: str | Path,
) -> Trainer:  # fmt: skip
    """Train in memory; the model is changed."""
    data, optimizers = in_our_order(records), (adamw(model), None)
    given: dict[str, Any] = {"train_dataset": data, "processing_class": tokenizer, "optimizers": optimizers}
    if objective == "dpo":
        reference = AutoModelForCausalLM.from_pretrained(reference_path, dtype=torch.float32)
        args = settings(trl.DPOConfig, folder, beta=0.3, max_length=64)
        trainer = trl.DPOTrainer(model, reference, args, **given)
    elif objective == "reward":
        args = settings(trl.RewardConfig, folder, max_length=64)
        trainer = trl.RewardTrainer(model, args, **given)
    else:
        names = sorted({record["label"] for record in records})

        def tokenized(record: dict[str, Any]) -> dict[str, Any]:
            return {**tokenizer(record["text"]), "labels": names.index(record["label"])}

        given["train_dataset"] = data.map(tokenized, remove_columns=["text", "label"])
        trainer = Classes(model, settings(TrainingArguments, folder), **given)
    trainer.train()
    return trainer


LORA, PREFERRED = (
    ("--lora-rank", "4"),
    ("rewards/accuracies", "rewards/chosen", "rewards/margins", "logps/rejected"),
)
CASES = {
    "dpo in pieces": (PAIRS, ("--beta", "0.3", "--piece-size", "16KiB", *LORA), PREFERRED),
    "reward": (MARGINS, (), ("accuracy", "margin", "mean_reward")),
    "reward with adapters": (MARGINS, LORA, ("accuracy", "margin", "mean_reward")),
    "classify": (TEXTS, (), ("accuracy",)),
}


@pytest.mark.parametrize(("objective", "micro"), [
    ("dpo in pieces", "4"), ("reward", "4"), ("reward with adapters", "16"),
    ("classify", "2"),
])  # fmt: skip
@pytest.mark.slow
def test_a_run_is_what_trl_trains_in_memory(
    objective: str, micro: str, checkpoint: Path, finetune: Finetune, tmp_path: Path
) -> None:
    records, options, watched = CASES[objective]
    objective, adapted = objective.split()[0], "--lora-rank" in options
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    common = (
        "--model",
        checkpoint,
        "--data",
        tmp_path / "data.jsonl",
        "--objective",
        objective,
        *options,
        *PLACE,
    )
    common = (
        *common,
        "--batch-size",
        str(ITEMS),
        "--micro-batch",
        micro,
        "--steps",
        str(STEPS),
        "--seed",
        "0",
    )
    common = (*common, "--eps", str(EPS))
    done = finetune(*common, "--output", tmp_path / "out")
    assert done.status == 0, done.err
    found = metrics(tmp_path / "out")

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    base = tmp_path / "out" / "base" if objective in ("reward", "classify") else checkpoint
    auto = AutoModelForSequenceClassification if objective in ("reward", "classify") else AutoModelForCausalLM
    model: Any = auto.from_pretrained(base, dtype=torch.float32)
    if adapted:
        torch.manual_seed(0)
        task = None if auto is AutoModelForSequenceClassification else "CAUSAL_LM"
        lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type=task)
        model = get_peft_model(model, lora).get_base_model()
    trainer = with_trl(objective, model, tokenizer, records, tmp_path / "trl", model.name_or_path)
    logged = [line for line in trainer.state.log_history if {"loss", watched[0]} <= line.keys()]
    assert losses(tmp_path / "out") == pytest.approx([line["loss"] for line in logged[:STEPS]], rel=1e-5)
    for name in watched:
        expected = [line[name] for line in logged[:STEPS]]
        assert found[name] == pytest.approx(expected, rel=1e-5, abs=5e-6), name
    tuned: Any = auto.from_pretrained(base if adapted else tmp_path / "out", dtype=torch.float32)
    if adapted:
        tuned = PeftModel.from_pretrained(tuned, tmp_path / "out").get_base_model()
        assert objective != "reward" or any("score.lora" in name for name, _ in tuned.named_parameters())
    values = dict(tuned.named_parameters())
    for name, value in model.named_parameters():
        torch.testing.assert_close(values[name], value.data, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("objective", ["dpo", "reward", "classify"])
@pytest.mark.slow
def test_a_run_that_continues_is_the_same_run(
    objective: str, checkpoint: Path, finetune: Finetune, tmp_path: Path
) -> None:
    """In the middle of an epoch, bit for bit."""
    records = TEXTS if objective == "classify" else PAIRS
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    words = LORA if objective == "dpo" else ()
    file = "adapter_model.safetensors" if objective == "dpo" else "model.safetensors"
    common = (
        "--model",
        checkpoint,
        "--data",
        tmp_path / "data.jsonl",
        "--objective",
        objective,
        *words,
        *PLACE,
    )
    runs = []
    for name, parts in (("whole", (3,)), ("broken", (1, 3))):
        for number, steps in enumerate(parts):
            going_on = ("--resume",) if number else ()
            given = ("--batch-size", "3", "--steps", steps, "--output", name)
            done = finetune(*common, *given, *going_on, *(("--no-save",) if steps < 3 else ("--save",)))
            assert done.status == 0, done.err
        runs.append((losses(Path(name)), load_file(f"{name}/{file}")))
    (expected, weights), (resumed, others) = runs
    assert resumed == expected
    assert all(torch.equal(value, others[name]) for name, value in weights.items())


@pytest.mark.slow
def test_a_classifier_continues_with_the_model_that_it_began_with(
    checkpoint: Path, finetune: Finetune, tmp_path: Path
) -> None:
    """Its weights are links: to a model that is lost, moved, or another one."""
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in TEXTS))
    first, moved, other = tmp_path / "first", tmp_path / "moved", tmp_path / "other"
    shutil.copytree(checkpoint, first)
    shutil.copytree(checkpoint, other)
    weights = load_file(checkpoint / "model.safetensors")
    save_file(
        {name: value * 2 for name, value in weights.items()}, other / "model.safetensors", {"format": "pt"}
    )
    words = ("--data", tmp_path / "data.jsonl", "--objective", "classify", *LORA, *PLACE, "--batch-size", "2")
    words = (*words, "--output", tmp_path / "out")
    done = finetune("--model", first, *words, "--steps", "1")
    assert done.status == 0, done.err
    base = tmp_path / "out/base/weights-1.safetensors"
    refused = finetune("--model", other, *words, "--steps", "2", "--resume")
    assert refused.status == 2 and f"this run began with the model in {first}, and {other}" in refused.err
    assert base.readlink().parent == first
    first.rename(moved)
    damaged = finetune("verify", tmp_path / "out")
    assert (
        damaged.status == 1 and f"{base} is a link to {first}/model.safetensors, where nothing" in damaged.err
    )
    continued = finetune("--model", moved, *words, "--steps", "2", "--resume")
    assert continued.status == 0 and base.readlink().parent == moved, continued.err
    assert finetune("verify", tmp_path / "out").status == 0


def test_other_classes_do_not_replace_the_model_that_a_classifier_began_with(
    checkpoint: Path, finetune: Finetune, tmp_path: Path
) -> None:
    """Its adapters are for that one: with other names in it, they would answer other things."""
    first, renamed = tmp_path / "first.jsonl", tmp_path / "renamed.jsonl"
    first.write_text("".join(json.dumps(record) + "\n" for record in TEXTS))
    renamed.write_text(first.read_text().replace('"even"', '"zero"'))
    words = ("--model", checkpoint, "--objective", "classify", *LORA, *PLACE, "--batch-size", "2", "--output")
    done = finetune(*words, tmp_path / "out", "--data", first, "--steps", "1")
    assert done.status == 0, done.err
    before = (tmp_path / "out/base/config.json").read_text()
    refused = finetune(*words, tmp_path / "out", "--data", renamed, "--steps", "2", "--resume")
    named = "--data has the classes odd, odder, zero, and this run began with even, odd, odder. Give the data"
    assert refused.status == 2 and named in refused.err, refused.err
    assert (tmp_path / "out/base/config.json").read_text() == before


@pytest.mark.parametrize(("records", "objective", "message"), [
    (TEXTS[:1], "classify", "learns to tell at least two classes apart"),
    (TEXTS, "reward", "a pair has chosen and rejected"),
])  # fmt: skip
def test_data_of_another_kind(
    records: list[dict[str, Any]],
    objective: str,
    message: str,
    checkpoint: Path,
    finetune: Finetune,
    tmp_path: Path,
) -> None:
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    words = (
        "--model",
        checkpoint,
        "--data",
        tmp_path / "data.jsonl",
        "--objective",
        objective,
        "--show-data",
        "4",
    )
    done = finetune(*words, "--output", tmp_path / "out")
    assert done.status == 2 and message in done.err


@pytest.mark.parametrize(("names", "numbers", "message"), [
    (["bad", "good"], None, None),
    (["bad", "good"], {"bad": 1, "good": 0}, "two names for class 1: 'good' in id2label, and 'bad' in label2id"),
    (["bad", "bad"], None, "gives several classes one name in id2label: bad, bad"),
])  # fmt: skip
def test_names_of_the_classes_of_a_classifier(
    names: list[str], numbers: Any, message: str | None, checkpoint: Path, finetune: Finetune, tmp_path: Path
) -> None:
    """They are those of id2label, by which the result answers."""
    model, config = tmp_path / "model", AutoConfig.from_pretrained(checkpoint, num_labels=2)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(model)
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(model)
    file = model / "config.json"
    labels = {"id2label": dict(enumerate(names)), "label2id": numbers}
    content = {**json.loads(file.read_text()), **labels}
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    records = [{"text": "It rains.", "label": name} for name in ("bad", "good")]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    words = (
        "--model",
        model,
        "--data",
        tmp_path / "data.jsonl",
        "--objective",
        "classify",
        "--show-data",
        "1",
    )
    done = finetune(*words, "--output", tmp_path / "out")
    assert done.status == (0 if message is None else 2) and (message or "") in done.err, done.err


@pytest.mark.parametrize(("options", "frozen", "problem"), [
    ((), False, "regression"),
    (("--lora-targets", "all-linear"), False, "multi_label_classification"),
    (("--lora-targets", "q_proj"), True, None),
    (("--peft-config", {}), True, None),
    (("--peft-config", {"modules_to_save": ["score"]}), False, None),
])  # fmt: skip
def test_a_new_head(
    options: Any, frozen: bool, problem: str | None, own_checkpoint: Path, finetune: Finetune, tmp_path: Path
) -> None:
    """It is no head of another problem, and a run says where nothing trains it."""
    config = AutoConfig.from_pretrained(own_checkpoint)
    config.problem_type = problem
    config.save_pretrained(own_checkpoint)
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in TEXTS))
    if options[:1] == ("--peft-config",):
        fields = {
            "peft_type": "LORA",
            "r": 4,
            "target_modules": ["q_proj"],
            "task_type": "CAUSAL_LM",
            **options[1],
        }
        (tmp_path / "lora.json").write_text(json.dumps(fields))
        options = ("--peft-config", tmp_path / "lora.json")
    else:
        options = ("--lora-rank", "4", *options)
    words = (
        "--model",
        own_checkpoint,
        "--data",
        tmp_path / "data.jsonl",
        "--objective",
        "classify",
        *options,
    )
    done = finetune(*words, *PLACE, "--steps", "1", "--output", tmp_path / "out")
    assert done.status == 0, done.err
    assert ("the new head (score) has random values and keeps them" in done.out) is frozen
    assert "classify, 3 classes: even, odd, odder" in done.out
    assert AutoConfig.from_pretrained(tmp_path / "out" / "base").problem_type is None


@pytest.mark.parametrize(("labels", "problem"), [(1, "regression"), (3, "multi_label_classification")])
@pytest.mark.parametrize("objective", ["classify", "reward"])
def test_a_classifier_of_another_kind(
    objective: str, labels: int, problem: str, checkpoint: Path, finetune: Finetune, tmp_path: Path
) -> None:
    config = AutoConfig.from_pretrained(checkpoint, num_labels=labels, problem_type=problem)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(tmp_path)
    words = ("--model", tmp_path, "--data", tmp_path / "data.jsonl", "--objective", objective)
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in TEXTS))
    done = finetune(*words, "--output", tmp_path / "out")
    assert done.status == 2 and f"has problem_type '{problem}' in its config.json" in done.err, done.err
    assert not (tmp_path / "out" / "store").exists()
