"""``dtype="auto"``: what the device multiplies faster, or what a run that continues began with."""

from pathlib import Path

import pytest
import torch

from fuyou.engine import computing_dtype
from fuyou.engine.computing_dtype import fastest_dtype
from tests.helpers.small_engine import small_engine, train


@pytest.fixture
def fastest(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What this machine is fast in, for the engine; may be changed."""
    answer = ["fp32"]
    monkeypatch.setattr("fuyou.engine.computing_dtype.fastest_dtype", lambda device_type: answer[0])
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


class Clock:
    """Stands in for ``time`` where each kind of product takes so long."""

    def __init__(self, seconds: dict[torch.dtype, float]):
        self.now, self._seconds = 0.0, seconds

    def perf_counter(self) -> float:
        return self.now

    def mm(self, left: torch.Tensor, right: torch.Tensor) -> None:
        self.now += self._seconds[left.dtype]


@pytest.mark.parametrize(("bf16", "expected"), [(8e-3, "fp32"), (1e-3, "bf16"), (1e-4, "bf16")])
def test_what_multiplies_faster(monkeypatch: pytest.MonkeyPatch, bf16: float, expected: str) -> None:
    clock = Clock({torch.bfloat16: bf16, torch.float32: 1e-3})
    monkeypatch.setattr(computing_dtype, "time", clock)
    monkeypatch.setattr(torch, "mm", clock.mm)
    assert fastest_dtype.__wrapped__("cpu") == expected
    assert fastest_dtype.__wrapped__("meta") == "bf16"


@pytest.mark.parametrize("has_it", [True, False])
def test_a_gpu_computes_in_bf16_if_it_can(monkeypatch: pytest.MonkeyPatch, has_it: bool) -> None:
    capabilities = {"cuda:0": (7, 5), "cuda:1": (8, 9) if has_it else (7, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.get)
    assert fastest_dtype.__wrapped__("cuda:1") == ("bf16" if has_it else "fp32")
