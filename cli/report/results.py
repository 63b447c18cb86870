"""Results of a step, an evaluation, and a whole run."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from common.units import Interval, format_count

# What bounds a step, for reports.
RESOURCES = {
    "gpu": "computing",
    "host_to_device": "copies to the device",
    "device_to_host": "copies from the device",
    "ssd": "the SSDs",
    "adam": "the optimizer",
    "intra_node": "exchanges in the node",
    "inter_node": "the network",
}
# The same in one word, for log lines.
SHORT = {
    "gpu": "computing",
    "host_to_device": "uploads",
    "device_to_host": "downloads",
    "ssd": "SSDs",
    "adam": "Adam",
    "intra_node": "ranks",
    "inter_node": "network",
}


@dataclass(frozen=True)
class IoCounts:
    """Bytes moved from and to the SSDs, and what the schedule plans."""

    read: int = 0
    written: int = 0
    planned_read: int = 0
    planned_written: int = 0

    def __add__(self, other: "IoCounts") -> "IoCounts":
        return IoCounts(
            self.read + other.read,
            self.written + other.written,
            self.planned_read + other.planned_read,
            self.planned_written + other.planned_written,
        )

    def __sub__(self, other: "IoCounts") -> "IoCounts":
        return self + IoCounts(-other.read, -other.written, -other.planned_read, -other.planned_written)


@dataclass(frozen=True)
class MemoryUse:
    """Memory and drive space in use by a rank or a node."""

    device_bytes: int = 0  # Device memory of one rank, at its peak so far
    host_bytes: int = 0  # Host memory of all our processes on one node
    ssd_bytes: int = 0  # Bytes of the store on all drives; 0: not looked at


@dataclass(frozen=True)
class StepResult:
    """A step as the trainer reports it, the same on all ranks."""

    loss: float
    grad_norm: float  # Norm of the whole gradient before clipping
    skipped: bool = False  # Whether loss or gradient were not finite, and nothing was changed
    clipped: bool = False  # Whether the gradient was scaled down
    updated_again: bool = False  # Whether updates ran before the norm was known, and ran again
    aux_loss: float | None = None  # Router loss before its coefficient, where it is a part of the loss
    sent_bytes: float | None = None  # Bytes that a node sent to others; None: this process trains alone
    busy_seconds: Mapping[str, float] = field(default_factory=dict)  # Time for which the step kept each resource busy
    # When the step kept each resource busy, (begin, end) in seconds of one clock.
    busy_intervals: Mapping[str, Sequence[Interval]] = field(default_factory=dict)
    # Other metrics, by TRL's names: `rewards/accuracies`, ...
    watched: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StepMetrics:
    """A step with its duration, memory, and traffic."""

    step: int
    result: StepResult
    lr: float  # Learning rate
    seconds: float  # Time from the end of the step before to that of this one
    tokens: int  # Tokens of all ranks together, padding counted
    model_flops_per_token: float  # FLOPs per token, recomputation not counted
    memory: MemoryUse
    io: IoCounts | None = None  # Bytes that a node moved from and to its SSDs; None: states are in memory
    ranks: int = 1  # Devices that share the work
    epoch: float | None = None  # Passes over the data so far; None: there are none

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def flops_per_second(self) -> float:
        return self.tokens_per_second * self.model_flops_per_token

    def __str__(self) -> str:
        """Return a line of less than 100 columns; ``metrics.jsonl`` has the rest."""
        return ", ".join(
            [
                self._learned(),
                f"lr {self.lr:.3g}",
                *([] if self.epoch is None else [f"epoch {self.epoch:.2f}"]),
                f"{format_count(self.tokens_per_second)} tokens/s",
                *self._bound(),
            ]
        )

    def _learned(self) -> str:
        result = self.result
        router = "" if result.aux_loss is None else f" (router {result.aux_loss:.4f})"
        preferred = _preferred(result.watched)
        skipped = "skipped: " if result.skipped else ""
        return f"{skipped}loss {result.loss:.4f}{router}{preferred}, norm {result.grad_norm:.3g}"

    def _bound(self) -> list[str]:
        if self.io is None:
            return []
        busy = self.result.busy_seconds
        bound = max(busy, key=lambda name: busy[name], default="nothing")
        return [f"bound by {SHORT.get(bound, bound)}"]


@dataclass(frozen=True)
class EvaluationResult:
    """Loss on the held-out data."""

    loss: float  # Mean over all tokens that carry loss, in nats
    tokens: int  # Tokens that carry loss
    tokens_per_second: float  # Tokens computed per second, padding counted
    # What people watch where the loss is not of single tokens: means over all pairs; empty otherwise.
    watched: Mapping[str, float] = field(default_factory=dict)

    @property
    def perplexity(self) -> float:
        """Return ``exp(loss)``; infinity on overflow."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    def __str__(self) -> str:
        if self.watched:
            return f"loss {self.loss:.4f}{_preferred(self.watched)}"
        return f"loss {self.loss:.4f}, perplexity {self.perplexity:.4g} over {self.tokens:,} tokens"


