"""``finetune --plan``: text for people, JSON for programs, exit statuses, and what cannot be combined."""

import json
import re
from pathlib import Path

import pytest

from tests.cli.conftest import Finetune

SERVER = ("--gpu", "4090", "--drive", "p5510", "--ssds", 4, "--host-memory", "64GiB")


def test_a_plan_for_people(finetune: Finetune) -> None:
    outcome = finetune("--plan", *SERVER, "--model", "gpt3-1.3b", "--batch-size", 16)
    assert outcome.status == 0, outcome.err
    lines = outcome.out.splitlines()
    assert all(len(line) <= 100 for line in lines)
    for label in ("step", "bound", "busy", "device", "host", "SSD", "schedule", "start", "drives", "batch"):
        assert any(line.startswith(label) for line in lines), label
    assert sum("░" in line or "█" in line for line in lines) == 5
    assert "4 x Intel SSD D7-P5510" in lines[0]
    assert "relaxed by" in outcome.out


@pytest.mark.parametrize("pieces", [(), ("--piece-size", "4KiB"), ("--piece-size", "4KiB", "--lora-rank", 2)])
def test_a_configuration_is_planned_without_its_weights(
    finetune: Finetune, own_checkpoint: Path, pieces: tuple[object, ...]
) -> None:
    line = (
        "plan",
        "--model",
        own_checkpoint,
        "--gpu",
        4090,
        "--drive",
        "p5510",
        "--json",
        "--seq-len",
        32,
        *pieces,
    )
    whole = finetune(*line)
    (own_checkpoint / "model.safetensors").unlink()
    alone = finetune(*line)
    assert whole.status == alone.status == 0, alone.err
    assert alone.out == whole.out


def test_a_limit_on_wear_that_no_plan_reaches(finetune: Finetune) -> None:
    outcome = finetune("--plan", *SERVER, "--model", "llama-10m", "--drive-life", 1_000_000)
    text = " ".join(outcome.out.split())
    days = re.search(
        r": ([\d,.]+) days until .* no plan reaches --drive-life 1,000,000, and this one wears least", text
    )
    assert outcome.status == 0 and days and float(days[1].replace(",", "")) < 1e6


def test_only_json_on_stdout(finetune: Finetune, tmp_path: Path) -> None:
    trace = tmp_path / "step.json"
    outcome = finetune("--plan", *SERVER, "--model", "gpt3-1.3b", "--json", "--trace", trace)
    content = json.loads(outcome.out)
    assert outcome.status == 0 and content["fits"] is True and content["batch_size"] == 8
    assert content["drive_count"] == 4 and content["step_seconds"] > 0
    assert json.loads(trace.read_text())


def test_what_does_not_fit_is_an_answer(finetune: Finetune) -> None:
    outcome = finetune("--plan", *SERVER[:-1], "64MiB", "--model", "llama-10m")
    assert outcome.status == 1 and outcome.err == ""
    assert "--host-memory of at least" in " ".join(outcome.out.split())


def test_memory_that_is_not_given_is_assumed_and_not_this_machines(finetune: Finetune) -> None:
    assumes = "48 GiB of host memory for the run (--host-memory)"
    without = finetune("--plan", *SERVER[:-2], "--model", "llama-10m")
    assert without.status == 0 and assumes in " ".join(without.out.split())
    assert assumes not in " ".join(finetune("--plan", *SERVER, "--model", "llama-10m").out.split())


def test_one_memory_of_host_and_gpu_is_counted_once(finetune: Finetune, tmp_path: Path) -> None:
    gpu = tmp_path / "unified.toml"
    gpu.write_text(
        'name = "a GPU"\nmemory = "128GiB"\nlink_gb_per_s = 100\nbf16_tflops = 100\nunified = true\n'
    )
    hardware = ("plan", "--gpu", gpu, "--drive", "p5510", "--model", "llama-10m")
    text = " ".join(finetune(*hardware, "--host-memory", "100GiB").out.split())
    assert " of 50 GiB" in text.partition("device ")[2].partition(" host ")[0]
    assert " of 50 GiB" in text.partition(" host ")[2].partition(" SSD ")[0]
    assert "of the memory that GPU and host share, the GPU has 50 GiB (--device-memory)" in text
    chosen = " ".join(finetune(*hardware, "--host-memory", "100GiB", "--device-memory", "70GiB").out.split())
    assert " of 70 GiB" in chosen and " of 30 GiB" in chosen
    refused = finetune(*hardware, "--host-memory", "20GiB", "--device-memory", "20GiB")
    assert refused.status == 2 and "leaves nothing for the host" in refused.err


@pytest.mark.slow
def test_the_largest_model(finetune: Finetune) -> None:
    outcome = finetune("--plan", *SERVER[:-1], "8GiB", "--max-model", "--batch-size", 1, "--json")
    content = json.loads(outcome.out)
    assert content["fits"] and content["parameters"] > 10e9
    larger = finetune("--plan", *SERVER[:-1], "8GiB", "--model", "gpt3-805b", "--batch-size", 1, "--json")
    assert not json.loads(larger.out)["fits"]


@pytest.mark.parametrize(("words", "message"), [
    (("--plan", *SERVER), "--max-model"),
    (("--plan", *SERVER, "--model", "gpt3-13b", "--max-model"), "--max-model and --model exclude each other"),
    (("--plan", "--gpu", "4090", "--drive", "p5150", "--model", "gpt3-13b"), "not a drive preset"),
    (("--plan", "--drive", "p5510", "--model", "gpt3-13b"), "name the GPU as well"),
    (("--plan", "--ssds", 2, "--model", "gpt3-13b"), "name it with --drive"),
    (("--plan", "--gpu", "4090", "--model", "gpt3-13b"), "--drive NAME --ssds N"),
    (("--plan", *SERVER, "--model", "gpt3-13b", "--data", "x.jsonl"), "no data file 'x.jsonl'"),
])  # fmt: skip
def test_mistakes(finetune: Finetune, words: tuple[object, ...], message: str) -> None:
    outcome = finetune(*words)
    assert outcome.status == 2 and message in outcome.err and outcome.out == ""
    assert len(outcome.err.splitlines()) == 1


def test_a_reference_before_training_passes_through_pieces(finetune: Finetune) -> None:
    words = (
        "--plan",
        *SERVER,
        "--model",
        "llama-10m",
        "--lora-rank",
        4,
        "--objective",
        "dpo",
        "--piece-size",
        "1MiB",
    )
    outcome = finetune(*words)
    assert outcome.status == 0 and "passes forward once before the first step" in " ".join(
        outcome.out.split()
    )
