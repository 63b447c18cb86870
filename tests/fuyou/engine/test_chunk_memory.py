"""Rows in chunks take the memory that is planned for each token, and little of what whole rows take."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from live_bytes import LiveBytes
from memory_meter import PeakMeter
from transformers import LlamaConfig

import fuyou
import fuyou.engine.opening
from common.errors import UserError
from common.units import parse_bytes


def config(feed_forward: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=feed_forward, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=1 << 20,
    )  # fmt: skip


def engine(path: Path, feed_forward: int, tokens: int, **options: Any) -> fuyou.Engine:
    usual = {"ssd": [path], "dtype": "fp32", "prove": False, "host_cache": 0, "batch_shape": (1, tokens)}
    return fuyou.Engine(config(feed_forward), **usual | options)


def least(path: Path, feed_forward: int, tokens: int, chunk: int) -> int:
    """Return the least host memory for a row, in MiB."""
    with pytest.raises(UserError) as caught:
        engine(path, feed_forward, tokens, chunk=chunk, host_memory="32MiB")
    needed = re.search(r"host_memory of at least (\d+)MiB", str(caught.value))
    assert needed is not None
    return int(needed[1])


def step(trained: fuyou.Engine, tokens: int) -> None:
    ids = torch.randint(0, 256, (1, tokens))
    trained(input_ids=ids, labels=ids).loss.backward()
    trained.step()
    trained.flush()


@pytest.mark.parametrize("feed_forward", [64, 4096])
def test_a_token_takes_the_memory_that_is_planned_for_it(feed_forward: int, tmp_path: Path) -> None:
    """Of the device: inputs of blocks, keys, values, their gradients, and what blocks are called with. The peak is in
    attention, or in a wide feed-forward network, which has no copies of keys and values."""
    # The first fills caches; others exceed attention's tile
    planned, measured, lengths = [], [], (1024, 6144, 12288)
    for tokens in lengths:
        ssd = tmp_path / str(tokens)
        ssd.mkdir()
        with (
            engine(ssd, feed_forward, tokens, chunk=512, host_memory="600MiB") as trained,
            LiveBytes(()) as live,
        ):
            step(trained, tokens)
            plan = trained._run.runtime.memory_plan
        assert not (plan.counts.host_activations or plan.counts.host_saved)
        planned.append(plan.device_bytes)
        measured.append(live.peak)
    assert measured[-1] <= planned[-1]
    growth, expected = (after - before for _, before, after in (measured, planned))
    assert growth == pytest.approx(expected, rel=0.05)


@pytest.mark.slow
@pytest.mark.real_start
def test_a_row_in_a_sixteenth_of_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuyou.engine.opening, "PeakMeter", PeakMeter)  # which misses hardly anything
    tokens = 32768
    budget = f"{least(tmp_path, 8192, tokens, tokens) // 16}MiB"
    with engine(tmp_path, 8192, tokens, chunk=128, host_memory=budget) as trained:
        step(trained, tokens)
        assert trained.io_bytes() == trained.planned_io_bytes()
        planned = trained._run.runtime.memory_plan.host_bytes
        assert trained.host_peak_bytes - trained.host_baseline_bytes <= planned <= parse_bytes(budget)