# Watched metrics that a log line shows, with their label and format.
_SHOWN = {
    "rewards/accuracies": ("accuracy", ".1%"),
    "accuracy": ("accuracy", ".1%"),
    "rewards/margins": ("margin", ".3g"),
    "margin": ("margin", ".3g"),
    "cross_entropy": ("cross entropy", ".4f"),
    "kl": ("KL", ".3g"),
}


def _preferred(watched: Mapping[str, float]) -> str:
    shown = {name: watched[name] for name in _SHOWN if name in watched}
    return "".join(f", {_SHOWN[name][0]} {value:{_SHOWN[name][1]}}" for name, value in shown.items())


@dataclass(frozen=True)
class RunTotals:
    """Totals of a run; on several ranks, of one node."""

    parameters: int
    trainable_parameters: int
    memory: MemoryUse = MemoryUse()  # Memory at its peak
    host_baseline_bytes: int = 0  # Host memory just before the model was touched
    io: IoCounts = IoCounts()  # Bytes moved since the first step began
    evaluation_io: IoCounts = IoCounts()  # Bytes of `io` that belong to evaluations, not to steps
    created_bytes: int = 0  # Bytes written when the store was made
    # Bytes that a node sends to others per step, by the formula; None: what was sent was counted by it.
    planned_sent_bytes_per_step: float | None = None
    clip_by: str | None = None  # How gradients were clipped out of core, if they were
    way: str | None = None  # How parameters got from SSDs to device, out of core: `posix` or `kvikio`

    @property
    def total_written(self) -> int:
        """Return the bytes written to SSD, including the creation of the store."""
        return self.io.written + self.created_bytes


_GIB = 1 << 30


def named_metrics(metrics: StepMetrics) -> dict[str, float]:
    """Return the metrics of a step under torchtitan's names (``torchtitan/components/metrics.py``, v0.2.2).

    Those names have torchtitan's meaning: rates are per device, memory is in GiB. New names follow the pattern:
    ``ssd/read(GiB)``, ``memory/host(GiB)``, ``validation_metrics/perplexity``.
    """
    result, memory, io = metrics.result, metrics.memory, metrics.io
    named = {
        **learned_metrics(metrics.step, result, metrics.lr, metrics.tokens),
        "throughput(tps)": metrics.tokens_per_second / metrics.ranks,
        "tflops": metrics.flops_per_second / metrics.ranks / 1e12,
        "time_metrics/end_to_end(s)": metrics.seconds,
        "memory/max_active(GiB)": memory.device_bytes / _GIB,
        "memory/host(GiB)": memory.host_bytes / _GIB,
    }
    if io is None:
        return named | {"network/sent(GiB)": (result.sent_bytes or 0) / _GIB}
    return {
        **named,
        **{f"time_metrics/busy_{name}(s)": value for name, value in result.busy_seconds.items()},
        "memory/ssd(GiB)": memory.ssd_bytes / _GIB,
        "ssd/read(GiB)": io.read / _GIB,
        "ssd/written(GiB)": io.written / _GIB,
    }


def learned_metrics(step: int, result: StepResult, lr: float, tokens: int) -> dict[str, float]:
    """Return the metrics of a step of ``tokens`` tokens that are the same whenever the run is repeated."""
    return {
        "loss_metrics/global_avg_loss": result.loss,
        **({} if result.aux_loss is None else {"loss_metrics/aux_loss": result.aux_loss}),
        **result.watched,
        "grad_norm": result.grad_norm,
        "lr": lr,
        "skipped": float(result.skipped),
        "n_tokens_seen": step * tokens,
    }
