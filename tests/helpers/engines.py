"""Small engines next to their twins in memory: opened, fed, trained, compared to the bit."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fuyou
from fuyou.schedule.memory_planner import MemoryPlanner
from tests.helpers.twin import Twin

ROWS, TOKENS, STEPS = 4, 32, 5
OPTIONS = {"lr": 1e-3, "weight_decay": 0.1}


def batches(count: int, packed: bool) -> list[dict[str, torch.Tensor]]:
    """Random tokens, some without a label; packed ones hold two documents a row."""
    generator = torch.Generator().manual_seed(3)
    result = []
    for _ in range(count):
        tokens = torch.randint(0, 211, (ROWS, TOKENS), generator=generator)
        labels = tokens.clone()
        labels[:, :3] = -100
        batch = {"input_ids": tokens, "labels": labels}
        if packed:
            batch["position_ids"] = torch.arange(TOKENS).remainder(20).expand(ROWS, -1).contiguous()
        result.append(batch)
    return result


def directories(root: Path, count: int) -> list[Path]:
    made = [root / f"ssd{index}" for index in range(count)]
    for path in made:
        path.mkdir()
    return made


def engine(model: Path, ssd: list[Path], dtype: str = "bf16", **options) -> fuyou.Engine:
    """With everything streamed and the family taken as proven (tests/fuyou/preflight), unless requested otherwise."""
    usual = {"host_memory": "600MiB", "host_cache": 0, "batch_shape": (ROWS, TOKENS), "prove": False}
    options = {**usual, **OPTIONS, **options}
    return fuyou.Engine(model, ssd=ssd, dtype=dtype, **options)


def check(
    model: Path, ssd: list[Path], *, dtype: str, micro_batch: int, clip: float | None = None, packed: bool = True,
    steps: int = 3, trained_from: Path | None = None, exact: bool = True, device: str = "cpu", **options,
) -> None:  # fmt: skip
    twin = Twin(str(model), bf16=dtype == "bf16", max_grad_norm=clip, device=device, **OPTIONS)
    options["device"] = device
    started = engine(
        trained_from or model, ssd, dtype, micro_batch=micro_batch, max_grad_norm=clip, **options
    )
    with started as trained:
        for batch in batches(steps, packed):
            out = trained(**batch)
            out.loss.backward()
            report = trained.step()
            assert math.isclose(out.loss.item(), twin.step(batch, micro_batch), rel_tol=0 if exact else 1e-6)
            assert math.isclose(report.grad_norm, twin.grad_norm, rel_tol=1e-12 if exact else 1e-6)
        compare(trained, twin, 0 if exact else 1e-5)


def compare(trained: fuyou.Engine, twin: Twin, tolerance: float = 0) -> None:
    seen = set()
    for name, master in trained.named_parameters():
        torch.testing.assert_close(master, twin.masters[name], rtol=0, atol=tolerance, msg=name)
        seen.add(name)
    assert seen == set(twin.masters)


SCARCE = {"device_activations": 4, "host_activations": 2, "ssd_activations": 40}
ONE_OF_EACH = {"device_blocks": 1, "device_block_gradients": 1, "host_blocks": 1, "host_block_gradients": 1}


def train(trained: fuyou.Engine, feed: list[dict[str, torch.Tensor]]) -> list[float]:
    losses = []
    for batch in feed:
        out = trained(**batch)
        out.loss.backward()
        trained.user_state["seen"] = trained.step_count + 1
        trained.step()
        losses.append(out.loss.item())
    return losses


def give_buffers(monkeypatch: pytest.MonkeyPatch, counts: Mapping[str, int]) -> None:
    """Have memory plans give these numbers of buffers, even where there is room for others."""
    original = MemoryPlanner.plan

    def plan(self: MemoryPlanner, *arguments: Any, **keywords: Any) -> Any:
        made = original(self, *arguments, **keywords)
        return replace(made, counts=replace(made.counts, **counts))

    monkeypatch.setattr(MemoryPlanner, "plan", plan)
