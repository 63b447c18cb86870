"""Learning from a teacher with the command, against whole logits in memory."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl.experimental.gkd import GKDTrainer

from common.data import DataConfig, open_data
from common.data.demo_text import train_demo_tokenizer
from tests.cli.conftest import VOCAB, Finetune, alone_and_on_two_ranks

PLACE = ("--gpu", "cpu", "--host-memory", "600MiB", "--dtype", "fp32", "--schedule", "constant", "--lr", "1e-3")
STEPS, ROWS, TEMPERATURE, BETA, ALPHA = 5, 4, 2.0, 0.3, 0.8

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("teacher") / "teacher", VOCAB)


def made(directory: Path, vocabulary: int) -> Path:
    """A model that is larger than the student."""
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=48, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(7)
    LlamaForCausalLM(config).save_pretrained(directory)
    train_demo_tokenizer(vocabulary, directory)
    return directory


def in_memory(checkpoint: Path, teacher: Path, data: Path, cache: Path) -> tuple[list[float], Any]:
    """Losses and the model after the same steps."""
    batches = open_data(DataConfig((str(data),), 32, ROWS), AutoTokenizer.from_pretrained(checkpoint), cache)
    theirs = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).train()
    groups = [{"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.01}]
    groups += [{"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}]
    optimizer, losses = torch.optim.AdamW(groups, lr=1e-3), []
    for step in range(STEPS):
        batch = batches.batch(step)
        given = {name: batch[name] for name in ("input_ids", "position_ids")}
        logits, labels = model(**given, use_cache=False).logits[:, :-1], batch["labels"][:, 1:]
        with torch.no_grad():
            others = theirs(**given, use_cache=False).logits[:, :-1]
        # TRL's leaves the squared temperature of Hinton et al. out.
        far = TEMPERATURE**2 * GKDTrainer.generalized_jsd_loss(logits, others, labels, BETA, TEMPERATURE)
        entropy = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss = ALPHA * far + (1 - ALPHA) * entropy
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    batches.close()
    return losses, model


OPTIONS = ("--teacher-temperature", TEMPERATURE, "--beta", BETA, "--distil-alpha", ALPHA, "--teacher-tokens", VOCAB)


def test_a_run_is_what_it_is_in_memory(
    checkpoint: Path, teacher: Path, data: Path, finetune: Finetune, tmp_path: Path
) -> None:
    common = ("--model", checkpoint, "--data", data, "--objective", "distil", "--teacher", teacher, *OPTIONS, *PLACE)
    common = (*common, "--batch-size", ROWS, "--seq-len", "32", "--micro-batch", "1", "--steps", STEPS)
    out, report = tmp_path / "out", tmp_path / "report.json"
    done = finetune(*common, "--output", out, "--report", report, "--eval-data", data)
    assert done.status == 0, done.err
    assert "distil, beta 0.3, distil-alpha 0.8, teacher teacher" in done.out
    losses, model = in_memory(checkpoint, teacher, data, tmp_path / "cache")
    found = json.loads(report.read_text())
    assert found["losses"] == pytest.approx(losses, rel=1e-5)
    assert "perplexity" in done.out.split("eval at step 5")[1]
    both = [ALPHA * far + (1 - ALPHA) * entropy for far, entropy in zip(*found["watched"].values(), strict=True)]
    assert both == pytest.approx(losses, rel=1e-5)
    tuned = dict(AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).named_parameters())
    for name, value in model.named_parameters():
        torch.testing.assert_close(tuned[name], value.data, rtol=1e-5, atol=1e-5, msg=name)
    assert not list(out.glob("*-consulted")), "the teacher's store has not been removed"


def test_two_ranks_learn_what_one_machine_learns(
    checkpoint: Path, teacher: Path, data: Path, finetune: Finetune, tmp_path: Path
) -> None:
    common = ("--model", checkpoint, "--data", data, "--objective", "distil", "--teacher", teacher, *PLACE[:3], "2GiB")
    common = (*common, *PLACE[4:], "--batch-size", ROWS, "--seq-len", "32", "--steps", "3", "--teacher-tokens", "16")
    outputs = alone_and_on_two_ranks(finetune, common, tmp_path)
    reports = [json.loads(output.with_suffix(".json").read_text()) for output in outputs]
    assert not list(tmp_path.glob("*-ssd/*-consulted"))
    assert reports[1]["losses"] == pytest.approx(reports[0]["losses"], rel=1e-5)
    for name, values in reports[0]["watched"].items():
        assert reports[1]["watched"][name] == pytest.approx(values, rel=1e-4), name


def test_a_plan_counts_what_the_teacher_takes(teacher: Path, checkpoint: Path, finetune: Finetune) -> None:
    where = ("--gpu", "rtx4090", "--drive", "samsung-990-pro-4tb", "--host-memory", "64GiB", "--steps", "10")
    common = ("--plan", "--model", checkpoint, "--objective", "distil", "--teacher", teacher, "--seq-len", "64", *where)
    done = finetune(*common)
    said = " ".join(done.out.split())
    assert done.status == 0 and "passes over 10 batches of the data before the first step" in said, done.err
    # 8 sequences of 64 tokens, of each of which 64 are kept with their log-probabilities.
    found = json.loads(finetune(*common, "--json").out)["before"]
    assert found["kept_bytes_per_batch"] == 8 * 64 * 64 * 8 and found["fits"] and found["seconds_per_batch"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "say whose, --teacher DIR"),
        (("--teacher", "gpt3-13b"), "is a preset, whose weights are random"),
        (("--teacher", "TEACHER", "--beta", "2"), "--beta 2: that of --objective distil is from 0 to 1"),
        (("--teacher", "OTHER"), "has a vocabulary of 400 tokens, and --model"),
        (("--teacher", "TEACHER", "--label-smoothing", "0.1"), "--label-smoothing is not known to --objective distil"),
    ],
)
def test_what_cannot_be_taught(
    words: tuple[str, ...], message: str, checkpoint: Path, teacher: Path, data: Path, finetune: Finetune,
    tmp_path: Path,
) -> None:  # fmt: skip
    places: dict[str, object] = {"TEACHER": teacher}
    if "OTHER" in words:
        places["OTHER"] = made(tmp_path / "other", 400)
    given = [places.get(word, word) for word in words]
    done = finetune("--model", checkpoint, "--data", data, "--objective", "distil", *given)
    assert done.status == 2 and message in done.err
