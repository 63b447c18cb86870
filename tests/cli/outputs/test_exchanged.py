"""Files of another run, or edited ones, in an output do not count as the run's, and are named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli.job.resumed import faults_of_losses, faults_of_references, table_sum
from cli.options.loss_sum import LossSum, edited_lines
from cli.report.log import History
from tests.cli.conftest import Finetune
from tests.helpers.command.histories import history

SMALL = ("--batch-size", 1, "--seq-len", 16, "--gpu", "cpu", "--schedule", "constant")
EVALUATION = "validation_metrics/loss"


@pytest.fixture(scope="module")
def begun(
    checkpoint: Path, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Finetune, Path, float], tuple[Any, ...]]:
    """Make a run of two steps in a directory, with an evaluation and a checkpoint after each."""

    def make(finetune: Finetune, output: Path, lr: float) -> tuple[Any, ...]:
        words = (
            "--model",
            checkpoint,
            "--data",
            data,
            "--eval-data",
            data,
            "--eval-every",
            1,
            "--save-every",
            1,
        )
        line = (*words, *SMALL, "--lr", lr, "--output", output)
        done = finetune(*line, "--steps", 2)
        assert done.status == 0, done.err
        return line

    return make


Begun = Callable[[Finetune, Path, float], tuple[Any, ...]]


@pytest.mark.slow
def test_histories_of_another_run_are_named(finetune: Finetune, begun: Begun, tmp_path: Path) -> None:
    line = begun(finetune, tmp_path / "out", 1e-3)
    begun(finetune, tmp_path / "other", 1e-2)
    assert finetune("verify", tmp_path / "out").status == 0
    for name in ("losses.jsonl", "run/metrics.jsonl"):
        shutil.copy(tmp_path / "other" / name, tmp_path / "out" / name)
    finished = finetune(*line, "--steps", 2, "--resume", "auto")
    verified = finetune("verify", tmp_path / "out")
    resumed = finetune(*line, "--steps", 3, "--resume")
    assert verified.status == 1 and resumed.status == finished.status == 0, resumed.err
    for name in ("losses.jsonl", "run/metrics.jsonl"):
        assert f"damaged  {tmp_path / 'out' / name} has other losses than this run" in finished.out, (
            finished.out
        )
        assert f"{tmp_path / 'out' / name} has other losses than this run." in verified.err, verified.err
        assert f"changed  {name} has other losses than this run for steps 1 to 2" in resumed.out, resumed.out
    again = finetune(*line, "--steps", 4, "--resume")
    assert "changed  losses.jsonl" in again.out, "as long as they are there"


@pytest.mark.slow
def test_edited_evaluations_do_not_count(finetune: Finetune, begun: Begun, tmp_path: Path) -> None:
    line = begun(finetune, tmp_path / "out", 1e-2)
    metrics = tmp_path / "out/run/metrics.jsonl"
    lines = [json.loads(text) for text in metrics.read_text().splitlines()]
    edited = [
        each | {EVALUATION: 0.1} if EVALUATION in each and each["step"] == 1 else each for each in lines
    ]
    metrics.write_text("".join(json.dumps(each) + "\n" for each in edited))
    resumed = finetune(*line, "--steps", 3, "--resume")
    assert resumed.status == 0 and "changed  run/metrics.jsonl has other evaluations" in resumed.out, (
        resumed.err
    )
    best = json.loads((tmp_path / "out/checkpoints/best/evaluation.json").read_text())
    assert best["step"] == 3 and best["loss"] < min(each[EVALUATION] for each in lines if EVALUATION in each)


@pytest.mark.slow
def test_the_newest_evaluation_does_not_count_if_it_is_edited(
    finetune: Finetune, begun: Begun, tmp_path: Path
) -> None:
    """No commit holds it: it is made after that of its step."""
    line = begun(finetune, tmp_path / "out", 1e-2)
    metrics, best = tmp_path / "out/run/metrics.jsonl", tmp_path / "out/checkpoints/best/evaluation.json"
    before = metrics.read_text()
    newest = json.loads(before.splitlines()[-1])
    assert newest["step"] == 2 and EVALUATION in newest
    metrics.write_text(before.replace(json.dumps(newest), json.dumps(newest | {EVALUATION: 0.1})))
    verified, finished = (
        finetune("verify", tmp_path / "out"),
        finetune(*line, "--steps", 2, "--resume", "auto"),
    )
    named = f"{metrics} has another evaluation of step 2 than this run"
    assert verified.status == 1 and named in verified.err, verified.err
    assert finished.status == 0 and f"damaged  {named}" in finished.out, finished.out
    resumed = finetune(*line, "--steps", 3, "--resume")
    assert resumed.status == 0 and "changed  run/metrics.jsonl has other evaluations" in resumed.out, (
        resumed.err
    )
    assert json.loads(best.read_text())["step"] == 3
    assert finetune("verify", tmp_path / "out").status == 0, "it was evaluated again"


@pytest.mark.slow
def test_the_list_of_another_run_does_not_count(
    finetune: Finetune, begun: Begun, data: Path, tmp_path: Path
) -> None:
    """Nor its weights with it."""
    output, line = tmp_path / "out", begun(finetune, tmp_path / "out", 1e-3)
    begun(finetune, tmp_path / "other", 1e-2)
    for name in ("model.safetensors", "run/files.json"):
        shutil.copy(tmp_path / "other" / name, output / name)
    evaluate = ("evaluate", "--data", data, *SMALL[:-2], "--model")
    for model in (output, output / "checkpoints/step-1"):
        evaluated = finetune(*evaluate, model)
        assert "files.json is missing, damaged, or of another run" in evaluated.out, evaluated.out
    assert "files.json is missing or damaged, or of another run" in finetune("verify", output).err
    assert finetune(*line, "--steps", 2, "--resume", "auto").status == 2, "it is not finished"
    (output / "run/files.json").unlink()
    for model in (output, output / "checkpoints/step-1"):
        evaluated = finetune(*evaluate, model)
        assert "files.json is missing, damaged, or of another run" in evaluated.out, evaluated.out
    shutil.rmtree(output / "run")
    verified = finetune("verify", output)
    assert verified.status == 1 and f"{output} holds model.safetensors, and without" in verified.err, (
        verified.err
    )


@pytest.mark.slow
def test_a_finished_run_names_damaged_checkpoints(finetune: Finetune, begun: Begun, tmp_path: Path) -> None:
    line = begun(finetune, tmp_path / "out", 1e-3)
    shutil.rmtree(tmp_path / "out/checkpoints/best")
    weights = tmp_path / "out/checkpoints/step-1/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    (tmp_path / "out/losses.jsonl").unlink()
    finished = finetune(*line, "--steps", 2, "--resume", "auto")
    assert finished.status == 0 and f"damaged  {weights} is not what the run wrote" in finished.out, (
        finished.out
    )
    assert f"{tmp_path / 'out/checkpoints/best'}" in finished.out
    assert f"gap      {tmp_path / 'out/losses.jsonl'} is missing" in finished.out
    assert f"gap      {tmp_path / 'out/losses.jsonl'} is missing" in finetune("verify", tmp_path / "out").out


def test_the_sum_tells_other_losses_from_lost_ones(tmp_path: Path) -> None:
    losses, file = LossSum(1, 1), tmp_path / "losses.jsonl"
    assert LossSum.committed({}) is None and not losses.fault(file)
    losses = losses.add(2, 5.0, 1.0, 1e-3).add(3, float("inf"), 2.0, 1e-3)
    state: dict[str, Any] = {}
    losses.put(state)
    assert LossSum.committed(json.loads(json.dumps(state))) == losses
    assert losses.fault(file) == "is missing"
    lines = [{"step": 1, "loss": 9.0}, {"step": 2, "loss": 5.0, "grad_norm": 1.0, "lr": 1e-3}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert losses.fault(file) == "has no line for step 3" and not losses.is_of_another(file)
    last = {"step": 3, "loss_metrics/global_avg_loss": None, "grad_norm": 2.0, "lr": 1e-3, "tflops": 0.1}
    file.write_text("".join(json.dumps(line) + "\n" for line in [*lines, last, {"step": 3, EVALUATION: 4.0}]))
    assert not losses.fault(file)
    file.write_text(file.read_text().replace("5.0", "5.1"))
    assert losses.is_of_another(file)


def test_the_sum_of_a_line_tells_edited_ones(tmp_path: Path) -> None:
    file, said = tmp_path / "metrics.jsonl", list[str]()
    history = History(file, 0)
    history.say = said.append
    for step, loss in enumerate((0.1, float("nan"), 1e300, 5.0)):
        history.append(step, {EVALUATION: loss, "validation_metrics/throughput(tps)": step}, summed=True)
    history.append(4, {"loss": 1.0})
    history.close()
    text = file.read_text()
    assert edited_lines(file) == []
    for before, after in (("0.1", "0.2"), ("null", "1.0"), ("1e+300", "null"), ('"step": 3', '"step": 0')):
        file.write_text(text.replace(before, after))
        assert len(edited_lines(file)) == 1, before
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines[1:4]:
        del line["checksum"]
        file.write_text("".join(json.dumps(each) + "\n" for each in lines))
        assert edited_lines(file) == list(range(1, line["step"] + 1))
    for line in lines[:4]:
        line.pop("checksum", None)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert edited_lines(file) == []  # of an earlier version
    file.write_text(text[:-30] + "\n")
    assert edited_lines(file) == [] and edited_lines(tmp_path / "none") == []


@pytest.mark.slow
def test_a_killed_run_has_its_losses(finetune: Finetune, begun: Begun, tmp_path: Path) -> None:
    """The last step of a commit may have no line yet, which the next process writes."""
    line = begun(finetune, tmp_path / "out", 1e-3)
    for name in ("losses.jsonl", "run/metrics.jsonl"):
        file = tmp_path / "out" / name
        lines = [text for text in file.read_text().splitlines() if json.loads(text)["step"] < 2]
        file.write_text("".join(f"{text}\n" for text in lines))
    resumed = finetune(*line, "--steps", 3, "--resume")
    assert resumed.status == 0 and "other losses" not in resumed.out, resumed.out
    assert [each["step"] for each in history(tmp_path / "out")] == [1, 2, 3]
    assert finetune("verify", tmp_path / "out").status == 0
    copy = shutil.copytree(tmp_path / "out", tmp_path / "copy")
    assert finetune("verify", copy).status == 0
    (copy / "losses.jsonl").write_text((copy / "losses.jsonl").read_text().replace('"loss": ', '"loss": 1'))
    verified = finetune("verify", copy)
    assert verified.status == 1 and f"{copy / 'losses.jsonl'} has other losses" in verified.err, verified.err


def test_damaged_references_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of preferences is not continued without them."""
    (tmp_path / "run").mkdir()
    file = tmp_path / "run/reference.npz"
    monkeypatch.setattr(
        "cli.job.resumed._committed", lambda _: {"user": {"reference": {file.name: ["data", 1, "sum"]}}}
    )
    assert faults_of_references(tmp_path) == [
        f"{file} is missing, and the run is not continued without it: copy it there again."
    ]
    np.savez(file, values=np.arange(9.0), digest=np.array("data"))
    assert faults_of_references(tmp_path) == []
    values = np.arange(9.0)
    noted = {file.name: ["data", 1, "sum", table_sum(values)]}
    monkeypatch.setattr("cli.job.resumed._committed", lambda _: {"user": {"reference": noted}})
    assert faults_of_references(tmp_path) == []
    for index in range(9):
        np.savez(file, values=np.where(np.arange(9) == index, -1, values), digest=np.array("data"))
        assert faults_of_references(tmp_path)[0].startswith(f"{file} has other log-probabilities")
    # Extended by more steps, and killed before a commit; then with other held-out data
    np.savez(file, values=np.arange(12.0), digest=np.array("data"), before=np.array(table_sum(values)))
    assert faults_of_references(tmp_path) == []
    np.savez(file, values=np.arange(3.0), digest=np.array("others model"))
    assert faults_of_references(tmp_path)[0].startswith(f"{file} has other log-probabilities")
    np.savez(tmp_path / "run/reference-held-out.npz", values=np.arange(3.0), digest=np.array("others model"))
    noted["reference-held-out.npz"] = noted.pop(file.name)
    assert faults_of_references(tmp_path) == []
    noted[file.name] = noted.pop("reference-held-out.npz")
    content = file.read_bytes()
    for damaged in (content[:-9], content[:200] + b"!" + content[201:], b""):
        file.write_bytes(damaged)
        assert faults_of_references(tmp_path)[0].startswith(f"{file} is damaged")


