"""An engine on a model so small that it is gone in a second."""

from pathlib import Path

import torch

import fuyou
from tests.helpers.twin import tiny_configs

BATCH = {"input_ids": torch.arange(64).view(2, 32), "labels": torch.arange(64).view(2, 32)}


def small_engine(path: Path, **options) -> fuyou.Engine:
    return fuyou.Engine(
        tiny_configs()["llama"],
        ssd=[path],
        host_memory="600MiB",
        batch_shape=(2, 32),
        micro_batch=1,
        **options,
    )


def train(engine: fuyou.Engine, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        out = engine(**BATCH)
        out.loss.backward()
        engine.step()
        losses.append(out.loss.item())
    return losses
