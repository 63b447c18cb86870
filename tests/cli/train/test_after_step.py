"""What a run does for itself: checkpoints, the best one, an early end, a time limit."""

import json
import math
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import cli.train.loop
from cli.job.outputs import Outputs
from cli.main import main
from cli.report.log import MetricsLogger
from cli.train.engine_trainer import EngineTrainer
from cli.train.loop import AfterStep, best_of, read_evaluations
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


class Scene:
    """A run in ``output`` that takes no real steps: what it saves says in which call that was."""

    def __init__(self, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.output = output
        self.call = 0
        self.user_state: dict[str, Any] = {}  # as it was committed
        monkeypatch.setattr("cli.train.loop._save", self._save)
        monkeypatch.setattr("cli.train.loop.check_files", lambda job, model: None)

    def _save(self, job: Any, model: Any, folder: Path, is_rank0: bool) -> None:
        (folder / "config.json").write_text(f"call {self.call}")

    def run(
        self,
        steps: range,
        committed: int,
        losses: dict[int, float] | None = None,
        ends: bool = False,
        **options: Any,
    ) -> str:
        """Do what is due after ``steps``, where the first is the one to resume from; return why the run has ended.

        After the last of them, it ``ends`` or is killed. The newest commit is that of step ``committed``. ``losses``
        are those that evaluations give, by step.
        """
        self.call += 1
        model = SimpleNamespace(step_count=steps.start, user_state=json.loads(json.dumps(self.user_state)))
        job: Any = SimpleNamespace(
            output=self.output, outputs=Outputs.read(self.output), steps=99, checkpoint=None,
            held_out=SimpleNamespace(digest="x") if losses else None, model=SimpleNamespace(adapters=None),
            settings=SimpleNamespace(save_every=2, keep=9, eval_every=1, patience=None),
        )  # fmt: skip
        vars(job.settings).update(options)

        def evaluate(held_out: Any) -> SimpleNamespace:
            assert losses is not None
            return SimpleNamespace(loss=losses[model.step_count])

        process: Any = SimpleNamespace(is_rank0=True, agree=bool, enter=lambda where: None)
        trainer: Any = SimpleNamespace(model=model, evaluate=evaluate)
        after = AfterStep(job, trainer, process, None)
        for step in steps:
            if step > steps.start:
                after.forget(step)
            model.step_count = step
            if step == committed:
                self.user_state = json.loads(json.dumps(model.user_state, allow_nan=False))
            after.run(step)
            if after.is_over():
                break
        if ends:
            after.forget(math.inf)
        self.lost = after.lost_best()
        return after.last_words

    def calls(self) -> dict[str, str]:
        """Return by which call each checkpoint was saved."""
        files = sorted((self.output / "checkpoints").glob("*/config.json"))
        return {file.parent.name: file.read_text().removeprefix("call ") for file in files}


def test_checkpoints_of_steps_that_were_not_committed_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A continued run takes these steps again, perhaps with other options."""
    scene = Scene(tmp_path, monkeypatch)
    scene.run(range(9), committed=4)
    scene.run(range(4, 8), committed=4)
    assert scene.calls() == {"step-2": "1", "step-4": "1", "step-6": "2", "step-8": "1"}
    scene.run(range(4, 11), committed=10)
    assert scene.calls() == {"step-2": "1", "step-4": "1", "step-6": "3", "step-8": "3", "step-10": "3"}


def test_checkpoints_of_steps_that_were_not_committed_and_are_not_due_again_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before their step is taken: a run that is killed right after it does not take them for its own."""
    scene, losses = Scene(tmp_path, monkeypatch), {step: 9.0 - step for step in range(9)}
    scene.run(range(9), committed=4, losses=losses)
    assert scene.calls() == {**dict.fromkeys(["step-2", "step-4", "step-6", "step-8", "best"], "1")}
    scene.run(range(4, 6), committed=4, save_every=5, eval_every=9, losses=losses)
    assert scene.calls() == {
        "step-2": "1",
        "step-4": "1",
        "step-5": "2",
        "step-6": "1",
        "step-8": "1",
        "best": "1",
    }
    scene.run(range(4, 8), committed=4, save_every=3, eval_every=9, losses=losses)
    assert scene.calls() == {"step-2": "1", "step-4": "1", "step-6": "3", "step-8": "1", "best": "1"}
    scene.run(range(4, 8), committed=4, save_every=None, ends=True, losses={**losses, 7: 9.0})
    assert scene.calls() == {"step-2": "1", "step-4": "1"}, "also those of steps after the last"


def test_the_best_checkpoint_is_not_lost_while_its_evaluation_is_due_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commit of its step does not hold it, and the file that has it may be cut."""
    scene, losses = Scene(tmp_path, monkeypatch), {step: 9.0 - step for step in range(9)}
    scene.run(range(3), committed=2, losses=losses)
    scene.run(range(2, 4), committed=3, losses=losses)
    assert "lost" not in capsys.readouterr().out and scene.calls()["best"] == "2"


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_text("edited")])
def test_a_damaged_checkpoint_is_named_and_does_not_count(
    damage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = Scene(tmp_path, monkeypatch)
    scene.run(range(7), committed=6, keep=3)
    assert scene.calls() == dict.fromkeys(["step-2", "step-4", "step-6"], "1")
    damage(tmp_path / "checkpoints/step-4/config.json")
    scene.run(range(6, 9), committed=8, keep=3)
    assert "damaged" in (said := capsys.readouterr().out) and "checkpoints/step-4/config.json" in said
    assert {"step-2": "1", "step-6": "1", "step-8": "2"}.items() <= scene.calls().items(), "three whole ones"
    scene.run(range(8, 11), committed=10, keep=3)
    assert "step-2" not in scene.calls(), "three whole ones are newer"
    capsys.readouterr()
    outputs = Outputs.read(tmp_path)
    (outputs.prepare("checkpoints/step-2") / "config.json").touch()
    outputs.put("checkpoints/step-2")
    shutil.rmtree(tmp_path / "checkpoints/step-2")  # as if the run was killed when it removed that
    scene.run(range(10, 11), committed=10, keep=3)
    assert "damaged" not in capsys.readouterr().out


def test_a_best_checkpoint_that_is_lost_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scene, losses = Scene(tmp_path, monkeypatch), {0: 5.0, 1: 4.0, 2: 3.0, 3: 3.5, 4: 3.6, 5: 2.0}
    best = tmp_path / "checkpoints/best"
    scene.run(range(4), committed=3, losses=losses)
    scene.run(range(3, 4), committed=3, losses=losses)
    assert "lost" not in capsys.readouterr().out
    (best / "config.json").write_text("edited")
    for why in ("damaged", "not there"):
        scene.run(range(3, 4), committed=3, losses=losses)
        lost = f"lost     the checkpoint of the best evaluation (step 2, loss 3.0000): {best} is {why}"
        assert lost in capsys.readouterr().out and lost == scene.lost
        shutil.rmtree(best, ignore_errors=True)
    scene.run(range(3, 6), committed=5, losses=losses)
    assert "lost" in capsys.readouterr().out and scene.lost == "", "a better one was saved since"


def test_evaluations_are_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scene writes no metrics, as if they were lost: a worse evaluation is not the best then."""
    losses = {0: 5.0, 1: 4.0, 2: 3.0, 3: 3.5, 4: math.nan, 5: 3.6, 6: 2.0, 7: 9.0}
    scene = Scene(tmp_path, monkeypatch)
    scene.run(range(4), committed=3, losses=losses)
    assert scene.calls()["best"] == "1"
    scene.run(range(3, 6), committed=5, losses=losses)
    assert scene.calls()["best"] == "1"
    scene.run(range(5, 8), committed=7, losses=losses)
    assert scene.calls()["best"] == "3"
    assert scene.user_state["evaluations"] == [[6, 2.0]], "it does not grow with the run"


@pytest.mark.parametrize("losses", [[5.0, 3.0, 3.5, math.nan, 3.6, 9.0], [math.nan] * 6])
def test_committed_evaluations_count_for_an_early_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, losses: list[float]
) -> None:
    """However often the run is continued, it ends where it would have ended."""
    named: dict[str, Any] = {"losses": dict(enumerate(losses)), "patience": 3}
    whole = Scene(tmp_path / "whole", monkeypatch).run(range(6), committed=5, **named)
    assert whole.startswith("ended early")
    scene = Scene(tmp_path / "cut", monkeypatch)
    ends = [scene.run(range(step, step + 2), committed=step + 1, **named) for step in range(5)]
    assert next(filter(None, ends)) == whole


