"""The bytes that a plan says a step writes are those that a run of the same line writes."""

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from fuyou import Engine, StepReport
from tests.cli.conftest import Finetune
from tests.helpers.profiles import PROFILE

LINE = "--model {checkpoint} --data random --gpu cpu --batch-size 2 --seq-len 32 --host-memory 700MiB --output out"
LORA = "--lora-rank 2"


def planned_bytes(finetune: Finetune, words: list[str]) -> int:
    return json.loads(finetune("plan", *words, "--json").out)["ssd_written_bytes_per_step"]


def count_written(monkeypatch: pytest.MonkeyPatch, commit_every: int) -> list[int]:
    """Return a list to which a run will append the bytes that the store counts at each commit.

    Run and plan choose settings by the same profile.
    """
    profile = replace(PROFILE, measured_at=1.0)
    monkeypatch.setattr(import_module("fuyou.planner.run_plan"), "load", lambda *_: profile)
    step, written = Engine.step, list[int]()

    def counting_step(engine: Engine) -> StepReport:
        report = step(engine)
        if engine.step_count % commit_every == 0:
            engine.flush()
            written.append(engine.io_bytes()[1])
        return report

    monkeypatch.setattr(Engine, "step", counting_step)
    return written


@pytest.mark.parametrize("options", [
    "", LORA, *(pytest.param(options, marks=pytest.mark.slow)
                for options in ("--host-cache 500KiB", "--host-cache 0", f"{LORA} --host-cache 0")),
])  # fmt: skip
@pytest.mark.parametrize("commit_every", [1, 3, 10])
def test_a_run_writes_what_is_planned(
    finetune: Finetune, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, commit_every: int, options: str
) -> None:
    """As the store counts them from one commit to the next."""
    written = count_written(monkeypatch, commit_every)
    words = [
        *LINE.format(checkpoint=checkpoint).split(),
        "--commit-every",
        str(commit_every),
        *options.split(),
    ]
    planned = planned_bytes(finetune, words)
    done = finetune(*words, "--steps", 2 * commit_every, "--no-save")
    assert done.status == 0, done.err
    before, after = written
    assert (after - before) / commit_every == pytest.approx(planned, rel=0.01)


def test_steps_that_are_clipped_are_planned_with_their_share(
    finetune: Finetune, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that is clipped under speculation updates again, and writes twice."""
    line = f"{LINE.format(checkpoint=checkpoint)} --clip-by speculation --overwrite --max-grad-norm"
    written = count_written(monkeypatch, commit_every=1)
    in_a_step = list[int]()
    for norm, clipped in ((1e6, 0), (1e-6, 3)):
        written.clear()
        done = finetune(*line.split(), norm, "--steps", 3, "--no-save")
        assert done.status == 0, done.err
        assert f"{clipped} of 3 steps clipped" in done.out
        in_a_step.append(written[2] - written[1])
    plan = json.loads(finetune("plan", *line.split(), 1.0, "--json").out)
    expected = in_a_step[0] + plan["clipped_share"] * (in_a_step[1] - in_a_step[0])
    assert plan["ssd_written_bytes_per_step"] == pytest.approx(expected, rel=0.01)
