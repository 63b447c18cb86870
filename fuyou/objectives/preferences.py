"""Losses of pairs of answers to one prompt, of which the first is preferred.

Each is a formula over the log-probabilities of whole answers, in the form that TRL 1.16 gives it; the papers are named
beside them. Every pair counts alike, and with several ranks each rank adds its pairs' part of the mean.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from common.errors import UserError, did_you_mean
from fuyou.objectives.objective import BatchNumbers, Learned, Mean, Objective, row_sums


@dataclass(frozen=True)
class PreferenceConfig:
    """Hyper-parameters, by the names that TRL gives them.

    Raises:
        UserError: one has a value that it cannot have.
    """

    beta: float = 0.1
    """Strength of the preference against the reference (DPO, IPO: tau), scale of the reward (SimPO), or weight of the
    odds ratio (ORPO: lambda)."""
    label_smoothing: float = 0.0
    """Probability that a pair is labelled the wrong way round (DPO, SimPO)."""
    simpo_gamma: float = 0.5
    """Margin of rewards that SimPO asks for."""

    def __post_init__(self) -> None:
        if self.beta <= 0:
            raise UserError(f"beta must be above 0, not {self.beta:g}.")
        if not 0 <= self.label_smoothing < 0.5:
            raise UserError(f"label_smoothing must be in [0, 0.5), not {self.label_smoothing:g}.")


@dataclass(frozen=True)
class Answers:
    """The answers of one side of P pairs."""

    log_probs: torch.Tensor
    """Log-probability of each whole answer, fp32 ``[P]``."""
    tokens: torch.Tensor
    """Tokens of each answer, fp32 ``[P]``."""
    reference: torch.Tensor | None
    """Log-probabilities under the reference, fp32 ``[P]``."""

    @property
    def mean(self) -> torch.Tensor:
        """Log-probability per token."""
        return self.log_probs / self.tokens.clamp(min=1.0)

    @property
    def ratio(self) -> torch.Tensor:
        """Logarithm of the ratio to the reference's probability."""
        assert self.reference is not None
        return self.log_probs - self.reference


