"""What held-out data gave."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class EvaluationResult:
    """What the held-out data gave."""

    loss: float
    """Mean over all tokens that carry loss, in nats."""
    tokens: int
    """How many those are."""
    tokens_per_second: float
    """Of those computed, padding counted."""

    @property
    def perplexity(self) -> float:
        """``exp(loss)``; infinite where that is too large for a number."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    def __str__(self) -> str:
        return f"loss {self.loss:.4f}, perplexity {self.perplexity:.4g} over {self.tokens:,} tokens"
