"""Loss and perplexity on held-out data: every row once, forward only."""

import time
from collections.abc import Callable

import torch

from cli.report.evaluation_result import EvaluationResult
from cli.report.said import MetricsLogger
from cli.train.prepare import Job
from common.data import Batches
from fuyou.model.loss import targets_of


def evaluate(
    batches: Batches, batch_size: int, loss_of: Callable[[dict[str, torch.Tensor]], float]
) -> EvaluationResult:
    """Take the loss of every row once.

    Args:
        batches: the held-out data, of ``batch_size`` rows, in a fixed order.
        batch_size: rows of a batch. The last one is completed with rows that were seen; their labels are taken away.
        loss_of: mean loss over the labels of a batch, which has at least one.
    """
    began, total, tokens, computed = time.perf_counter(), 0.0, 0, 0
    for number in range(batches.steps_per_epoch):
        batch = batches.batch(number)
        batch["labels"][batches.rows - number * batch_size :] = -100
        count = int((targets_of(batch["labels"], not batches.labels_ahead) != -100).sum())
        if count:
            total += loss_of(batch) * count
            tokens += count
        computed += batch["input_ids"].numel()
    return EvaluationResult(total / tokens, tokens, computed / (time.perf_counter() - began))


def look(job: Job, loss_of: Callable[[dict[str, torch.Tensor]], float], step: int, said: MetricsLogger | None) -> None:
    """Evaluate after ``step`` on the held-out data, which there must be, and say what that gave.

    Args:
        loss_of: as in :func:`evaluate`.
        said: of the rank that speaks.
    """
    assert job.held_out is not None
    result = evaluate(job.held_out, job.settings.batch_size, loss_of)
    if said is not None:
        said.evaluation(step, result)


def is_due(job: Job, step: int) -> bool:
    """Whether held-out data are to be looked at after ``step``: before the first, after the last, and in between as
    ``--eval-every`` says."""
    if job.held_out is None:
        return False
    every = job.settings.eval_every
    return step in (0, job.steps) or (every is not None and step % every == 0)
