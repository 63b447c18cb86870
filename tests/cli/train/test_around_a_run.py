"""What surrounds the steps: held-out data, and a directory from which a run can be repeated."""

import itertools
import json
import math
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cli.main import main
from common.data import DataConfig, open_data
from tests.cli.conftest import Finetune

SMALL = ("--batch-size", 4, "--seq-len", 32, "--gpu", "cpu", "--lr", "1e-3", "--dtype", "fp32", "--seed", 3,
         "--schedule", "constant", "--max-grad-norm", "0.5")  # fmt: skip


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


class Done(NamedTuple):
    out: str
    output: Path
    words: tuple[object, ...]


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("held-out") / "held-out.jsonl"
    file.write_text(
        "".join(json.dumps({"text": f"Number {i} of the rest. " * (i % 5 + 1)}) + "\n" for i in range(23))
    )
    return file


@pytest.fixture(scope="module")
def done(checkpoint: Path, data: Path, held_out: Path, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Three steps, and two more when resumed, with evaluations in between."""
    output = tmp_path_factory.mktemp("runs") / "run"
    words = ("--model", checkpoint, "--data", data, *SMALL, "--output", output, "--eval-data", held_out,
             "--eval-every", 2)  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        assert main([*map(str, words), "--steps", "3", "--no-save"]) == 0
        assert main([*map(str, words), "--steps", "5", "--resume", "--save"]) == 0
    return Done("", output, words)


def test_evaluation_is_that_of_the_plain_model(done: Done, held_out: Path, tmp_path: Path) -> None:
    """The last one is of the exported model, document by document, without padding or batches."""
    tokenizer, model = (kind.from_pretrained(done.output) for kind in (AutoTokenizer, AutoModelForCausalLM))
    batches = open_data(DataConfig((str(held_out),), 32, 4, shuffle=False), tokenizer, tmp_path)
    assert batches.rows % 4, "the last batch should be a short one"
    total, count = 0.0, 0
    for number in range(batches.rows):
        row = {name: value[number % 4] for name, value in batches.batch(number // 4).items()}
        starts = [*torch.nonzero(row["position_ids"] == 0).flatten().tolist(), 32]
        for start, stop in itertools.pairwise(starts):
            targets = row["labels"][start + 1 : stop]
            if not (targets != -100).any():
                continue
            with torch.no_grad():
                logits = model(row["input_ids"][None, start:stop]).logits[0, :-1]
            total += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
            count += int((targets != -100).sum())
    seen = [line for line in lines(done.output / "run/metrics.jsonl") if "validation_metrics/loss" in line]
    assert [line["step"] for line in seen] == [0, 2, 3, 4, 5]
    assert seen[-1]["validation_metrics/loss"] == pytest.approx(total / count, rel=1e-5)
    assert seen[-1]["validation_metrics/perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)
    assert seen[-1]["validation_metrics/loss"] < seen[0]["validation_metrics/loss"]


def test_a_run_is_repeated_from_its_directory(finetune: Finetune, done: Done, tmp_path: Path) -> None:
    """The same losses, bit for bit: neither the interruption nor looking at held-out data changes any."""
    config = done.output / "run" / "config.toml"
    content = tomllib.loads(config.read_text())
    assert content["output"]["resume"] is False and content["data"]["data"][0].startswith("/")
    outcome = finetune("--config", config, "--output", tmp_path / "again", "--eval-every", 5, "--no-save")
    assert outcome.status == 0, outcome.err
    assert (tmp_path / "again/losses.jsonl").read_bytes() == (done.output / "losses.jsonl").read_bytes()
    held_out = [line for line in outcome.out.splitlines() if line.startswith(("held out", "eval at"))]
    assert held_out[0].startswith("held out ") and "rows of 32" in held_out[0]
    assert [line.split(":")[0] for line in held_out[1:]] == ["eval at step 0", "eval at step 5"]


def test_the_run_directory(done: Done) -> None:
    description = json.loads((done.output / "run/run.json").read_text())
    assert len(description["id"]) == 32
    first, second = description["calls"]
    assert (first["after_step"], first["steps"], second["after_step"], second["steps"]) == (0, 3, 3, 5)
    assert second["command"].startswith("finetune --model ") and second["command"].endswith(
        "--steps 5 --resume --save"
    )
    assert torch.__version__.startswith(second["versions"]["torch"]) and second["versions"][
        "Python"
    ].startswith("3.")
    assert second["plan"]["counts"]["device_blocks"] > 0 and second["parameters"] == first["parameters"]
    steps = [line for line in lines(done.output / "run/metrics.jsonl") if "lr" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5]
    for line, learned in zip(steps, lines(done.output / "losses.jsonl"), strict=True):
        assert (
            line["loss_metrics/global_avg_loss"] == learned["loss"]
            and line["grad_norm"] == learned["grad_norm"]
        )
        assert line["n_tokens_seen"] == line["step"] * 4 * 32
        assert line["throughput(tps)"] == pytest.approx(128 / line["time_metrics/end_to_end(s)"])
        assert line["memory/host(GiB)"] >= 0  # beyond what this process had before
        for name in ("tflops", "ssd/written(GiB)"):
            assert line[name] > 0, name
    # On a busy machine, what one step writes may all be written in the time of the next one.
    assert sum(line["time_metrics/busy_ssd(s)"] for line in steps) > 0


@pytest.mark.parametrize(("words", "message"), [
    (["--eval-every", "5"], "--eval-every does nothing without --eval-data or --eval-split"),
    (["--eval-data", "nothing.jsonl"], "There is no data file 'nothing.jsonl'"),
])  # fmt: skip
def test_mistakes(finetune: Finetune, words: list[str], message: str) -> None:
    outcome = finetune("--model", "llama-10m", *words)
    assert outcome.status == 2 and message in outcome.err and outcome.err.count("\n") == 1, outcome.err