def results(output: Path) -> dict[str, object]:
    """Everything that a run has left, without what depends on the time, the machine, and the number of calls."""
    found: dict[str, object] = {
        str(path.relative_to(output)): path.read_bytes()
        for path in sorted(output.rglob("*"))
        if path.is_file() and path.parts[len(output.parts)] not in ("store", "run")
    }
    metrics = [json.loads(line) for line in (output / "run/metrics.jsonl").read_text().splitlines()]
    timed = ("throughput", "tflops", "time_metrics", "memory", "ssd")
    found["metrics"] = [
        {name: value for name, value in entry.items() if not any(part in name for part in timed)}
        for entry in metrics
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
    (cli.train.loop, "_write", 1),
    (cli.train.loop, "_write", 3),  # logged, and neither the best nor a regular checkpoint is written
    (cli.train.loop, "_write", 4),
    (cli.train.loop, "_save", 3),  # while it is written
    (Outputs, "_add", 3),  # when the one before it is gone
    (Outputs, "write", 5),  # not listed
    (Outputs, "write", 6),
    (AfterStep, "is_over", 5),  # nothing is left to do after the step
    (cli.train.loop, "_export", 1),  # before the result
]


CASES = [("improving", place) for place in PLACES] + [("patience", PLACES[place]) for place in (2, 3, 12, 13)]


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
    place: tuple[Any, str, int],
    whole: tuple[list[str], dict[str, object]],
    finetune: Finetune,
    tmp_path: Path,
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
    watched = (
        "--eval-split",
        "10%",
        "--eval-every",
        "1",
        "--patience",
        "1",
        "--save-every",
        "2",
        "--keep",
        "1",
    )
    done = finetune(*command, *watched, "--lr", "1e-3", "--steps", 4, "--output", long)
    assert done.status == 0, done.err
    assert sorted(path.name for path in (long / "checkpoints").glob("step-*")) == ["step-2"]
    again = finetune(*command, "--eval-split", "10%", "--lr", "1e-3", "--steps", 2, "--output", short)
    assert again.status == 0, again.err
    saved = AutoModelForCausalLM.from_pretrained(long / "checkpoints/step-2").state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in
               AutoModelForCausalLM.from_pretrained(short).state_dict().items())  # fmt: skip

    ended = finetune(*command, *watched, "--lr", "10", "--steps", 40, "--output", tmp_path / "early")
    assert ended.status == 0 and "ended early: none was better than that of step" in ended.out
    assert len(history(tmp_path / "early")) < 10 and (tmp_path / "early/config.json").exists()


