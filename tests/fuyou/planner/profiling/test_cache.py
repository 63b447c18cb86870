"""A kept profile is used for the same work on the same machine, as long as it is whole and not old."""

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.files import cache_directory
from fuyou.layout.record import Precision
from fuyou.planner.profiling import Profile, ProfiledWorkload, load, save
from fuyou.runtime.device import Device
from tests.helpers.profiles import PROFILE
from tests.helpers.twin import tiny_configs

BF16 = Precision(torch.bfloat16)


CPU = Device()


@pytest.fixture
def workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProfiledWorkload:
    """A profile is kept for it."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    found = ProfiledWorkload(tiny_configs()["llama"], BF16, 2, 16, (tmp_path,), 16, 4096)
    save(profile(), found, CPU)
    return found


def profile() -> Profile:
    return replace(PROFILE, measured_at=time.time())


def kept() -> list[Path]:
    return list((cache_directory() / "profiles").iterdir())


def test_the_second_time_it_is_read(workload: ProfiledWorkload) -> None:
    first = load(workload, CPU)
    assert first is not None and first == replace(PROFILE, measured_at=first.measured_at)
    deeper = replace(
        workload, config=type(workload.config)(**{**workload.config.to_dict(), "num_hidden_layers": 9})
    )
    assert load(deeper, CPU) == first, "a block does not change with the number of blocks"
    save(profile(), deeper, CPU)
    assert len(kept()) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 3}, {"seq_len": 8}, {"precision": Precision(torch.float32)}, {"chunk_elements": 8192},
        {"config": tiny_configs()["gpt2"]}, {"directories": (Path("/proc"),)},
    ],
)  # fmt: skip
def test_other_work_has_another(workload: ProfiledWorkload, change: dict[str, Any]) -> None:
    assert load(replace(workload, **change), CPU) is None
    save(profile(), replace(workload, **change), CPU)
    assert len(kept()) == 2


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"format": 1}', '{"format": 99, "key": {}, "profile": {}}', "\0"]
)
def test_a_damaged_file_is_replaced(workload: ProfiledWorkload, content: str) -> None:
    (file,) = kept()
    file.write_text(content)
    assert load(workload, CPU) is None
    save(profile(), workload, CPU)
    assert load(workload, CPU) is not None


@pytest.mark.parametrize("value", [0, -1, 1e-300, math.nan, "x", None, True, [1]], ids=str)
@pytest.mark.parametrize("name", ["read_bytes_per_second", "block_forward_seconds", "tokens"])
def test_figures_that_nobody_measured_are_measured_again(
    value: Any, name: str, workload: ProfiledWorkload
) -> None:
    (file,) = kept()
    content = json.loads(file.read_text())
    content["profile"][name] = value
    file.write_text(json.dumps(content))
    assert (load(workload, CPU) is None) is (name != "block_forward_seconds" or value != 1e-300)
