"""What a run does for itself: checkpoints, the best one, an early end, a time limit."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import cli.train.loop
from cli.main import main
from cli.report.log import MetricsLogger
from cli.train.engine_trainer import EngineTrainer
from cli.train.loop import AfterStep, best_of, read_evaluations, regular_checkpoints
from common.store import StoreError
from tests.cli.conftest import Finetune
from tests.helpers.command.histories import history
from tests.helpers.command.kills import KILLED, killed_at

SMALL = ("--batch-size", "4", "--seq-len", "32", "--gpu", "cpu", "--schedule", "constant")


def test_evaluations_are_found_again_when_a_run_continues(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    losses = {0: 5.0, 2: 4.0, 4: 4.5, 6: None, 8: 3.0}
    lines = [json.dumps({"step": step, "validation_metrics/loss": loss}) for step, loss in losses.items()]
    metrics.write_text("\n".join([json.dumps({"step": 1, "lr": 1.0}), *lines, '{"step": 9, "val']))
    assert best_of(read_evaluations(metrics, 6)) == (2, 2), "a loss that is not finite is not the best"
    assert best_of(read_evaluations(metrics, 8)) == (8, 0)
    assert best_of(read_evaluations(metrics, 0)) == (0, 0)


def results(output: Path) -> dict[str, object]:
    """Everything that a run has left, without what depends on the time, the machine, and the number of calls."""
    found: dict[str, object] = {
        str(path.relative_to(output)): path.read_bytes()
        for path in sorted(output.rglob("*"))
        if path.is_file() and path.parts[len(output.parts)] not in ("store", "run", "data")
    }
    metrics = [json.loads(line) for line in (output / "run/metrics.jsonl").read_text().splitlines()]
    timed = ("throughput", "tflops", "time_metrics", "memory", "ssd")
    found["metrics"] = [
        {name: value for name, value in entry.items() if not any(part in name for part in timed)} for entry in metrics
    ]
    found["names"] = sorted(str(path.relative_to(output)) for path in output.rglob("*"))
    return {name: value.replace(output.name.encode(), b"RUN") if isinstance(value, bytes) else value
            for name, value in found.items()}  # fmt: skip


PLACES = [
    (MetricsLogger, "step", 4),  # committed, and not logged
    (EngineTrainer, "evaluate", 1),  # before the first step
    (EngineTrainer, "evaluate", 3),
    (MetricsLogger, "evaluation", 3),  # evaluated, and not logged
    (EngineTrainer, "evaluate", 5),  # after the last step
    (AfterStep, "_write", 1),
    (AfterStep, "_write", 3),  # logged, and neither the best nor a regular checkpoint is written
    (AfterStep, "_write", 4),
    (cli.train.loop, "_save", 3),  # while it is written
    (Path, "rename", 3),  # when the one before it is gone
    (Path, "rename", 4),
    (AfterStep, "is_over", 5),  # nothing is left to do after the step
    (cli.train.loop, "_export", 1),  # before the result
]


CASES = [("improving", place) for place in PLACES] + [("patience", PLACES[place]) for place in (2, 3, 11, 12)]


@pytest.fixture(scope="module")
def whole(
    request: pytest.FixtureRequest, checkpoint: Path, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[str], dict[str, object]]:
    """A run that nothing happens to: its command line without the output, and what it leaves."""
    output = tmp_path_factory.mktemp("whole") / "whole"
    rate = ["--lr", "1e-3"] if request.param == "improving" else ["--lr", "0", "--patience", "2"]
    due = shlex.split("--steps 8 --eval-split 10% --eval-every 2 --save-every 2 --keep 2")
    words = ["--model", str(checkpoint), "--data", str(data), *SMALL, "--dtype", "fp32", *rate, *due]
    assert main([*words, "--output", str(output)]) == 0
    return words, results(output)


@pytest.mark.slow
@pytest.mark.parametrize("whole", ["improving", "patience"], indirect=True)
def test_the_runs_that_are_killed_have_everything(whole: tuple[list[str], dict[str, object]]) -> None:
    words, expected = whole
    steps = [entry["step"] for entry in expected["metrics"] if "validation_metrics/loss" in entry]
    assert ("checkpoints/best/evaluation.json" in expected) == ("--patience" not in words)
    assert steps == ([0, 2, 4] if "--patience" in words else [0, 2, 4, 6, 8])


@pytest.mark.slow
@pytest.mark.parametrize(("whole", "place"), CASES, indirect=["whole"], ids=str)
def test_a_run_killed_anywhere_leaves_what_one_does_that_was_not(
    place: tuple[Any, str, int], whole: tuple[list[str], dict[str, object]], finetune: Finetune, tmp_path: Path
) -> None:
    words, expected = whole
    output = tmp_path / "killed"
    status = killed_at(*place, [*words, "--output", str(output)])
    assert status == KILLED or ("--patience" in words and status == 0)
    done = finetune(*words, "--output", output, "--resume", "auto")
    assert done.status == 0, done.err
    found = results(output)
    assert found["names"] == [name.replace("whole", "killed") for name in expected["names"]]
    assert found["metrics"] == expected["metrics"]
    assert found == expected


def test_a_run_saves_ends_early_and_its_checkpoint_is_that_of_a_shorter_run(
    finetune: Finetune, checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    command = ("--model", checkpoint, "--data", data, *SMALL)
    long, short = tmp_path / "long", tmp_path / "short"
    watched = ("--eval-split", "10%", "--eval-every", "1", "--patience", "1", "--save-every", "2", "--keep", "1")
    done = finetune(*command, *watched, "--lr", "1e-3", "--steps", 4, "--output", long)
    assert done.status == 0, done.err
    assert [path.name for path in regular_checkpoints(long / "checkpoints", 4)] == ["step-2"]
    again = finetune(*command, "--eval-split", "10%", "--lr", "1e-3", "--steps", 2, "--output", short)
    assert again.status == 0, again.err
    saved = AutoModelForCausalLM.from_pretrained(long / "checkpoints/step-2").state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in
               AutoModelForCausalLM.from_pretrained(short).state_dict().items())  # fmt: skip

    ended = finetune(*command, *watched, "--lr", "10", "--steps", 40, "--output", tmp_path / "early")
    assert ended.status == 0 and "ended early: no evaluation was better than that of step" in ended.out
    assert len(history(tmp_path / "early")) < 10 and (tmp_path / "early/config.json").exists()


def test_a_time_limit_ends_a_run_in_order(finetune: Finetune, checkpoint: Path, data: Path, tmp_path: Path) -> None:
    command = ("--model", checkpoint, "--data", data, *SMALL, "--steps", 4, "--output", tmp_path / "out")
    ended = finetune(*command, "--max-hours", "0.00001")
    assert ended.status == 0, ended.err
    assert "ended after step 1 of 4" in ended.out and "--max-hours" in ended.out and "--resume" in ended.out
    assert not (tmp_path / "out/config.json").exists()
    exported = finetune(*command, "--resume", "--export")
    assert exported.status == 0 and "as step 1 of 4 left it" in exported.out
    assert (tmp_path / "out/config.json").exists() and len(history(tmp_path / "out")) == 1
    on = finetune(*command, "--resume", "auto")
    assert on.status == 0 and "after step 1 of 4" in on.out, on.err
    longer = finetune(*command, "--steps", 5, "--resume")
    assert longer.status == 0 and len(history(tmp_path / "out")) == 5, longer.err


def test_a_run_that_would_learn_nothing_ends_with_a_message(
    finetune: Finetune, checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)  # no gradient reaches the values
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(tmp_path / "model")
    for name, learns in (("v_proj", False), ("o_proj", True)):
        options = ("--lora-rank", 2, "--lora-targets", name, "--steps", 1, "--output", tmp_path / name)
        done = finetune("--model", tmp_path / "model", "--data", data, *SMALL, *options)
        assert (done.status == 0) is learns, done.err
        assert ("The gradient of the first step is exactly 0" in done.err) is not learns


def test_a_full_drive_is_what_the_message_names(
    finetune: Finetune, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing partial is left, and the page of the run, which cannot be written either, does not hide the cause."""

    def full(what: str) -> Any:
        def fail(*args: Any, **named: Any) -> None:
            if what != "the page" or (tmp_path / "out/checkpoints").exists():
                raise StoreError(f"{what} cannot be written: no space left on device.")

        return fail

    monkeypatch.setattr("cli.train.loop._save", full("the checkpoint"))
    monkeypatch.setattr("cli.report.log.RunPage.update", full("the page"))
    command = ("--model", checkpoint, *SMALL, "--steps", 3, "--save-every", 1, "--output", tmp_path / "out")
    done = finetune(*command)
    assert done.status == 1 and "the checkpoint cannot be written" in done.err and "To continue:" in done.err
    assert "the page" not in done.err and not any((tmp_path / "out/checkpoints").iterdir())
