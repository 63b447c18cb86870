"""Writes as a cost: the default, limits in days, and the frontier they are chosen from."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from emulated.device import emulated_device
from transformers import LlamaConfig

from common.errors import UserError
from common.hardware.presets import drive_preset, gpu_preset
from fuyou import Engine
from fuyou.config import EngineConfig
from fuyou.planner import Machine, Plan, TrainingJob, describe_training, preset_machine, search
from fuyou.planner.evaluate import Evaluator
from fuyou.planner.search import SLOWER, choose, frontier
from fuyou.planner.simulator import TaskRates

RATES = TaskRates(1e10, 1e12, 1e12, 2e9, 1e9, 1e12, commit_seconds=0.0)
ON = Machine("a device", "a drive", RATES, 64 << 20, 140 << 20, endurance_bytes=10**15)


@pytest.fixture(scope="module")
def job() -> TrainingJob:
    config = LlamaConfig(
        hidden_size=256, intermediate_size=704, num_hidden_layers=6, num_attention_heads=4, vocab_size=512,
        max_position_embeddings=64,
    )  # fmt: skip
    return describe_training(config, 64, 64)


def planned(job: TrainingJob, days: float | None) -> Plan:
    return search(replace(job, drive_life=days), ON)


def test_the_default_writes_least_within_a_tenth_of_the_fastest(job: TrainingJob) -> None:
    fastest, default = planned(job, 0), planned(job, None)
    assert fastest.step_seconds < default.step_seconds <= SLOWER * fastest.step_seconds
    assert default.written_bytes < 0.6 * fastest.written_bytes
    within = [
        point for point in fastest.frontier if point.step_seconds <= SLOWER * fastest.frontier[0].step_seconds
    ]
    assert default.written_bytes == min(point.written_bytes for point in within)


def test_a_limit_in_days_takes_the_fastest_step_that_reaches_it(job: TrainingJob) -> None:
    fastest, least = planned(job, 0), planned(job, 1e9)
    assert fastest.drive_days is not None and least.drive_days is not None and least.drive_days < 1e9
    between = planned(job, 1.2 * fastest.drive_days)
    assert between.drive_days is not None and between.drive_days >= 1.2 * fastest.drive_days
    assert fastest.written_bytes > between.written_bytes >= least.written_bytes
    assert fastest.step_seconds < between.step_seconds <= least.step_seconds
    assert planned(job, fastest.drive_days).written_bytes == fastest.written_bytes


def test_the_frontier_has_the_bytes_of_whole_steps(job: TrainingJob) -> None:
    evaluator = Evaluator(replace(job, drive_life=0), ON)
    choose(evaluator)
    points = frontier(evaluator)
    assert len(points) >= 4
    for point in points:
        assert point.written_bytes == evaluator.evaluate(point.candidate, merged=False).written_bytes
    assert [point.step_seconds for point in points] == sorted(point.step_seconds for point in points)
    assert [point.written_bytes for point in points] == sorted(
        (p.written_bytes for p in points), reverse=True
    )


@pytest.mark.slow
def test_runs_write_the_bytes_of_each_point(job: TrainingJob, tmp_path: Path) -> None:
    """As many as a step writes in the steady state; in all, what was scheduled."""
    evaluator = Evaluator(replace(job, drive_life=0), ON)
    choose(evaluator)
    points, ids = frontier(evaluator), torch.zeros(64, 64, dtype=torch.long)
    assert len(points) >= 4
    for point in points:
        candidate, device = point.candidate, emulated_device("emulated:tflops=1,memory=1GiB,link=9GB/s")
        with Engine(
            job.config, ssd=[tmp_path], overwrite=True, device=device,
            device_memory=ON.device_bytes, host_memory=ON.host_bytes, dtype="bf16", batch_shape=(64, 64),
            micro_batch=candidate.micro_rows, deferred_fraction=candidate.deferred_fraction,
            saved_activations=candidate.activation_policy,
        ) as engine:  # fmt: skip
            for _ in range(3):
                engine(input_ids=ids, labels=ids).loss.backward()
                report = engine.step()
            engine.flush()
            assert report.planned_written_bytes == point.written_bytes
            assert engine.io_bytes() == engine.planned_io_bytes()


def test_a_limit_needs_drives_whose_warranty_is_known(job: TrainingJob) -> None:
    with pytest.raises(UserError, match=r"drive.life: the warranted writes of a drive are not known"):
        choose(Evaluator(replace(job, drive_life=50.0), replace(ON, endurance_bytes=None)))
    choose(Evaluator(replace(job, drive_life=0), replace(ON, endurance_bytes=None)))


def test_an_engine_without_the_planner_takes_no_limit(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="drive_life is a limit for the planner: open the engine with automatic=True"
    ):
        EngineConfig.of(ssd=tmp_path, drive_life=50.0)
    with pytest.raises(UserError, match=r"drive.life: the warranted writes of .* are not known"):
        EngineConfig.of(ssd=tmp_path, drive_life=50.0, automatic=True)
    assert EngineConfig.of(ssd=tmp_path, drive_life=0, automatic=True).store.drive_life == 0


def test_an_engine_without_a_profile_warns_that_a_limit_is_not_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("fuyou.config.warranted_bytes", lambda _: 10**15)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )
    with pytest.warns(UserWarning, match="drive_life is not applied: nothing was measured"):
        Engine(
            config, ssd=tmp_path, device="cpu", automatic=True, batch_shape=(1, 8), drive_life=50.0
        ).close()


@pytest.mark.parametrize(("drive", "rate"), [("990-pro-4tb", 1.5e9), ("p5510", 3.4e9), ("t500", 0.5e9)])
def test_presets_write_at_the_rate_past_the_fast_cache(drive: str, rate: float) -> None:
    machine = preset_machine(gpu_preset("4090"), drive_preset(drive), 2, 64 << 30)
    assert machine.rates.write_bytes_per_second == 2 * rate
    assert any("fast cache" in text for text in machine.assumptions) == (drive == "990-pro-4tb")
