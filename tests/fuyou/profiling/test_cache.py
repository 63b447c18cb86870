"""A kept profile is used for the same work on the same machine, as long as it is whole and not old."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fuyou.devices import CpuDevice
from fuyou.emulated import EmulatedDevice, EmulatedSpec
from fuyou.profiling import Profile, Workload, cache, cache_directory, load_or_measure
from fuyou.records import Precision
from tests.fuyou.profiling.test_profile import PROFILE
from tests.fuyou.twin import tiny_configs

BF16 = Precision(torch.bfloat16, torch.float32)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Workload]:
    """What was measured, instead of measuring it."""
    done: list[Workload] = []

    def measure(workload: Workload, _: object) -> Profile:
        done.append(workload)
        return replace(PROFILE, measured_at=time.time())

    monkeypatch.setattr(cache, "measure", measure)
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    return done


@pytest.fixture
def workload(tmp_path: Path) -> Workload:
    return Workload(tiny_configs()["llama"], BF16, 2, 16, (tmp_path,), 16, 4096)


def kept() -> list[Path]:
    return list((cache_directory() / "profiles").iterdir())


def test_the_second_time_it_is_read(measured: list[Workload], workload: Workload) -> None:
    first = load_or_measure(workload, CpuDevice())
    assert load_or_measure(workload, CpuDevice()) == first
    assert len(measured) == len(kept()) == 1
    deeper = replace(workload, config=type(workload.config)(**{**workload.config.to_dict(), "num_hidden_layers": 9}))
    assert load_or_measure(deeper, CpuDevice()) == first, "a block does not change with the number of blocks"
    assert len(measured) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 3}, {"seq_len": 8}, {"precision": Precision(torch.float32, torch.float32)}, {"chunk_elements": 8192},
        {"config": tiny_configs()["gpt2"]}, {"directories": (Path("/proc"),)},
    ],
)  # fmt: skip
def test_other_work_is_measured(measured: list[Workload], workload: Workload, change: dict[str, Any]) -> None:
    load_or_measure(workload, CpuDevice())
    load_or_measure(replace(workload, **change), CpuDevice())
    assert len(measured) == len(kept()) == 2


def test_another_device_is_measured(measured: list[Workload], workload: Workload) -> None:
    load_or_measure(workload, CpuDevice())
    load_or_measure(workload, EmulatedDevice(EmulatedSpec(1e12, 1 << 30, 1e9)))
    assert len(measured) == 2


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 1}', '{"format": 99, "key": {}, "profile": {}}', "\0"])
def test_a_damaged_file_is_replaced(measured: list[Workload], workload: Workload, content: str) -> None:
    load_or_measure(workload, CpuDevice())
    (file,) = kept()
    file.write_text(content)
    load_or_measure(workload, CpuDevice())
    load_or_measure(workload, CpuDevice())
    assert len(measured) == 2


@pytest.mark.parametrize("age", [31 * 86400, -86400])
def test_old_profiles_and_those_of_tomorrow_are_replaced(
    measured: list[Workload], workload: Workload, age: float
) -> None:
    load_or_measure(workload, CpuDevice())
    (file,) = kept()
    content = json.loads(file.read_text())
    content["profile"]["measured_at"] -= age
    file.write_text(json.dumps(content))
    load_or_measure(workload, CpuDevice())
    assert len(measured) == 2


def test_a_cache_that_cannot_be_written_costs_a_measurement(
    measured: list[Workload], workload: Workload, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "file"))
    for _ in range(2):
        load_or_measure(workload, CpuDevice())
    assert len(measured) == 2


def test_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FINETUNE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_directory() == Path("/somewhere/finetune")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "finetune"
