"""Learning from pairs of answers with the command."""

import json
import math
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.cli.conftest import Finetune

PLACE = ("--gpu", "cpu", "--host-memory", "600MiB", "--dtype", "fp32", "--schedule", "constant", "--lr", "1e-2")
LORA = ("--lora-rank", "4")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sums that are right and sums that are wrong."""
    file = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    records = [
        {"prompt": f"{i} plus {i} is", "chosen": f" surely {2 * i}.", "rejected": f" maybe {i * i + 1}, who knows."}
        for i in range(12)
    ]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def in_memory(checkpoint: Path, file: Path, objective: str, steps: int) -> tuple[list[float], float]:
    """Losses and the last accuracy of the same run, all pairs in each step, on whole logits."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    if objective == "dpo":
        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.01}]
    groups += [{"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2)
    bos = [tokenizer.bos_token_id] if tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id else []
    records = [json.loads(line) for line in file.read_text().splitlines()]

    def log_probs(text: str, answer: str) -> tuple[torch.Tensor, int]:
        prompt = bos + tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = bos + tokenizer(text + answer, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        scores = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
        taken = [scores[place - 1, ids[place]] for place in range(len(prompt), len(ids))]
        return torch.stack(taken).sum(), len(taken)

    losses, accuracy = [], math.nan
    for _ in range(steps):
        total, right = torch.zeros(()), 0
        for record in records:
            both = [log_probs(record["prompt"], record[side]) for side in ("chosen", "rejected")]
            (chosen, long), (rejected, short) = both
            if objective == "dpo":
                with torch.no_grad(), model.disable_adapter():
                    theirs = [log_probs(record["prompt"], record[side])[0] for side in ("chosen", "rejected")]
                rewards = 0.3 * (chosen - theirs[0]), 0.3 * (rejected - theirs[1])
                total = total - 0.9 * functional.logsigmoid(rewards[0] - rewards[1])
                total = total - 0.1 * functional.logsigmoid(rewards[1] - rewards[0])
            else:
                rewards = 2.0 * chosen / long, 2.0 * rejected / short
                total = total - functional.logsigmoid(rewards[0] - rewards[1] - 0.7)
            right += bool(rewards[0] > rewards[1])
        (total / len(records)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total.detach()) / len(records))
        accuracy = right / len(records)
    return losses, accuracy


@pytest.mark.parametrize(
    ("objective", "options", "micro"),
    [
        ("dpo", (*LORA, "--beta", "0.3", "--label-smoothing", "0.1"), "1"),
        ("simpo", ("--simpo-gamma", "0.7"), "4"),
    ],
)
def test_a_run_is_what_it_is_in_memory(
    objective: str,
    options: tuple[str, ...],
    micro: str,
    checkpoint: Path,
    pairs: Path,
    finetune: Finetune,
    tmp_path: Path,
) -> None:
    common = ("--model", checkpoint, "--data", pairs, "--objective", objective, *options, *PLACE)
    common = (*common, "--batch-size", "12", "--micro-batch", micro, "--steps", "3", "--eval-data", pairs)
    done = finetune(*common, "--output", tmp_path / "out", "--report", tmp_path / "report.json")
    assert done.status == 0, done.err
    report = json.loads((tmp_path / "report.json").read_text())
    losses, accuracy = in_memory(checkpoint, pairs, objective, 3)
    assert report["losses"] == pytest.approx(losses, rel=1e-5)
    assert report["watched"]["rewards/accuracies"][-1] == accuracy
    watched = report["watched"]
    sides = zip(watched["rewards/chosen"], watched["rewards/rejected"], strict=True)
    assert watched["rewards/margins"] == pytest.approx([better - worse for better, worse in sides], rel=1e-4)
    assert f"accuracy {accuracy:.1%}, margin" in done.out and "eval at step 3: loss" in done.out
    assert "12 pairs, 24 x 64 tokens" in done.out
    metrics = [json.loads(line) for line in (tmp_path / "out" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {"rewards/margins", "validation_metrics/rewards/accuracies"} <= {name for line in metrics for name in line}


def test_a_run_that_goes_on_is_the_same_run(checkpoint: Path, pairs: Path, finetune: Finetune, tmp_path: Path) -> None:
    common = ("--model", checkpoint, "--data", pairs, "--objective", "dpo", *LORA, *PLACE, "--batch-size", "4")
    whole = finetune(*common, "--steps", "4", "--output", tmp_path / "whole", "--report", tmp_path / "whole.json")
    assert whole.status == 0, whole.err
    broken = (*common, "--output", tmp_path / "broken")
    assert finetune(*broken, "--steps", "2", "--no-save").status == 0
    other = finetune(*broken, "--steps", "4", "--resume", "--beta", "0.2")
    assert other.status == 2 and "began with --beta 0.1, and now it is 0.2" in other.err
    assert finetune(*broken, "--steps", "4", "--resume", "--report", tmp_path / "broken.json").status == 0
    losses = [json.loads((tmp_path / f"{name}.json").read_text())["losses"] for name in ("whole", "broken")]
    assert losses[1] == losses[0][2:]


@pytest.mark.slow
def test_a_plan_counts_the_reference_and_the_second_run_of_the_head(finetune: Finetune) -> None:
    """DPO reads what SFT reads of as many rows, and computes more."""
    where = ("--gpu", "rtx4090", "--drive", "samsung-990-pro-4tb", "--ssds", "4", "--seq-len", "1024", *LORA, "--json")
    plans = {}
    for name, options in {
        "sft": ("--batch-size", "32"),
        "dpo": ("--batch-size", "16", "--objective", "dpo"),
        "simpo": ("--batch-size", "16", "--objective", "simpo"),
    }.items():
        done = finetune("--plan", "--model", "gpt3-13b", *options, *where, "--host-memory", "64GiB")
        assert done.status == 0, done.err
        plans[name] = json.loads(done.out)
    sft, dpo, simpo = (plans[name] for name in ("sft", "dpo", "simpo"))
    assert dpo["ssd_read_bytes_per_step"] <= 1.02 * sft["ssd_read_bytes_per_step"]
    assert sft["bound_seconds"]["gpu"] < simpo["bound_seconds"]["gpu"] < 1.02 * sft["bound_seconds"]["gpu"]
    assert 1.2 < dpo["bound_seconds"]["gpu"] / sft["bound_seconds"]["gpu"] < 1.5
    whole = finetune("--plan", "--model", "gpt3-13b", "--objective", "dpo", "--host-memory", "64GiB", *where[:-3])
    assert "each batch of the data passes forward once before the first step" in " ".join(whole.out.split())
    assert "without the adapters, in the same visits" in " ".join(
        finetune(
            "--plan", "--model", "gpt3-13b", "--objective", "dpo", "--host-memory", "64GiB", *where[:-1]
        ).out.split()
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--objective", "simpo"), "give --data with prompt, chosen and rejected"),
        (("--beta", "0.2"), "--beta is not known to --objective sft: it is for dpo, ipo, simpo, orpo, kto or distil"),
        (("--label-smoothing", "0.1", "--objective", "orpo"), "--label-smoothing is not known to --objective orpo"),
        (
            ("--simpo-gamma", "1", "--objective", "dpo", *LORA),
            "--simpo-gamma is not known to --objective dpo: it is for simpo",
        ),
        (("--objective", "dpo", *LORA, "--nodes", "1", "--data", "."), "does not go with --nodes in memory"),
        (
            ("--objective", "grpo"),
            "'grpo' is not one of 'sft', 'pretrain', 'dpo', 'ipo', 'simpo', 'orpo', 'kto', 'reward'",
        ),
    ],
)
def test_what_is_not_there_is_refused(
    words: tuple[str, ...], message: str, checkpoint: Path, finetune: Finetune
) -> None:
    done = finetune("--model", checkpoint, *words)
    assert done.status == 2 and message in done.err


def test_data_without_pairs_is_refused(checkpoint: Path, data: Path, finetune: Finetune) -> None:
    done = finetune("--model", checkpoint, "--objective", "simpo", "--data", data)
    assert done.status == 2 and "a pair has chosen and rejected, and a prompt" in done.err
