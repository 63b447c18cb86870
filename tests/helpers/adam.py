"""Moments after some updates, for another process to compare."""

import torch

from fuyou.optimizer.adam import AdamConfig, Update
from fuyou.optimizer.chunk_update import ChunkOptimizer
from fuyou.optimizer.moments import OptimizerStates, join, split

CONFIG = AdamConfig(lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)


def randn(count: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * scale


class SplitRange:
    """A range of split master weights with their moments, as the optimizer process has it."""

    def __init__(self, master: torch.Tensor):
        count = master.numel()
        self.high, self.low = torch.empty(count, dtype=torch.bfloat16), torch.empty(count, dtype=torch.int16)
        split(master.clone(), self.high, self.low)
        self.mean, self.variance = torch.zeros(count), torch.zeros(count)

    @property
    def master(self) -> torch.Tensor:
        joined = torch.empty(self.high.numel())
        join(self.high, self.low, joined)
        return joined

    @property
    def states(self) -> OptimizerStates:
        return OptimizerStates(self.high, self.low, (self.mean, self.variance))

    def step(self, gradient: torch.Tensor, update: Update, decay: bool = True) -> None:
        ChunkOptimizer().update(self.states, gradient, update, decay=decay)
