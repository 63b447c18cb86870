"""GRPO: policy gradients whose baseline is the other answers to the same prompt (Shao et al. 2024, arXiv:2402.03300).

The rewards of G answers to a prompt are compared with each other; each answer's tokens then have its advantage. What
generated them may be a few updates old, so that ratios of probabilities are clipped, and what strays from the model as
it was is held back by an estimate of the divergence from it. The formulas are those of TRL 1.16 with
``loss_type="grpo"``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.errors import UserError

IGNORED = -100  # Label of tokens that are not learned from


@dataclass(frozen=True)
class GrpoConfig:
    """Hyper-parameters, by the names that TRL gives them.

    Raises:
        UserError: if a value is invalid.
    """

    num_generations: int = 8  # Answers to each prompt
    epsilon: float = 0.2  # By how much the ratio of probabilities may leave 1 before its gradient is cut off
    beta: float = 0.0  # Weight of the divergence from the reference; 0 needs no reference

    def __post_init__(self) -> None:
        if self.num_generations < 2:
            raise UserError(
                f"num_generations must be at least 2, to compare answers, not {self.num_generations}."
            )
        if not 0 < self.epsilon < 1:
            raise UserError(f"epsilon must be between 0 and 1, not {self.epsilon:g}.")
        if self.beta < 0:
            raise UserError(f"beta must not be negative, not {self.beta:g}.")


def group_advantages(rewards: torch.Tensor, config: GrpoConfig) -> torch.Tensor:
    """Return by how much each answer is better than the answers to the same prompt, in their standard deviations.

    Args:
        rewards: fp32 ``[P G]``; answers to a prompt are together.
        config: G.

    Raises:
        UserError: if they are not whole groups.
    """
    if rewards.dim() != 1 or len(rewards) % config.num_generations:
        raise UserError(f"{list(rewards.shape)} rewards are not groups of {config.num_generations}.")
    groups = rewards.view(-1, config.num_generations)
    spread = groups.std(1, keepdim=True) + 1e-4  # groups in which all are alike have nothing to say
    return ((groups - groups.mean(1, keepdim=True)) / spread).flatten()


@dataclass(frozen=True)
class Rollouts:
    """Prompts with their answers as a batch for :meth:`fuyou.Engine.tokens`, padded on the right."""

    batch: dict[str, torch.Tensor]  # `input_ids`, `attention_mask`, and `labels` of answers, int64 `[B, S]`
    old_log_probs: torch.Tensor  # Log-probabilities when generated, fp32 `[B, S]`, as `engine.tokens`

    @property
    def rows(self) -> int:
        return len(self.old_log_probs)


def rollouts_of(
    prompts: Sequence[torch.Tensor], answers: Sequence[torch.Tensor], log_probs: Sequence[torch.Tensor]
) -> Rollouts:
    """Return prompts and answers as a batch.

    Args:
        prompts: tokens of each answer's prompt, int64 ``[P]``.
        answers: tokens of each answer, int64 ``[N]``.
        log_probs: of each of these when they were generated, fp32 ``[N]``.
    """
    longest = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    ids, mask = (torch.zeros(len(prompts), longest, dtype=torch.int64) for _ in range(2))
    labels, old = torch.full_like(ids, IGNORED), torch.zeros(len(prompts), longest)
    for row, (prompt, answer, known) in enumerate(zip(prompts, answers, log_probs, strict=True)):
        start, stop = len(prompt), len(prompt) + len(answer)
        ids[row, :start], ids[row, start:stop], labels[row, start:stop] = prompt, answer, answer
        mask[row, :stop] = 1
        old[row, start - 1 : stop - 1] = known  # position t is about token t + 1
    return Rollouts({"input_ids": ids, "attention_mask": mask, "labels": labels}, old)


def grpo_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    config: GrpoConfig,
    reference: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the loss: the mean over answers of the mean over their tokens, equation 3 of the paper.

    Args:
        log_probs: of tokens, fp32 ``[B, S]``; has the graph.
        old_log_probs: the same when they were generated.
        advantages: of answers, fp32 ``[B]``.
        mask: bool ``[B, S]``, which positions are about an answer's token.
        reference: log-probabilities of the reference, fp32 ``[B, S]``; needed where ``beta`` is above 0.
    """
    ratio, weights = (log_probs - old_log_probs).exp(), advantages.unsqueeze(1)
    clipped = ratio.clamp(1 - config.epsilon, 1 + config.epsilon)
    losses = -torch.minimum(ratio * weights, clipped * weights)
    if config.beta:
        assert reference is not None
        apart = reference - log_probs
        losses = losses + config.beta * (apart.exp() - apart - 1)  # Schulman's estimate of the divergence
    tokens = mask.float()
    return ((losses * tokens).sum(1) / tokens.sum(1).clamp(min=1.0)).mean()
