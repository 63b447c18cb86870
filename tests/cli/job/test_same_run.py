"""What must not change when a run is continued, known from a stand-in for the engine."""

import contextlib
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from cli.job.job import Job
from cli.job.model import ChatTemplate
from cli.job.outputs import Outputs
from cli.job.resolve import _check_space
from cli.job.resumed import check_same_run, fixed_options
from cli.options.command import option_fields
from cli.options.schedule import LearningRate
from cli.options.settings import Settings
from common.data import RandomBatches
from common.errors import UserError
from common.units import format_bytes, format_count
from fuyou.model.open_model import OpenModel
from fuyou.planner.training_job import job_of_run


def job(output: Path = Path("out"), **changes: Any) -> Job:
    # A job has the directories themselves
    options = {field.name for field in option_fields(Settings)} - {"ssd"}
    given = {name: changes.pop(name) for name in list(changes) if name in options - {"seq_len"}}
    settings = Settings(model="m", batch_size=4, dtype="bf16", output=output, **given)
    rate = LearningRate(settings.schedule, 1.0, 2, changes.pop("total", 10))
    config = LlamaConfig(
        hidden_size=8, intermediate_size=8, num_attention_heads=1, num_hidden_layers=2, vocab_size=100
    )
    choice = SimpleNamespace(
        base=None, config=config, checkpoint=None, template=ChatTemplate(None, date.today())
    )
    model = OpenModel(config, settings.engine.precision, torch.device("cpu"))
    made = Job(
        settings=settings, engine=settings.engine, choice=choice, model=model,
        training=job_of_run("m", settings.engine, model, 4, 16, {}), gpu=None, outputs=Outputs(output, "id"),
        ssd=changes.pop("ssd", (Path("ssd"),)), run_name="store", seq_len=16, batches=RandomBatches(100, 16, 4),
        data_key="abc", learning_rate=rate, fixed=fixed_options(settings),
    )  # fmt: skip
    return replace(made, **changes)


def begun(job: Job, step: int = 3) -> Any:
    """A stand-in for an engine whose run has begun as ``job``."""
    engine = SimpleNamespace(user_state={}, step_count=0)
    check_same_run(job, engine)
    engine.step_count = step
    return engine


def test_a_new_run_remembers_its_settings_and_may_continue_with_them() -> None:
    engine: Any = SimpleNamespace(user_state={}, step_count=0)
    check_same_run(job(), engine)
    assert engine.user_state["run"]["--batch-size"] == 4
    engine.step_count = 10
    check_same_run(job(), engine)


@pytest.mark.parametrize(("change", "message"), [
    ({"seed": 1}, "began with --seed 0, and now it is --seed 1"),
    ({"seq_len": 8}, "began with --seq-len 16, and now it is --seq-len 8"),
    ({"schedule": "linear"}, "began with --schedule cosine, and now it is --schedule linear"),
    ({"total": 12}, "began with --steps 10, and now it is --steps 12"),
    ({"data_key": "def"}, "--data is not what this run began with"),
])  # fmt: skip
def test_another_setting_is_rejected_by_name(change: dict[str, Any], message: str) -> None:
    engine = begun(job())
    with pytest.raises(UserError, match=message):
        check_same_run(job(**change), engine)


def test_what_becomes_of_long_records_is_fixed() -> None:
    def of(truncate: bool, **changes: Any) -> Job:
        return job(data=("a",), truncate=truncate, **changes)

    engine = begun(of(False))
    with pytest.raises(UserError, match="began with --drop-long, and now it is --truncate"):
        check_same_run(of(True, data_key="def"), engine)
    with pytest.raises(UserError, match="--data is not what"):
        check_same_run(of(False, data_key="random tokens"), engine)


def test_a_run_with_an_option_that_was_removed() -> None:
    """It never continues silently without what it was doing."""
    run = begun(job())
    run.user_state["run"]["--lora-plus-ratio"] = 16.0
    with pytest.raises(
        UserError, match=r"began with --lora-plus-ratio 16.0, which this version does not have"
    ):
        check_same_run(job(), run)


def test_a_constant_rate_may_run_longer_but_not_end_before_now() -> None:
    engine = begun(job(schedule="constant"), 7)
    check_same_run(job(schedule="constant", total=100), engine)
    with pytest.raises(UserError, match="7 steps already, more than --steps 6"):
        check_same_run(job(schedule="constant", total=6), engine)


def test_the_header_says_what_it_will_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.job.job.slow_updates", lambda precision: ("slow", f"in {precision.optimizer}"))
    made = job()
    assert made.training is not None and made.store_bytes == made.training.record_bytes
    lines = (
        f"{format_count(made.parameters)} parameters",
        f"ssd/store: {format_bytes(made.store_bytes)}",
        "10 of 4 x 16 tokens",
        "updates  slow in adamw",
    )
    assert all(line in made.header() for line in lines)


def test_room_for_every_checkpoint_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One at the end, the two newest on the way, and the best: 8 MB of bf16, next to a store of 24 MB."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))
    monkeypatch.setattr(Job, "store_bytes", 24 * 10**6)
    saving = job(output=tmp_path, ssd=(tmp_path,), save_every=2)
    saving = replace(saving, held_out=saving.batches)
    monkeypatch.setattr(Job, "parameters", 10**6)
    for free in (32 * 10**6, 31 * 10**6):
        with (
            contextlib.nullcontext()
            if free == 32 * 10**6
            else pytest.raises(UserError, match="32,000,000 bytes needed")
        ):
            _check_space(saving)
