"""Learning from pairs of answers with the command."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    FalconConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
)

from common.models.checkpoint.identity import weights_identity
from tests.cli.conftest import Finetune
from tests.helpers.command.histories import history, losses, metrics
from tests.helpers.models.small_checkpoints import SIZES, small_checkpoint

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
    "1e-2",
)
LORA, SLOW = ("--lora-rank", "4"), pytest.mark.slow


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sums that are right and sums that are wrong."""
    file = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    records = [
        {
            "prompt": f"{i} plus {i} is",
            "chosen": f" surely {2 * i}.",
            "rejected": f" maybe {i * i + 1}, who knows.",
        }
        for i in range(12)
    ]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def in_memory(checkpoint: Path, model: Any, file: Path, steps: int) -> tuple[list[float], float]:
    """Train a model with DPO on all pairs in each step, on whole logits; return the losses and the last accuracy."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.01}]
    groups += [{"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2)
    bos = [tokenizer.bos_token_id] if tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id else []
    records = [json.loads(line) for line in file.read_text().splitlines()]

    def log_prob(record: dict[str, str], side: str) -> torch.Tensor:
        prompt = bos + tokenizer(record["prompt"], add_special_tokens=False)["input_ids"]
        text = record["prompt"] + record[side]
        ids = bos + tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        scores = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
        return torch.stack([scores[place - 1, ids[place]] for place in range(len(prompt), len(ids))]).sum()

    with torch.no_grad():
        references = [[log_prob(record, side) for side in ("chosen", "rejected")] for record in records]
    losses, accuracy = [], math.nan
    for _ in range(steps):
        total, right = torch.zeros(()), 0
        for record, reference in zip(records, references, strict=True):
            chosen, rejected = (log_prob(record, side) for side in ("chosen", "rejected"))
            margin = 0.3 * (chosen - reference[0]) - 0.3 * (rejected - reference[1])
            total = total - functional.logsigmoid(margin)
            right += bool(margin > 0)
        (total / len(records)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total.detach()) / len(records))
        accuracy = right / len(records)
    return losses, accuracy


@pytest.mark.parametrize(
    "trains",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("all weights", "new adapters")),
        "trained adapters",
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_run_is_what_it_is_in_memory(
    trains: str, checkpoint: Path, data: Path, pairs: Path, finetune: Finetune, tmp_path: Path
) -> None:
    """The reference is the model as the run found it, so the first loss is ln 2: also of an adapter trained before."""
    common = ("--model", checkpoint, *PLACE)
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    words: tuple[Any, ...] = ()
    if trains == "new adapters":
        words = LORA
        torch.manual_seed(0)
        model = get_peft_model(
            model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
        )
    elif trains == "trained adapters":
        words = ("--adapter", tmp_path / "first")
        first = ("--data", data, *LORA, "--steps", "3", "--batch-size", "4", "--seq-len", "32")
        assert finetune(*common, *first, "--output", tmp_path / "first").status == 0
        model = PeftModel.from_pretrained(model, tmp_path / "first", is_trainable=True)
    common = (*common, "--data", pairs, "--objective", "dpo", *words, "--beta", "0.3", "--batch-size", "12")
    common = (*common, "--micro-batch", "4", "--steps", "3", "--eval-data", pairs)
    done = finetune(*common, "--output", tmp_path / "out")
    assert done.status == 0, done.err
    found, watched = losses(tmp_path / "out"), metrics(tmp_path / "out")
    expected, accuracy = in_memory(checkpoint, model, pairs, 3)
    assert found[0] == pytest.approx(math.log(2), rel=1e-7)
    assert found == pytest.approx(expected, rel=1e-5)
    assert watched["rewards/accuracies"][-1] == accuracy
    sides = zip(watched["rewards/chosen"], watched["rewards/rejected"], strict=True)
    assert watched["rewards/margins"] == pytest.approx(
        [better - worse for better, worse in sides], rel=1e-4, abs=1e-9
    )
    assert f"accuracy {accuracy:.1%}, margin" in done.out and "eval at step 3: loss" in done.out
    assert "eval at step 0: loss 0.6931" in done.out and "12 pairs, 24 x 64 tokens" in done.out
    entries = [
        json.loads(line) for line in (tmp_path / "out" / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert {"rewards/margins", "validation_metrics/rewards/accuracies"} <= {
        name for line in entries for name in line
    }


@pytest.mark.parametrize(
    "trains",
    [
        "new adapters",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("all weights", "trained adapters")),
    ],
)
def test_a_resumed_run_keeps_its_reference(
    trains: str, checkpoint: Path, data: Path, pairs: Path, finetune: Finetune, tmp_path: Path
) -> None:
    """It has the losses of a run that was not interrupted, and a lost reference is never computed from a trained
    model: new adapters are switched off for it, and other runs are refused."""
    words: tuple[Any, ...] = {"all weights": (), "new adapters": LORA}.get(
        trains, ("--adapter", tmp_path / "first")
    )
    if trains == "trained adapters":
        first = ("--data", data, *LORA, "--steps", "1", "--batch-size", "4", "--seq-len", "32")
        assert finetune("--model", checkpoint, *first, *PLACE, "--output", tmp_path / "first").status == 0
    common = (
        "--model",
        checkpoint,
        "--data",
        pairs,
        "--objective",
        "dpo",
        *words,
        *PLACE,
        "--batch-size",
        "12",
    )

    assert finetune(*common, "--steps", "4", "--output", tmp_path / "whole", "--no-save").status == 0
    whole = losses(tmp_path / "whole")
    broken = (*common, "--output", tmp_path / "broken", "--no-save")
    assert finetune(*broken, "--steps", "2").status == 0
    other = finetune(*broken, "--steps", "4", "--resume", "--beta", "0.2")
    assert other.status == 2 and "began with --beta 0.1, and now it is --beta 0.2" in other.err
    file = tmp_path / "broken" / "run" / "reference.npz"
    before = np.load(file)["values"]
    done = finetune(*broken, "--steps", "3", "--resume")
    assert done.status == 0, done.err
    assert losses(tmp_path / "broken") == whole[:3] and np.array_equal(
        np.load(file)["values"], before, equal_nan=True
    )
    other_base = shutil.copytree(checkpoint, tmp_path / "other")
    weights = other_base / "model.safetensors"
    save_file(
        {name: value + 1e-3 for name, value in load_file(weights).items()}, weights, metadata={"format": "pt"}
    )
    other = finetune(*broken, "--steps", "4", "--resume", "--model", other_base)
    assert other.status != 0 and "began with" in other.err
    content = dict(np.load(file))
    data_digest, _, base = str(content["digest"]).partition(" ")
    assert base.partition(" ")[0] == weights_identity(checkpoint)
    np.savez(
        file, values=content["values"] + 1, digest=np.array(f"{data_digest} {weights_identity(other_base)}")
    )
    done = finetune(*broken, "--steps", "4", "--resume")
    if trains == "all weights":
        assert done.status == 2 and "or of another model" in done.err
        np.savez(file, values=content["values"] + 1, digest=content["digest"])
        done = finetune(*broken, "--steps", "4", "--resume")
        assert done.status == 2 and "has other log-probabilities" in done.err, "of the same data and model"
        file.unlink()
        done = finetune(*broken, "--steps", "4", "--resume")
    if trains == "new adapters":
        assert done.status == 0 and losses(tmp_path / "broken") == pytest.approx(whole, rel=1e-5), done.err
    else:
        assert done.status == 2 and "is missing, damaged, of fewer steps, or of another model" in done.err


@pytest.mark.slow
def test_the_reference_of_another_adapter_is_refused(
    checkpoint: Path, data: Path, pairs: Path, finetune: Finetune, tmp_path: Path
) -> None:
    """It is of the same data and the same weights."""
    runs = [tmp_path / "first-run", tmp_path / "second-run"]
    for seed, run in enumerate(runs):
        torch.manual_seed(seed)
        config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        adapter = tmp_path / f"adapter-{seed}"
        get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint), config).save_pretrained(adapter)
        words = ("--model", checkpoint, "--data", pairs, "--objective", "dpo", "--adapter", adapter, *PLACE)
        done = finetune(
            *words, "--batch-size", "12", "--steps", "1", "--schedule", "constant", "--output", run
        )
        assert done.status == 0, done.err
    shutil.copy(runs[1] / "run/reference.npz", runs[0] / "run/reference.npz")
    done = finetune("--output", runs[0], "--resume", "--steps", "2")
    assert done.status == 2 and "or of another model" in done.err, done.err


def test_a_short_run_of_all_weights_gets_more_steps(
    checkpoint: Path, pairs: Path, finetune: Finetune, tmp_path: Path
) -> None:
    """It ended within its first epoch, so its reference has the rows of those steps alone: the model that it began
    with computes the others. The losses are those of a run of that length."""
    common = (
        "--model",
        checkpoint,
        "--data",
        pairs,
        "--objective",
        "dpo",
        *PLACE,
        "--batch-size",
        "4",
        "--no-save",
    )
    assert finetune(*common, "--steps", "3", "--output", tmp_path / "whole").status == 0
    assert finetune(*common, "--steps", "1", "--output", tmp_path / "short").status == 0
    done = finetune("--output", tmp_path / "short", "--resume", "--steps", "3")
    assert done.status == 0, done.err
    assert losses(tmp_path / "short") == losses(tmp_path / "whole")
    whole, short = (
        np.load(tmp_path / name / "run" / "reference.npz")["values"] for name in ("whole", "short")
    )
    assert np.array_equal(whole, short)


def test_a_short_run_of_ranks_says_why_it_gets_no_more_steps(
    checkpoint: Path, pairs: Path, finetune: Finetune, tmp_path: Path
) -> None:
    drive = tmp_path / "ssd"
    drive.mkdir()
    common = (
        "--model",
        checkpoint,
        "--data",
        pairs,
        "--objective",
        "dpo",
        *PLACE,
        "--batch-size",
        "4",
        "--no-save",
    )
    common = (*common, "--nodes", "1", "--gpus-per-node", "1", "--ssd", drive, "--output", tmp_path / "out")
    assert finetune(*common, "--steps", "1").status == 0
    done = finetune(*common, "--resume", "--steps", "3")
    assert done.status == 2
    assert (
        "--steps 3: the pairs of more than 1 step were not compared with the model before training"
        in done.err
    )
    assert "Begin a new run of 3 steps with --overwrite" in done.err


@pytest.mark.slow
def test_a_plan_counts_the_reference(finetune: Finetune) -> None:
    """DPO reads what SFT reads of as many rows; before its first step, the reference passes over the data."""
    where = ("--gpu", "rtx4090", "--drive", "samsung-990-pro-4tb", "--ssds", "4", "--seq-len", "1024", *LORA)
    where = ("--plan", "--model", "gpt3-13b", "--host-memory", "64GiB", "--drive-life", "any", *where)
    plans = {}
    for name, options in {
        "sft": ("--batch-size", "32"),
        "dpo": ("--batch-size", "16", "--objective", "dpo"),
    }.items():
        done = finetune(*where, *options, "--json")
        assert done.status == 0, done.err
        plans[name] = json.loads(done.out)
    sft, dpo = plans["sft"], plans["dpo"]
    assert dpo["ssd_read_bytes_per_step"] <= 1.02 * sft["ssd_read_bytes_per_step"]
    assert sft["bound_seconds"]["gpu"] < dpo["bound_seconds"]["gpu"] < 1.02 * sft["bound_seconds"]["gpu"]
    shown = finetune(*where, "--objective", "dpo")
    assert "each batch of the data passes forward once before the first step" in " ".join(shown.out.split())


@pytest.mark.parametrize(("words", "message"), [
    (("--objective", "dpo"), "give --data with prompt, chosen and rejected"),
    (("--beta", "0.2"), "--beta is for --objective dpo"),
    (("--objective", "dpo", *LORA, "--lora-dropout", "0.1"), "--lora-dropout has no effect with --objective dpo"),
    (("--objective", "reward", *LORA, "--lora-dropout", "0.1"), "--lora-dropout has no effect with"),
    (("--beta", "0", "--objective", "dpo"), "0.0 is not in the range x>0"),
    (("--objective", "dpo", *LORA, "--nodes", "1", "--data", "."), "does not go with --nodes in memory"),
    (("--objective", "ipo"), "'ipo' is not one of 'sft', 'pretrain', 'dpo', 'reward', 'classify'"),
])  # fmt: skip
def test_a_missing_thing_is_rejected(
    words: tuple[str, ...], message: str, checkpoint: Path, finetune: Finetune
) -> None:
    done = finetune("--model", checkpoint, *words)
    assert done.status == 2 and message in done.err


GPT2 = GPT2Config(
    vocab_size=384, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0.5, resid_pdrop=0.5
)
LLAMA = LlamaConfig(**SIZES, attention_dropout=0.5, initializer_range=0.3)  # whose dropout is no module

FALCON = FalconConfig(
    vocab_size=384, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, hidden_dropout=0.5
)


@pytest.mark.parametrize(("config", "is_adapted"), [
    (GPT2, False), (LLAMA, False), (FALCON, False), (LlamaConfig(**SIZES), True),
])  # fmt: skip
def test_dropout_is_off(
    config: PreTrainedConfig, is_adapted: bool, pairs: Path, finetune: Finetune, tmp_path: Path
) -> None:
    """In the first step policy and reference are equal, so the loss is log 2; with dropout it is noise."""
    model = small_checkpoint(tmp_path / "model", config)
    command = ("--model", model, "--data", pairs, "--objective", "dpo", *PLACE, "--batch-size", "8")
    if is_adapted:
        adapters = LoraConfig(
            r=4, lora_dropout=0.5, target_modules=["q_proj", "up_proj"], init_lora_weights=False
        )
        get_peft_model(AutoModelForCausalLM.from_pretrained(model), adapters).save_pretrained(
            tmp_path / "adapter"
        )
        command += ("--adapter", tmp_path / "adapter")
    done = finetune(*command, "--steps", "1", "--no-save", "--output", tmp_path / "out")
    assert done.status == 0 and "learns   dpo against" in done.out and "without dropout" in done.out, done.err
    assert history(tmp_path / "out")[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
