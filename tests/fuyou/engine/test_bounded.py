"""Host memory stays within the budget at any depth, and the SSDs carry what the plan says."""

from pathlib import Path

import pytest
import torch
from memory_meter import PeakMeter
from transformers import LlamaConfig

import fuyou
import fuyou.engine.opening
from common.units import parse_bytes


@pytest.mark.real_start  # a forked process has less memory itself
@pytest.mark.parametrize(("layers", "budget", "clip"), [(6, "280MiB", 1.0), (28, "280MiB", None)])
@pytest.mark.slow
def test_memory_and_bytes(
    layers: int, budget: str, clip: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models whose states are up to 4 times the budget."""
    monkeypatch.setattr(fuyou.engine.opening, "PeakMeter", PeakMeter)  # which misses hardly anything
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=layers,
        num_attention_heads=8,
    )
    steps = 2
    with fuyou.Engine(
        config,
        ssd=[tmp_path],
        host_memory=budget,
        batch_shape=(2, 64),
        micro_batch=1,
        max_grad_norm=clip,
        dtype="bf16",
    ) as engine:
        for _ in range(steps):
            tokens = torch.randint(0, 2048, (2, 64))
            engine(input_ids=tokens, labels=tokens).loss.backward()
            engine.step()
        engine.flush()
        read, written = (count / steps / engine.parameters for count in engine.io_bytes())
        assert engine.io_bytes() == engine.planned_io_bytes()
        if clip is None:
            assert read <= 14 * 1.01
            assert written == pytest.approx(12, rel=0.01)
        else:  # gradients that wait for the norm are written once and read once: 2 bytes each
            assert read <= 16 * 1.01
            assert written <= 14 * 1.01
        for _ in engine.named_parameters():
            pass
        engine.save_pretrained(tmp_path / "out")
        assert engine.io_bytes() == engine.planned_io_bytes(), "looking and exporting do not count"
        assert engine.host_peak_bytes - engine.host_baseline_bytes <= parse_bytes(budget)
