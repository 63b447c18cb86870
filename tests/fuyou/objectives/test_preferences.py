"""Losses of pairs, against each paper's formula written out pair by pair."""

import math

import pytest
import torch

from common.errors import UserError
from fuyou.objectives.preferences import PREFERENCE_LOSSES, PreferenceConfig, Shares, preference_loss

CONFIG = PreferenceConfig(beta=0.7, label_smoothing=0.0, simpo_gamma=0.4)


def batch(pairs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities, which positions count (another number in each row), and a reference's."""
    generator = torch.Generator().manual_seed(pairs)
    log_probs = -torch.rand(2 * pairs, 9, generator=generator, dtype=torch.float64) - 0.05
    reference = -torch.rand(2 * pairs, 9, generator=generator, dtype=torch.float64)
    mask = torch.arange(9) >= torch.randint(1, 8, (2 * pairs, 1), generator=generator)
    return log_probs, mask, reference


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def by_hand(name: str, config: PreferenceConfig, pairs: int) -> float:
    log_probs, mask, reference = batch(pairs)
    total, cross_entropy, tokens = 0.0, 0.0, 0
    for pair in range(pairs):
        sums, theirs, lengths = [], [], []
        for row in (2 * pair, 2 * pair + 1):
            places = [place for place in range(9) if mask[row, place]]
            sums.append(sum(float(log_probs[row, place]) for place in places))
            theirs.append(sum(float(reference[row, place]) for place in places))
            lengths.append(len(places))
        ratios = sums[0] - theirs[0], sums[1] - theirs[1]
        means = sums[0] / lengths[0], sums[1] / lengths[1]
        cross_entropy -= sums[0]
        tokens += lengths[0]
        if name == "dpo":
            margin = config.beta * (ratios[0] - ratios[1])
            total -= (1 - config.label_smoothing) * math.log(sigmoid(margin))
            total -= config.label_smoothing * math.log(sigmoid(-margin))
        elif name == "ipo":
            total += (ratios[0] / lengths[0] - ratios[1] / lengths[1] - 1 / (2 * config.beta)) ** 2
        elif name == "simpo":
            margin = config.beta * (means[0] - means[1]) - config.simpo_gamma
            total -= (1 - config.label_smoothing) * math.log(sigmoid(margin))
            total -= config.label_smoothing * math.log(sigmoid(-margin))
        elif name == "orpo":
            odds = [math.exp(mean) / (1 - math.exp(mean)) for mean in means]
            total -= config.beta * math.log(sigmoid(math.log(odds[0] / odds[1])))
    return total / pairs + (cross_entropy / tokens if name == "orpo" else 0.0)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_losses_are_those_of_the_papers(name: str, smoothing: float) -> None:
    config = PreferenceConfig(0.7, smoothing, 0.4)
    log_probs, mask, reference = batch(5)
    objective = preference_loss(name)
    loss, watched = objective(log_probs, mask, reference if objective.needs_reference else None, config)
    assert float(loss) == pytest.approx(by_hand(name, config, 5), rel=1e-9)
    totals = {key: value.total for key, value in watched.items()}
    assert totals["rewards/margins"] == pytest.approx(totals["rewards/chosen"] - totals["rewards/rejected"])
    assert totals["rewards/accuracies"] in range(6) and watched["rewards/accuracies"].number == 5


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_ranks_add_up(name: str) -> None:
    log_probs, mask, reference = batch(5)
    objective, shares = preference_loss(name), Shares.of(mask)
    whole = objective(log_probs, mask, reference, CONFIG)
    parts = [
        objective(log_probs[rows], mask[rows], reference[rows], CONFIG, shares) for rows in (slice(0, 4), slice(4, 10))
    ]
    assert float(sum(part[0] for part in parts)) == pytest.approx(float(whole[0]), rel=1e-9)
    for key, value in whole[1].items():
        assert sum(part[1][key].total for part in parts) == pytest.approx(value.total, rel=1e-6)
        assert sum(part[1][key].number for part in parts) == value.number


def test_what_cannot_be() -> None:
    with pytest.raises(UserError, match=r"No loss of pairs is called 'dop'\. Did you mean 'dpo'"):
        preference_loss("dop")
    for wrong in ({"beta": 0.0}, {"label_smoothing": 0.5}):
        with pytest.raises(UserError, match="must be"):
            PreferenceConfig(**wrong)
