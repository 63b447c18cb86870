"""What the engine takes from the planner: nothing without a profile, else what changes no number."""

import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from emulated.device import emulated_device
from transformers import LlamaConfig

from common.errors import UserError
from fuyou.layout.share import ALONE
from fuyou.planner import (
    RunPlan,
    choose_settings,
    describe_training,
    profile_or_measure,
    profiled_machine,
    profiling,
)
from fuyou.planner.profiling import Profile, ProfiledWorkload, save
from fuyou.runtime.device import Device
from fuyou.runtime.ranks import Agreement
from tests.helpers.profiles import PROFILE

CONFIG = LlamaConfig(
    hidden_size=128, intermediate_size=352, num_hidden_layers=8, num_attention_heads=4, vocab_size=512,
    max_position_embeddings=64,
)  # fmt: skip
LIMITS = (256 << 20, 256 << 20)


def test_it_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    measured: list[ProfiledWorkload] = []

    def measure(workload: ProfiledWorkload, _: object) -> Profile:
        measured.append(workload)
        return replace(PROFILE, measured_at=time.time())

    monkeypatch.setattr(import_module("fuyou.planner.run_plan"), "measure", measure)
    job, device = (
        describe_training(CONFIG, 8, 64),
        emulated_device("emulated:tflops=0.01,memory=256MiB,link=1GB/s"),
    )
    first = RunPlan(job, device, LIMITS, [tmp_path])
    assert first.profile is None
    again = RunPlan(job, device, LIMITS, [tmp_path])
    assert profile_or_measure(first) == profile_or_measure(again) == again.profile
    assert measured == [first.workload]


def test_a_block_that_does_not_fit_the_device_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run with blocks in pieces then begins without a profile: :func:`cli.train.engine_trainer.profile_once`."""

    def build(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 21 GiB")

    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(profiling.blocks, "build_meta_model", build)
    context = RunPlan(describe_training(CONFIG, 8, 64), Device(), LIMITS, [tmp_path])
    with pytest.raises(UserError, match=r"whole block of this model .* do not fit cpu"):
        profile_or_measure(context)


def test_the_profile_at_hand_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    device = emulated_device("emulated:tflops=0.01,memory=256MiB,link=1GB/s")
    job = describe_training(CONFIG, 8, 64)
    agreement = Agreement(ALONE)
    context = RunPlan(job, device, LIMITS, [tmp_path])
    assert choose_settings(context, agreement) is None
    slow = replace(  # of computing, so that outputs are worth keeping
        PROFILE, tokens=512, block_parameters=job.block_parameters // 8, block_forward_seconds=0.1,
        block_backward_seconds=0.3, measured_at=time.time(),
    )  # fmt: skip
    save(slow, context.workload, device)
    choice = choose_settings(RunPlan(job, device, LIMITS, [tmp_path]), agreement)
    assert choice is not None
    assert choice["micro_batch"] == context.memory.batch.micro_rows
    policy = choice["saved_activations"]
    assert policy.operators and policy.layers == 8
    two_layers = replace(job, activation_policy=replace(policy, layers=2))
    fixed = choose_settings(RunPlan(two_layers, device, LIMITS, [tmp_path]), agreement)
    assert fixed is not None and fixed["saved_activations"].layers == 2


def test_a_plan_says_that_writes_were_measured_at_first_only() -> None:
    at_first = replace(PROFILE, write_bytes_per_second=PROFILE.burst_write_bytes_per_second)
    for profile, assumptions in ((PROFILE, 0), (at_first, 1)):
        machine = profiled_machine(profile, False, 1 << 30, 1 << 30, [Path(".")], None)
        assert len(machine.assumptions) == assumptions
        assert all("finetune profile" in text for text in machine.assumptions)
