"""Distillation: a student learns a teacher's distribution over the next token (Hinton et al. 2015, arXiv:1503.02531).

Neither's logits ever exist at once. The teacher's head keeps its best tokens, and the student's head compares:

>>> with torch.no_grad(), teacher.disable_adapters():  # a second engine, whose adapters freeze it
...     best = teacher.tokens(**batch, outputs=(), head=teacher_head(64))
>>> out = student.tokens(**batch, head=student_head(), inputs={name: best[name] for name in TEACHER})
>>> student.backward((out.divergence * out.mask).sum() / out.mask.sum())
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from common.errors import UserError
from fuyou.objectives.objective import BatchNumbers, Head, Learned, Mean, Objective

TEACHER = ("teacher_ids", "teacher_log_probs")
"""Names of the teacher's outputs, which are the student's inputs."""
DIVERGENCE = "divergence"

_LEAST = 1e-6
"""Probability of all other tokens below which they are left out: what is left is rounding."""


def teacher_head(tokens: int, temperature: float = 1.0) -> Head:
    """Return a ``head=`` function of :meth:`fuyou.Engine.tokens` that keeps the likeliest next tokens.

    It gives ``teacher_ids``, int32 ``[B, S, K]``, and ``teacher_log_probs``, fp32 ``[B, S, K]``.

    Args:
        tokens: K; the whole vocabulary, if that is smaller.
        temperature: logits are divided by it.
    """

    def head(logits: torch.Tensor, _: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        best = (logits.float() / temperature).log_softmax(-1).topk(min(tokens, logits.shape[-1]), dim=-1)
        return {"teacher_ids": best.indices.int(), "teacher_log_probs": best.values}

    return head


def student_head(temperature: float = 1.0, beta: float = 0.0) -> Head:
    """Return a ``head=`` function that gives ``divergence``, fp32 ``[B, S]``: how far the student is from the teacher,
    times the squared temperature.

    All tokens that the teacher's head has not kept count as one; with the whole vocabulary, it is exact.

    Args:
        temperature: as the teacher's head has it.
        beta: 0: the Kullback-Leibler divergence of the student from the teacher; 1: of the teacher from the student; in
            between, the generalised Jensen-Shannon divergence (Agarwal et al. 2023, arXiv:2306.13649, equation 1).
    """

    def head(logits: torch.Tensor, tokens: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        theirs, ids = tokens["teacher_log_probs"].float(), tokens["teacher_ids"].long()
        own = (logits.float() / temperature).log_softmax(-1).gather(-1, ids)
        if ids.shape[-1] < logits.shape[-1]:
            theirs, own = _with_the_rest(theirs), _with_the_rest(own)
        return {DIVERGENCE: temperature**2 * _divergence(theirs, own, beta)}

    return head


def _with_the_rest(log_probs: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of some tokens, ``[n, K]``, and of all others together, ``[n, K + 1]``."""
    rest = (1 - log_probs.exp().sum(-1, keepdim=True)).clamp(min=_LEAST)
    return torch.cat([log_probs, rest.log()], -1)


def _divergence(theirs: torch.Tensor, own: torch.Tensor, beta: float) -> torch.Tensor:
    """Return how far ``own`` is from ``theirs``, both log-probabilities ``[n, K]``, as :func:`student_head` has it."""

    def from_to(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return (one.exp() * (one - other)).sum(-1)

    if beta == 0:
        return from_to(theirs, own)
    if beta == 1:
        return from_to(own, theirs)
    mixture = torch.logaddexp(own + math.log1p(-beta), theirs + math.log(beta))
    return beta * from_to(theirs, mixture) + (1 - beta) * from_to(own, mixture)


@dataclass(frozen=True)
class DistillationConfig:
    """Hyper-parameters.

    Raises:
        UserError: one has a value that it cannot have.
    """

    temperature: float = 1.0
    """What the logits of both are divided by."""
    beta: float = 0.0
    """See :func:`student_head`."""
    alpha: float = 1.0
    """Part of the loss that is the divergence; the rest is the cross entropy of the data."""

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise UserError(f"temperature must be above 0, not {self.temperature:g}.")
        for name in ("beta", "alpha"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name} must be from 0 to 1, not {getattr(self, name):g}.")


class DistillationObjective(Objective):
    """The divergence of N tokens' distributions from a teacher's, and their cross entropy.

    Args:
        config: hyper-parameters.
    """

    watches = ("divergence", "cross_entropy")
    inputs = TEACHER

    def __init__(self, config: DistillationConfig):
        self._alpha, self.head = config.alpha, student_head(config.temperature, config.beta)

    def learn(self, batch: BatchNumbers) -> Learned:
        """Return the mean loss of all tokens that have a label, and what is watched: ``divergence`` and
        ``cross_entropy``, without their weights."""
        out = batch.out
        tokens = int(out.mask.sum())
        (total,) = batch.sum_over_ranks([tokens])
        divergence, entropy = (out[DIVERGENCE] * out.mask).sum(), -out["log_probs"].sum()
        loss = self._alpha * divergence + (1 - self._alpha) * entropy
        watched = {"divergence": Mean(float(divergence.detach()), tokens)}
        watched["cross_entropy"] = Mean(float(entropy.detach()), tokens)
        return Learned(loss / total, tokens, watched)