def test_a_time_limit_ends_a_run_in_order(
    finetune: Finetune, checkpoint: Path, data: Path, tmp_path: Path
) -> None:
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


@pytest.mark.slow
def test_evaluations_on_other_data_are_not_compared(
    finetune: Finetune, checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    """The held-out file changes under the same path: its losses say nothing about earlier ones."""
    held_out, output = tmp_path / "held-out.jsonl", tmp_path / "out"
    held_out.write_text(json.dumps({"text": "The quick brown fox jumps over the lazy dog. " * 4}) + "\n")
    line = ("--model", checkpoint, "--data", data, *SMALL, "--eval-data", held_out, "--eval-every", "1")
    line = (*line, "--save-every", "1", "--keep", "9", "--output", output)
    assert finetune(*line, "--steps", "2").status == 0
    best = output / "checkpoints/best/evaluation.json"
    first = json.loads(best.read_text())
    held_out.write_text(json.dumps({"text": "zqj xkv " * 30}) + "\n")
    outcome = finetune(*line, "--steps", "3", "--resume")
    assert outcome.status == 0 and "changed  the held-out data" in outcome.out
    second = json.loads(best.read_text())
    assert second["loss"] > first["loss"] and second["step"] >= 2
    again = finetune(*line, "--steps", "4", "--resume")
    assert again.status == 0 and "changed  the held-out data" not in again.out
