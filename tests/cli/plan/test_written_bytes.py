"""The bytes that a plan says a step writes are those that a run of the same line writes."""

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from fuyou import Engine, StepReport
from tests.cli.conftest import Finetune
from tests.helpers.profiles import PROFILE

LORA = "--lora-rank 2"


@pytest.mark.parametrize("options", ["", "--host-cache 500KiB", "--host-cache 0", LORA, f"{LORA} --host-cache 0"])
@pytest.mark.parametrize("commit_every", [1, 3, 10])
def test_a_run_writes_what_is_planned(
    finetune: Finetune, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, commit_every: int, options: str
) -> None:
    """As the store counts them from one commit to the next; plan and run choose settings by the same profile."""
    profile = replace(PROFILE, measured_at=1.0)
    monkeypatch.setattr(import_module("fuyou.planner.choose_settings"), "load", lambda *_: profile)
    step, written = Engine.step, list[int]()

    def counting_step(engine: Engine) -> StepReport:
        report = step(engine)
        if engine.step_count % commit_every == 0:
            engine.flush()
            written.append(engine.io_bytes()[1])
        return report

    monkeypatch.setattr(Engine, "step", counting_step)
    line = f"--model {checkpoint} --data random --gpu cpu --batch-size 2 --seq-len 32 --host-memory 700MiB --output out"
    words = f"{line} --commit-every {commit_every} {options}".split()
    planned = json.loads(finetune("plan", *words, "--json").out)["ssd_written_bytes_per_step"]
    done = finetune(*words, "--steps", 2 * commit_every, "--no-save")
    assert done.status == 0, done.err
    before, after = written
    assert (after - before) / commit_every == pytest.approx(planned, rel=0.01)
