"""Learning rate schedules: pure functions of the step, so that a resumed run needs no state for them."""

import math
from dataclasses import dataclass

from common.errors import UserError

SCHEDULES = ("cosine", "linear", "constant")


@dataclass(frozen=True)
class Warmup:
    """A warm-up is the time in which the learning rate rises: a number of steps, or a fraction of all steps."""

    value: float
    is_fraction: bool = False

    @classmethod
    def parse(cls, text: str) -> "Warmup":
        """Parse ``"100"`` (steps), ``"0.03"`` or ``"3%"`` (of all steps)."""
        try:
            if text.endswith("%"):
                warmup = cls(float(text[:-1]) / 100, is_fraction=True)
            elif text.isdigit():
                return cls(int(text))
            else:
                warmup = cls(float(text), is_fraction=True)
        except ValueError:
            warmup = cls(math.nan)
        if not 0 <= warmup.value <= 1:
            raise UserError(
                f"{text!r} is neither a number of steps (100) nor a fraction of them (0.03 or 3%)."
            )
        return warmup

    def __str__(self) -> str:
        return f"{self.value:g}" if self.is_fraction else str(int(self.value))

    def steps(self, total: int) -> int:
        """Return how many steps it takes in a run of ``total`` steps; fractions are rounded up."""
        steps = math.ceil(self.value * total - 1e-9) if self.is_fraction else int(self.value)
        if steps > total:
            raise UserError(f"--warmup {steps} is longer than the whole run of {total} steps.")
        if steps == total == 1:
            raise UserError(
                "The only step of this run would be one of --warmup, the first of which has the learning rate 0, so "
                "nothing would be learned: give --warmup 0, or more --epochs or --steps."
            )
        return steps


@dataclass(frozen=True)
class LearningRate:
    """A learning rate rises evenly from 0 to ``peak`` in ``warmup`` steps, then falls towards ``least`` or stays.

    With ``least`` 0 these are the schedules of transformers' Trainer: linear, cosine, constant_with_warmup.
    """

    schedule: str
    """Shape after the warm-up: ``cosine`` (half a wave) or ``linear``, at ``least`` just after the end; or
    ``constant``."""
    peak: float
    warmup: int  # Number of steps below the peak; the first of them has 0
    total: int  # Number of steps of the whole run
    least: float = 0.0  # Learning rate at which it stops falling

    def at(self, step: int) -> float:
        """Return the learning rate of ``step``, counted from 1."""
        if step <= self.warmup:
            return self.peak * (step - 1) / self.warmup
        if self.schedule == "constant":
            return self.peak
        progress = min(1.0, (step - 1 - self.warmup) / max(1, self.total - self.warmup))
        left = 1 - progress if self.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return self.least + (self.peak - self.least) * left
