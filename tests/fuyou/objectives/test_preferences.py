"""The loss of pairs, against the paper's formula written out pair by pair."""

import math
from typing import Any

import pytest
import torch

from common.errors import UserError
from fuyou.engine.token_outputs import TokenOutput
from fuyou.objectives.losses import BatchNumbers, Learned, PairObjective

BETA = 0.7


def batch(pairs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(pairs)
    log_probs = -torch.rand(2 * pairs, 9, generator=generator, dtype=torch.float64) - 0.05
    reference = -torch.rand(2 * pairs, 9, generator=generator, dtype=torch.float64)
    mask = torch.arange(9) >= torch.randint(1, 8, (2 * pairs, 1), generator=generator)
    return log_probs, mask, reference


def learn(rows: slice, **options: Any) -> Learned:
    log_probs, mask, reference = (each[rows] for each in batch(5))
    return PairObjective(BETA).learn(
        BatchNumbers(TokenOutput({"log_probs": log_probs}, mask), reference, **options)
    )


def by_hand() -> float:
    log_probs, mask, reference = batch(5)
    total = 0.0
    for pair in range(5):
        ratios = [
            sum(
                float(log_probs[row, place] - reference[row, place]) for place in range(9) if mask[row, place]
            )
            for row in (2 * pair, 2 * pair + 1)
        ]
        total -= math.log(1 / (1 + math.exp(-BETA * (ratios[0] - ratios[1]))))
    return total / 5


def test_the_loss_is_that_of_the_paper() -> None:
    learned = learn(slice(None))
    assert float(learned.loss) == pytest.approx(by_hand(), rel=1e-9)
    totals = {key: float(value.sum()) for key, value in learned.watched.items()}
    assert totals["rewards/margins"] == pytest.approx(totals["rewards/chosen"] - totals["rewards/rejected"])
    assert totals["rewards/accuracies"] in range(6) and len(learned.watched["rewards/accuracies"]) == 5


def test_a_model_that_is_its_reference_has_a_loss_of_ln_2() -> None:
    log_probs, mask, _ = batch(5)
    # As a reference that was computed before training: a number for each row
    sums = (log_probs * mask).sum(1)
    assert float(
        PairObjective(BETA).learn(BatchNumbers(TokenOutput({"log_probs": log_probs}, mask), sums)).loss
    ) == math.log(2)


def test_ranks_add_up() -> None:
    whole = learn(slice(None))
    parts = [learn(rows, sum_over_ranks=lambda _: [5.0]) for rows in (slice(0, 4), slice(4, 10))]
    assert float(sum(part.loss for part in parts)) == pytest.approx(float(whole.loss), rel=1e-9)
    for key, value in whole.watched.items():
        assert torch.equal(torch.cat([part.watched[key] for part in parts]), value)


def test_what_cannot_be() -> None:
    with pytest.raises(UserError, match="beta must be above 0"):
        PairObjective(0.0)