Losses = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Loss of each pair, and the implicit rewards of both answers, ``[P]`` each."""


def _smoothed(logits: torch.Tensor, config: PreferenceConfig) -> torch.Tensor:
    right, wrong = functional.logsigmoid(logits), functional.logsigmoid(-logits)
    return -right * (1 - config.label_smoothing) - wrong * config.label_smoothing


def _dpo(chosen: Answers, rejected: Answers, config: PreferenceConfig) -> Losses:
    """Rafailov et al. 2023, equation 7; with smoothing, conservative DPO (Mitchell 2023)."""
    losses = _smoothed(config.beta * (chosen.ratio - rejected.ratio), config)
    return losses, config.beta * chosen.ratio, config.beta * rejected.ratio


def _ipo(chosen: Answers, rejected: Answers, config: PreferenceConfig) -> Losses:
    """Azar et al. 2023, equation 17, on log-ratios per token, as its authors confirmed to TRL."""
    margin = chosen.ratio / chosen.tokens.clamp(min=1.0) - rejected.ratio / rejected.tokens.clamp(min=1.0)
    return (margin - 1 / (2 * config.beta)) ** 2, config.beta * chosen.ratio, config.beta * rejected.ratio


def _simpo(chosen: Answers, rejected: Answers, config: PreferenceConfig) -> Losses:
    """Meng et al. 2024, equation 6."""
    margin = chosen.mean - rejected.mean - config.simpo_gamma / config.beta
    return _smoothed(config.beta * margin, config), config.beta * chosen.mean, config.beta * rejected.mean


def _orpo(chosen: Answers, rejected: Answers, config: PreferenceConfig) -> Losses:
    """Hong et al. 2024, equations 6 and 7; the cross entropy of the preferred answers comes on top."""
    odds = [one.mean - torch.log1p(-torch.exp(one.mean)) for one in (chosen, rejected)]
    losses = -config.beta * functional.logsigmoid(odds[0] - odds[1])
    return losses, config.beta * chosen.mean, config.beta * rejected.mean


@dataclass(frozen=True)
class PreferenceLoss:
    """A loss of pairs."""

    pair_losses: Callable[[Answers, Answers, PreferenceConfig], Losses]
    needs_reference: bool
    adds_cross_entropy: bool = False
    """Whether the cross entropy of the preferred answers is added, per token of all pairs."""

    def __call__(
        self,
        log_probs: torch.Tensor,
        mask: torch.Tensor,
        reference: torch.Tensor | None,
        config: PreferenceConfig,
        shares: "Shares | None" = None,
    ) -> tuple[torch.Tensor, dict[str, Mean]]:
        """Return the loss, an fp32 scalar with a graph, and what people watch.

        Args:
            log_probs: of each position's target, fp32 ``[2 P, S]``: rows 2 i and 2 i + 1 are the preferred and the
                rejected answer of pair i.
            mask: bool ``[2 P, S]``, which positions have a target.
            reference: the same log-probabilities of the reference, if :attr:`needs_reference`; or their sum over each
                row, ``[2 P]``.
            config: hyper-parameters.
            shares: pairs, and tokens of preferred answers, of all ranks together; None: these are all.

        Returns:
            The loss, and what is watched, each a mean over these pairs: ``rewards/chosen``,
            ``rewards/rejected``, ``rewards/margins``, ``rewards/accuracies`` (how often the preferred answer has the
            larger reward), ``logps/chosen``, ``logps/rejected``, ``logps/accuracies`` (how often it is the likelier).
        """
        sides = []
        for side in (0, 1):
            counted = mask[side::2]
            theirs = None if reference is None else row_sums(reference[side::2], counted)
            sides.append(Answers((log_probs[side::2] * counted).sum(1), counted.sum(1).float(), theirs))
        chosen, rejected = sides
        shares = shares or Shares.of(mask)
        losses, better, worse = self.pair_losses(chosen, rejected, config)
        loss = losses.sum() / shares.pairs
        if self.adds_cross_entropy:
            loss = loss - chosen.log_probs.sum() / shares.chosen_tokens
        better, worse = better.detach(), worse.detach()
        watched = {
            "rewards/chosen": better,
            "rewards/rejected": worse,
            "rewards/accuracies": (better > worse).float(),
            "rewards/margins": better - worse,
            "logps/chosen": chosen.log_probs.detach(),
            "logps/rejected": rejected.log_probs.detach(),
            "logps/accuracies": (chosen.log_probs > rejected.log_probs).float(),
        }
        return loss, {name: Mean.of(value) for name, value in watched.items()}


@dataclass(frozen=True)
class Shares:
    """What means are taken over."""

    pairs: int
    chosen_tokens: int

    @staticmethod
    def of(mask: torch.Tensor) -> "Shares":
        """Return what a batch ``[2 P, S]`` has of both, whose targets ``mask`` marks."""
        return Shares(mask.shape[0] // 2, max(1, int(mask[::2].sum())))


PREFERENCE_LOSSES = {
    "dpo": PreferenceLoss(_dpo, needs_reference=True),
    "ipo": PreferenceLoss(_ipo, needs_reference=True),
    "simpo": PreferenceLoss(_simpo, needs_reference=False),
    "orpo": PreferenceLoss(_orpo, needs_reference=False, adds_cross_entropy=True),
}
"""Losses of pairs by name."""


def preference_loss(name: str) -> PreferenceLoss:
    """Return the loss of that name.

    Raises:
        UserError: there is none.
    """
    if name not in PREFERENCE_LOSSES:
        raise UserError(f"No loss of pairs is called {name!r}.{did_you_mean(name, PREFERENCE_LOSSES)}")
    return PREFERENCE_LOSSES[name]


class PairObjective(Objective):
    """An objective of pairs of answers.

    Args:
        loss: from :data:`PREFERENCE_LOSSES`.
        config: hyper-parameters.
    """

    watches = (
        "rewards/chosen",
        "rewards/rejected",
        "rewards/accuracies",
        "rewards/margins",
        "logps/chosen",
        "logps/rejected",
        "logps/accuracies",
    )

    def __init__(self, loss: PreferenceLoss, config: PreferenceConfig):
        self._loss, self._config = loss, config
        self.needs_reference = loss.needs_reference

    def learn(self, batch: BatchNumbers) -> Learned:
        """Return the mean loss of all pairs; see :meth:`PreferenceLoss.__call__`."""
        out = batch.out
        own = Shares.of(out.mask)
        pairs, tokens = batch.sum_over_ranks([own.pairs, own.chosen_tokens])
        loss, watched = self._loss(
            out["log_probs"], out.mask, batch.reference, self._config, Shares(int(pairs), int(tokens))
        )
        return Learned(loss, own.pairs, watched)
