"""A profile gets the times that its parts have in the engine."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from fuyou import calibration as trial
from fuyou.calibration import as_the_engine_runs_it, corrected_profile, typical_seconds
from fuyou.layout.record import Precision
from fuyou.layout.visits import Phase
from fuyou.planner.profiling import ProfiledWorkload
from fuyou.runtime.accounting import TaskKind
from fuyou.runtime.devices.device import CpuDevice, EmulatedDevice, EmulatedSpec
from tests.helpers.profiles import PROFILE

BF16 = Precision(torch.bfloat16, torch.float32)
LIMITS = (1 << 30, 1 << 30)
FORWARD, BACKWARD = TaskKind(Phase.BLOCK_FORWARD, False), TaskKind(Phase.BLOCK_BACKWARD, False)
KEPT = TaskKind(Phase.BLOCK_BACKWARD, True)


def workload(directory: Path) -> ProfiledWorkload:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=176, num_hidden_layers=9, num_attention_heads=4, vocab_size=256,
        max_position_embeddings=64,
    )  # fmt: skip
    return ProfiledWorkload(config, BF16, 2, 50, (directory,), 64, 4096)


def test_each_part_changes_in_the_proportion_in_which_its_tasks_do() -> None:
    profile = replace(PROFILE, kept_backward_seconds=0.005, block_finish_seconds=0.001)
    found = corrected_profile(
        profile, {FORWARD: 0.004, BACKWARD: 0.012, KEPT: 0.01}, {FORWARD: 0.006, BACKWARD: 0.016, KEPT: 0.001}
    )
    assert found.block_forward_seconds == pytest.approx(0.003)
    # 9 ms with what is measured by itself, a third longer, less the same
    assert found.block_backward_seconds == pytest.approx(0.011)
    assert found.kept_backward_seconds == 0.0025, "not less than half"
    assert found.head_seconds == profile.head_seconds, "nothing is known of it"


def test_a_step_that_was_disturbed_does_not_count() -> None:
    steps = [{FORWARD: [1.0, 3.0]}, {FORWARD: [50.0, 90.0], KEPT: [7.0]}, {FORWARD: [1.0, 2.0]}]
    assert typical_seconds(steps) == {FORWARD: 2.0, KEPT: 7.0}


def test_a_few_blocks_run_in_the_engine_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "MOST_STEPS", 3)
    # Far too fast: what the engine takes must come out, within what contention makes of it.
    profile = replace(PROFILE, block_forward_seconds=1e-6, block_backward_seconds=2e-6, block_parameters=50_000)
    state = torch.get_rng_state()
    found = as_the_engine_runs_it(profile, workload(tmp_path), CpuDevice(), LIMITS)
    assert 1e-4 < found.block_forward_seconds < found.block_backward_seconds < 1
    assert found.measured_in_seconds > profile.measured_in_seconds
    assert not list(tmp_path.iterdir())
    assert torch.equal(torch.get_rng_state(), state)


def test_nothing_is_tried_where_it_would_say_nothing_or_take_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = workload(tmp_path)
    assert as_the_engine_runs_it(PROFILE, work, EmulatedDevice(EmulatedSpec(1e12, 1 << 30, 1e9)), LIMITS) is PROFILE
    shortened = replace(PROFILE, measured_tokens=50)
    assert as_the_engine_runs_it(shortened, work, CpuDevice(), LIMITS) is shortened
    assert as_the_engine_runs_it(PROFILE, work, CpuDevice(), (1 << 20, 1 << 20)) is PROFILE, "no room"
    monkeypatch.setattr(trial, "MOST_PARAMETERS", 1e5)
    assert as_the_engine_runs_it(PROFILE, work, CpuDevice(), LIMITS) is PROFILE
