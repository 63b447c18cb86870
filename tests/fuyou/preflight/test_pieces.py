"""Blocks in pieces are proven like whole ones, and a proof that ought to fail fails."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from common.errors import UserError
from fuyou.optimizer.gradient_sum import GradientSum
from fuyou.preflight.proof import prove_divided


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss"])
def test_families_train_in_pieces_as_in_memory(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    prove_divided(AutoConfig.for_model(family))


def test_a_wrong_gradient_of_some_experts_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    original = GradientSum.add

    def add(self: GradientSum, name: str, gradient: torch.Tensor) -> None:
        original(self, name, gradient * 1.0001 if name.endswith("gate_up_proj[1:2]") else gradient)

    monkeypatch.setattr(GradientSum, "add", add)
    with pytest.raises(UserError, match="gate_up_proj"):
        prove_divided(AutoConfig.for_model("qwen3_moe"))
