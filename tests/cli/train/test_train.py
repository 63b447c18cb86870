"""Whole runs: what is saved, what is reported, what resuming gives, and what Ctrl-C leaves."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.cli.conftest import Finetune, sending
from tests.helpers.command.histories import history, losses, metrics

ROOT = Path(__file__).parents[3]
SMALL = ("--batch-size", "4", "--seq-len", "32", "--gpu", "cpu", "--lr", "1e-3", "--warmup", "2")


def test_six_steps_are_three_and_three_more(
    finetune: Finetune, checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    drives = [tmp_path / name for name in ("nvme0", "nvme1")]
    for drive in drives:
        drive.mkdir()
    command = (
        "--model",
        checkpoint,
        "--data",
        data,
        *SMALL,
        "--schedule",
        "constant",
        "--ssd",
        f"{tmp_path}/nvme*",
    )
    whole, parts = tmp_path / "whole", tmp_path / "parts"

    outcome = finetune(*command, "--steps", 6, "--output", whole)
    assert outcome.status == 0, outcome.err
    assert finetune(*command, "--steps", 3, "--output", parts, "--no-save").status == 0
    first = losses(parts)
    resumed = finetune(*command, "--steps", 6, "--output", parts, "--resume", "--save")
    assert resumed.status == 0, resumed.err
    assert "after step 3 of 6" in resumed.out
    assert losses(parts)[:3] == first and losses(whole)[-1] < losses(whole)[0]
    assert history(whole) == history(parts)
    assert (whole / "model.safetensors").read_bytes() == (parts / "model.safetensors").read_bytes()

    busy = {name for name in metrics(whole) if "busy" in name}
    resources = ("gpu", "host_to_device", "device_to_host", "ssd", "adam")
    assert busy == {f"time_metrics/busy_{name}(s)" for name in resources}

    # Every store is in its own folder on every drive, found again by the output's name.
    for drive in drives:
        assert sorted(path.name.rsplit("-", 1)[0] for path in drive.iterdir()) == [
            "fuyou-parts",
            "fuyou-whole",
        ]
    model = AutoModelForCausalLM.from_pretrained(whole)
    assert len(AutoTokenizer.from_pretrained(whole)) == model.config.vocab_size

    for option, message in {
        ("--batch-size", 2): "began with --batch-size 4, and now it is --batch-size 2",
        ("--steps", 5): "6 steps already, more than --steps 5",
    }.items():
        refused = finetune(*command, "--steps", 6, "--output", parts, "--resume", *option)
        assert refused.status == 2 and message in refused.err, refused.err
    again = finetune(*command, "--steps", 6, "--output", parts, "--no-save")
    assert again.status == 2 and "holds a checkpoint already" in again.err
    assert "--resume" in again.err and "--overwrite" in again.err
    assert history(whole) == history(parts)
    assert finetune(*command, "--steps", 3, "--output", parts, "--overwrite", "--no-save").status == 0
    assert [line["step"] for line in history(parts)] == [1, 2, 3]


def test_throughput_on_random_tokens(finetune: Finetune, tmp_path: Path) -> None:
    outcome = finetune(
        "--model", "llama-10m", "--steps", 2, "--batch-size", 1, "--seq-len", 16, "--gpu", "cpu"
    )
    assert outcome.status == 0, outcome.err
    assert "measures throughput" in outcome.out
    steps = [line for line in outcome.out.splitlines() if line.startswith("step ")]
    assert len(steps) == 2 and steps[1].startswith("step 2/2: loss ")
    for figure in ("norm", "lr 5e-06", "tokens/s", "bound by"):
        assert figure in steps[1]
    assert (tmp_path / "finetune-output" / "llama-10m" / "config.json").exists()


def stopped_in(output: Path, err: str) -> int:
    """The last committed step of a run that a signal ended as it should."""
    last = err.strip().splitlines()[-1]
    committed = len(history(output))
    assert (
        last.startswith("stopped in step ")
        and f"step {committed} is committed. To continue: finetune " in last
    )
    assert last.endswith("--steps 100000 --resume")
    assert "Traceback" not in err
    return committed


@pytest.mark.slow
def test_ctrl_c_at_a_terminal(finetune: Finetune, checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "stopped"
    arguments = [
        "--model",
        str(checkpoint),
        "--data",
        "random",
        *SMALL,
        "--schedule",
        "constant",
        "--no-save",
    ]
    arguments += ["--output", str(output)]
    process = subprocess.Popen(
        [sys.executable, "-m", "cli.main", *arguments, "--steps", "100000"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 3/"):
            break
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to every process of the group
    _, err = process.communicate(timeout=240)
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert process.returncode == 130, err
    committed = stopped_in(output, err)
    resumed = finetune(*arguments, "--steps", committed + 1, "--resume")
    assert resumed.status == 0, resumed.err
    assert [line["step"] for line in history(output)] == list(range(1, committed + 2))


def test_sigterm_to_one_process(finetune: Finetune, checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "stopped"
    losses = output / "losses.jsonl"
    with sending(signal.SIGTERM, lambda: losses.exists() and losses.stat().st_size > 0):
        outcome = finetune(
            "--model", checkpoint, *SMALL, "--output", output, "--no-save", "--steps", "100000"
        )
    assert outcome.status == 143, outcome.err  # job schedulers see that the run is not done
    stopped_in(output, outcome.err)
