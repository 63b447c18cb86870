"""The example of reinforcement learning, in small: a server generates, and rewards rise."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("grpo")


@pytest.mark.slow
def test_rewards_rise(example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewards = example.main([str(tmp_path), "--digits", "3", "--learning-steps", "200", "--steps", "6"])
    assert 0.2 < rewards[0] < 0.8 and rewards[-1] > rewards[0] + 0.1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    # Where the server has the adapters that are trained, probabilities are the same, and advantages cancel out.
    assert [abs(line["loss"]) < 2e-3 for line in lines[:2]] == [True, True]
