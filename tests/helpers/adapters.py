"""Adapters trained in memory by peft, and compared with the engine's."""

import math

import torch
from gpu.twin import documents_alone
from torch import nn
from transformers import Trainer

import fuyou
from tests.helpers.engines import OPTIONS, ROWS
from tests.helpers.twin import Twin

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class InMemory:
    """A model in memory, trained as anybody would. (No parameter here leaves a scalar tail to the fused AdamW.)"""

    def __init__(self, model: nn.Module, clip: float | None = None):
        self.model, self.clip, self.grad_norm = model.train(), clip, 0.0
        named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.trained = list(named.values())
        assert all(parameter.numel() % 16 == 0 for parameter in self.trained)
        decayed = Trainer.get_decay_parameter_names(None, model)
        groups = [
            {"params": [p for name, p in named.items() if (name in decayed) is decays], "weight_decay": decay}
            for decays, decay in ((True, OPTIONS["weight_decay"]), (False, 0.0))
        ]
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=OPTIONS["lr"], fused=True
        )

    def step(self, batch: dict[str, torch.Tensor], micro: int) -> float:
        """One step over micro-batches; returns the loss."""
        items = (nn.functional.pad(batch["labels"], (0, 1), value=-100)[..., 1:] != -100).sum()
        losses = []
        for start in range(0, ROWS, micro):
            part = {name: value[start : start + micro] for name, value in batch.items()}
            with documents_alone(self.model, part):
                losses.append(self.model(**part, num_items_in_batch=items, use_cache=False).loss)
                losses[-1].backward()
        self.update()
        total = losses[0].detach()
        for loss in losses[1:]:
            total = total + loss.detach()
        return float(total)

    def update(self) -> None:
        """Clip the gradients that there are, and take an AdamW step."""
        self.grad_norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in self.trained))
        if self.clip is not None and self.grad_norm > self.clip:
            for parameter in self.trained:
                parameter.grad.mul_(self.clip / (self.grad_norm + 1e-6))
        self.optimizer.step()
        self.optimizer.zero_grad()


def train(
    trained: fuyou.Engine, twin: InMemory | Twin, feed: list[dict[str, torch.Tensor]], micro: int
) -> None:
    """Both take these steps, and agree."""
    for batch in feed:
        out = trained(**batch)
        out.loss.backward()
        report = trained.step()
        assert out.loss.item() == twin.step(batch, micro)
        assert math.isclose(report.grad_norm, twin.grad_norm, rel_tol=1e-12)


def compare(trained: fuyou.Engine, model: nn.Module) -> None:
    expected = dict(model.named_parameters())
    seen = set()
    for name, value in trained.named_parameters():
        assert torch.equal(value.float(), expected[name].float()), name
        seen.add(name)
    assert seen == expected.keys()
