"""``--dtype auto`` is decided once: by the run that continues, by the device, and for all ranks by the first."""

import json
from pathlib import Path

import pytest

from cli.job.machine import job_at_hand
from cli.job.resumed import EarlierRun
from cli.main import main
from cli.options.command import parse_command_line
from cli.options.config_file import effective_config
from cli.options.settings import Settings
from fuyou.layout.record import DTYPES


@pytest.fixture
def fastest(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What this machine's CPU is fast in; may be changed. All other hardware is fast in bf16."""
    answer = ["fp32"]
    for module in ("cli.job.machine", "cli.job.resolve", "fuyou.engine.common_decisions"):
        monkeypatch.setattr(f"{module}.fastest_dtype", lambda kind: answer[0] if kind == "cpu" else "bf16")
    return answer


def test_a_run_says_what_it_computes_in_and_continues_in_that(
    checkpoint: Path, tmp_path: Path, fastest: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = [
        "--model",
        str(checkpoint),
        "--data",
        "random",
        "--batch-size",
        "1",
        "--seq-len",
        "16",
        "--gpu",
        "cpu",
    ]
    run += ["--no-save", "--schedule", "constant", "--output", str(tmp_path)]
    assert main([*run, "--steps", "1"]) == 0
    assert "computing on the CPU in fp32\n" in capsys.readouterr().out
    fastest[0] = "bf16"
    assert main([*run, "--steps", "2", "--resume"]) == 0
    assert "computing on the CPU in fp32\n" in capsys.readouterr().out
    calls = json.loads((tmp_path / "run" / "run.json").read_text())["calls"]
    assert [call["computing_in"] for call in calls] == ["fp32", "fp32"]
    assert 'dtype = "fp32"' in (tmp_path / "run" / "config.toml").read_text()


def test_what_is_requested_is_not_decided(fastest: list[str]) -> None:
    for dtype, decided in (("auto", "fp32"), ("bf16", "bf16")):
        assert (
            job_at_hand(Settings(model="gpt2-125m", dtype=dtype), "cpu").layout.precision.dtype
            == DTYPES[decided]
        )


def test_a_file_leaves_it_open_and_a_plan_for_other_hardware_takes_bf16(
    fastest: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert 'dtype = "auto"' in effective_config(parse_command_line(["--model", "gpt3-13b"]))
    hardware = ["--gpu", "4090", "--drive", "p5510", "--ssds", "2", "--host-memory", "64GiB", "--json"]
    plans = []
    for dtype in ([], ["--dtype", "bf16"], ["--dtype", "fp32"]):
        main(["--plan", *hardware, "--model", "gpt2-125m", *dtype])
        plans.append(json.loads(capsys.readouterr().out))
    assert plans[0] == plans[1] != plans[2]


def test_a_run_in_memory_continues_in_what_its_commit_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "commits").mkdir()
    monkeypatch.setattr("fcdp.checkpoint.ShardedCheckpoints.newest", lambda commits: 3)
    monkeypatch.setattr(
        "fcdp.checkpoint.ShardedCheckpoints.describe", lambda commits, step: {"--dtype": "bf16"}
    )
    assert EarlierRun.of(Settings(model="m", nodes=1, output=tmp_path, resume=True)).dtype == "bf16"
