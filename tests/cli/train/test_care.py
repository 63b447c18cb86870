"""What a run does for itself: checkpoints, the best one, an early end, a time limit."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cli.train.checkpoints import BestEvaluation, Checkpoints
from tests.cli.conftest import Finetune
from tests.helpers.command.histories import history

SMALL = ("--batch-size", "4", "--seq-len", "32", "--gpu", "cpu", "--schedule", "constant")


class FakeModel:
    """A model that exports its step."""

    def __init__(self) -> None:
        self.step_count = 0

    def export(self, directory: Path) -> None:
        if self.step_count == 6:
            raise OSError("the drive is full")
        (directory / "step").write_text(str(self.step_count))


def test_the_newest_checkpoints_stay_and_none_is_partial(tmp_path: Path) -> None:
    model = FakeModel()
    checkpoints = Checkpoints(tmp_path, keep=2, is_rank0=True, export=model.export)
    for model.step_count in (2, 4, 10, 12):
        checkpoints.save(model.step_count)
    model.step_count = 6
    with pytest.raises(OSError, match="full"):
        checkpoints.save(6)
    assert [path.name for path in checkpoints.regular()] == ["step-10", "step-12"]
    model.step_count = 3
    checkpoints.save_best(3, 1.5)
    assert json.loads((tmp_path / "checkpoints/best/evaluation.json").read_text()) == {"step": 3, "loss": 1.5}
    assert (tmp_path / "checkpoints/best/step").read_text() == "3"


def test_the_best_evaluation_is_found_again_when_a_run_goes_on(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    losses = {0: 5.0, 2: 4.0, 4: 4.5, 6: None, 8: 3.0}
    lines = [json.dumps({"step": step, "validation_metrics/loss": loss}) for step, loss in losses.items()]
    metrics.write_text("\n".join([json.dumps({"step": 1, "lr": 1.0}), *lines, '{"step": 9, "val']))
    assert BestEvaluation.of_history(metrics, 6) == BestEvaluation(4.0, 2, 1)
    assert BestEvaluation.of_history(metrics, 8) == BestEvaluation(3.0, 8, 0)
    assert BestEvaluation.of_history(metrics, 0) == BestEvaluation(math.inf, 0, 0)


def test_a_run_saves_ends_early_and_its_checkpoint_is_that_of_a_shorter_run(
    finetune: Finetune, checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    command = ("--model", checkpoint, "--data", data, *SMALL)
    long, short = tmp_path / "long", tmp_path / "short"
    watched = ("--eval-split", "10%", "--eval-every", "1", "--patience", "1", "--save-every", "2", "--keep", "1")
    done = finetune(*command, *watched, "--lr", "1e-3", "--steps", 4, "--output", long)
    assert done.status == 0, done.err
    assert [path.name for path in Checkpoints(long, 1, True, FakeModel().export).regular()] == ["step-2"]
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
    ended = finetune(*command, "--max-hours", "0.00001", "--quiet")
    assert ended.status == 0, ended.err
    assert "ended after step 1 of 4" in ended.out and "--max-hours" in ended.out and "--quiet --resume" in ended.out
    assert "step 1/4" not in ended.out and not (tmp_path / "out/config.json").exists()
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
