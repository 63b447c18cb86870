"""``dtype="auto"``: what the device multiplies faster, or what a run that continues began with."""

from pathlib import Path

import pytest
import torch

from fuyou.engine.common_decisions import fastest_dtype
from tests.helpers.small_engine import small_engine, train


@pytest.fixture
def fastest(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What this machine is fast in, for the engine; may be changed."""
    answer = ["fp32"]
    monkeypatch.setattr("fuyou.engine.common_decisions.fastest_dtype", lambda device_type: answer[0])
    return answer


@pytest.mark.parametrize("other", ["fp32", "bf16"])
def test_a_run_continues_in_its_first_dtype(tmp_path: Path, fastest: list[str], other: str) -> None:
    """On a machine that is fast in the other, bit for bit as without a pause."""
    fastest[0] = "bf16" if other == "fp32" else "fp32"
    (tmp_path / "whole").mkdir()
    with small_engine(tmp_path / "whole", lr=1e-3, dtype=fastest[0]) as one:
        expected = train(one, 3)
    with small_engine(tmp_path, lr=1e-3) as one:
        assert train(one, 1) == expected[:1]
    fastest[0] = other
    with small_engine(tmp_path, lr=1e-3, resume=True) as one:
        assert train(one, 2) == expected[1:]


@pytest.mark.parametrize(("flags", "expected"), [("avx512f amx_bf16 amx_tile", "bf16"), ("avx512f", "fp32")])
def test_a_cpu_computes_in_bf16_if_it_has_amx(
    monkeypatch: pytest.MonkeyPatch, flags: str, expected: str
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: f"flags : {flags}")
    assert fastest_dtype("cpu") == expected
    assert fastest_dtype("meta") == "bf16"


@pytest.mark.parametrize("has_it", [True, False])
def test_a_gpu_computes_in_bf16_if_it_can(monkeypatch: pytest.MonkeyPatch, has_it: bool) -> None:
    capabilities = {"cuda:0": (7, 5), "cuda:1": (8, 9) if has_it else (7, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.get)
    assert fastest_dtype("cuda:1") == ("bf16" if has_it else "fp32")
