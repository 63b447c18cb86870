"""Learning from pairs of answers: the loss of a batch, and what held-out pairs give."""

import time
from dataclasses import dataclass
from typing import Any

import torch

from cli.options.settings import Settings
from cli.report.results import EvaluationResult
from common.data import Batches
from fuyou import Engine
from fuyou.objectives.preferences import PreferenceConfig, PreferenceLoss, preference_loss


@dataclass(frozen=True)
class Preferences:
    """An objective of pairs, with its hyper-parameters."""

    objective: PreferenceLoss
    config: PreferenceConfig

    @classmethod
    def of(cls, settings: Settings) -> "Preferences":
        """Return the objective that the settings name."""
        config = PreferenceConfig(settings.preference_beta, settings.label_smoothing, settings.simpo_gamma)
        return cls(preference_loss(settings.objective), config)

    def loss(self, engine: Engine, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the loss of a batch of pairs, and what people watch beside it."""
        named: dict[str, Any] = dict(batch)
        out = engine.tokens(**named, reference=self.objective.needs_reference)
        theirs = None if out.reference is None else out.reference.log_probs
        loss, watched = self.objective(out.log_probs, out.mask, theirs, self.config)
        if out.aux_loss is not None:
            loss = loss + out.aux_coefficient * out.aux_loss
        return loss, watched

    @torch.no_grad()
    def evaluate(self, engine: Engine, batches: Batches, batch_size: int) -> EvaluationResult:
        """Take the loss of every held-out pair once, forward only.

        Args:
            engine: trained so far.
            batches: the pairs, in a fixed order.
            batch_size: pairs of a batch; the last one is completed with pairs that were seen, which do not count.
        """
        start_time, computed, answers = time.perf_counter(), 0, 0
        totals: dict[str, float] = {}
        for number in range(batches.steps_per_epoch):
            batch = batches.batch(number)
            pairs = min(batch_size, batches.rows - number * batch_size)
            batch = {name: value[: 2 * pairs] for name, value in batch.items()}
            loss, watched = self.loss(engine, batch)
            for name, value in {"loss": float(loss), **watched}.items():
                totals[name] = totals.get(name, 0.0) + value * pairs
            computed += batch["input_ids"].numel()
            answers += int((batch["labels"] != -100).sum())
        means = {name: value / batches.rows for name, value in totals.items()}
        rate = computed / (time.perf_counter() - start_time)
        return EvaluationResult(means.pop("loss"), answers, rate, means)