def test_a_result_that_is_not_listed_is_not_that_of_a_finished_run(
    finetune: Finetune, begun: Begun, tmp_path: Path
) -> None:
    """Nor are files that an older copy of the list does not have passed over."""
    output, line = tmp_path / "out", begun(finetune, tmp_path / "out", 1e-3)
    files = output / "run/files.json"
    content = json.loads(files.read_text())
    for name in ("checkpoints/step-1/model.safetensors", "model.safetensors"):
        del content["files"][name]
        files.write_text(json.dumps(content))
        finished = finetune(*line, "--steps", 2, "--resume", "auto")
        if name == "model.safetensors":
            assert finished.status == 2 and "holds model.safetensors, " in finished.err, finished.err
        else:
            assert f"damaged  {output / name} is not in run/files.json" in finished.out, finished.out


def test_a_result_of_an_earlier_step_is_named(finetune: Finetune, begun: Begun, tmp_path: Path) -> None:
    line = begun(finetune, tmp_path / "out", 1e-3)
    assert "kept " not in finetune(*line, "--steps", 3, "--resume").out
    resumed = finetune(*line, "--steps", 4, "--resume", "--no-save")
    assert f"kept     the result of an earlier step in {tmp_path / 'out'}: finetune export" in resumed.out, (
        resumed.err
    )


def test_evaluations_that_are_lost_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "cli.job.resumed._committed", lambda _: {"user": {"evaluations": [[1, 0.5], [2, None], [3, 0.7]]}}
    )
    (tmp_path / "run").mkdir()
    for lost in ((), (1,), (2, 3), (1, 2, 3)):
        history = History(tmp_path / "run/metrics.jsonl", 0)
        for step in (1, 2, 3):
            history.append(step, {"loss": 1.0})
            if step not in lost:
                history.append(step, {EVALUATION: 0.5}, summed=True)
        history.close()
        other, gaps = faults_of_losses(tmp_path)
        assert not other
        assert [gap.rpartition("no evaluation of step ")[2] for gap in gaps] == [f"{step}." for step in lost]
