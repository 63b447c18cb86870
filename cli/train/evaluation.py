"""Loss on held-out data: every row once, forward only."""

import time
from collections.abc import Callable

import torch

from cli.report.results import EvaluationResult
from common.data import Batches
from fuyou.model.loss.cross_entropy import targets_of


def evaluate(
    batches: Batches, batch_size: int, loss_of: Callable[[dict[str, torch.Tensor]], float]
) -> EvaluationResult:
    """Take the loss of every row once.

    Args:
        batches: the held-out data, of ``batch_size`` rows, in a fixed order.
        batch_size: rows of a batch. The last one is completed with rows that were seen; their labels are taken away.
        loss_of: mean loss over the labels of a batch, which has at least one.
    """
    start_time, total, tokens, computed = time.perf_counter(), 0.0, 0, 0
    for number in range(batches.steps_per_epoch):
        batch = batches.batch(number)
        batch["labels"][batches.rows - number * batch_size :] = -100
        count = int((targets_of(batch["labels"], not batches.labels_ahead) != -100).sum())
        if count:
            total += loss_of(batch) * count
            tokens += count
        computed += batch["input_ids"].numel()
    return EvaluationResult(total / tokens, tokens, computed / (time.perf_counter() - start_time))
