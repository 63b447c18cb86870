"""Results of steps, evaluations, and a whole run, as metrics with names and as text."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from common.units import format_bytes, format_count, format_seconds

RESOURCES = {
    "gpu": "computing",
    "host_to_device": "copies to the device",
    "device_to_host": "copies from the device",
    "ssd": "the SSDs",
    "adam": "the optimizer",
    "intra_node": "exchanges in the node",
    "inter_node": "the network",
}
"""What bounds a step, in words."""

_GIB = 1 << 30


@dataclass(frozen=True)
class StepResult:
    """A step as the trainer reports it, the same on all ranks."""

    loss: float
    grad_norm: float  # Norm of the whole gradient before clipping
    clipped: bool = False  # Whether the gradient was scaled down
    updated_again: bool = False  # Whether updates ran before the norm was known, and ran again
    aux_loss: float | None = None  # Router loss before its coefficient, where it is a part of the loss
    sent_bytes: float | None = None  # Bytes that a node sent to others; None: this process trains alone
    # Time for which the step kept each resource busy
    busy_seconds: Mapping[str, float] = field(default_factory=dict)
    # Other metrics, by TRL's names: `rewards/accuracies`
    watched: Mapping[str, float] = field(default_factory=dict)

    def learned(self, step: int, lr: float, tokens: int) -> dict[str, float]:
        """Return the metrics of a step of ``tokens`` tokens that are the same whenever the run is repeated."""
        return {
            "loss_metrics/global_avg_loss": self.loss,
            **({} if self.aux_loss is None else {"loss_metrics/aux_loss": self.aux_loss}),
            **self.watched,
            "grad_norm": self.grad_norm,
            "lr": lr,
            "n_tokens_seen": step * tokens,
        }

    def __str__(self) -> str:
        router = "" if self.aux_loss is None else f" (router {self.aux_loss:.4f})"
        return f"loss {self.loss:.4f}{router}{_shown(self.watched)}, norm {self.grad_norm:.3g}"


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
            return f"loss {self.loss:.4f}{_shown(self.watched)}"
        return f"loss {self.loss:.4f}, perplexity {self.perplexity:.4g} over {self.tokens:,} tokens"


def _shown(watched: Mapping[str, float]) -> str:
    shown = ""
    for name, label, form in (
        ("rewards/accuracies", "accuracy", ".1%"),
        ("accuracy", "accuracy", ".1%"),
        ("rewards/margins", "margin", ".3g"),
        ("margin", "margin", ".3g"),
        ("cross_entropy", "cross entropy", ".4f"),
    ):
        shown += f", {label} {watched[name]:{form}}" if name in watched else ""
    return shown


@dataclass(frozen=True)
class Usage:
    """What a node took so far."""

    device_bytes: int  # Device memory of one rank, at its peak
    host_bytes: int  # Host memory of all our processes, now
    host_peak_bytes: int
    host_baseline_bytes: int  # Host memory just before the model was touched
    io: tuple[int, int] | None = None  # Bytes read from SSDs and written to them; None: states are in memory
    created_bytes: int = 0  # Bytes written when the store was made


def step_metrics(
    result: StepResult,
    seconds: float,
    rate: float,
    flops_per_second: float,
    usage: Usage,
    moved: tuple[int, int],
) -> dict[str, float]:
    """Return what a step took under torchtitan's names (``torchtitan/components/metrics.py``, v0.2.2).

    Those names have torchtitan's meaning: rates are per device, memory is in GiB. New names follow the pattern:
    ``ssd/read(GiB)``, ``memory/host(GiB)``, ``validation_metrics/perplexity``.

    Args:
        seconds: time from the end of the step before to that of this one.
        rate: tokens per second and device, padding counted.
        flops_per_second: of a device, recomputation not counted.
        moved: bytes read from SSDs and written to them in that time.
    """
    metrics = {
        "throughput(tps)": rate,
        "tflops": flops_per_second / 1e12,
        "time_metrics/end_to_end(s)": seconds,
        **{f"time_metrics/busy_{name}(s)": value for name, value in result.busy_seconds.items()},
        "memory/max_active(GiB)": usage.device_bytes / _GIB,
        "memory/host(GiB)": usage.host_bytes / _GIB,
    }
    if result.sent_bytes is not None:
        metrics["network/sent(GiB)"] = result.sent_bytes / _GIB
    if usage.io is not None:
        metrics["ssd/read(GiB)"], metrics["ssd/written(GiB)"] = moved[0] / _GIB, moved[1] / _GIB
    return metrics


def bound(busy_seconds: Mapping[str, float]) -> str:
    """Return what kept a step longest, in words."""
    name = max(busy_seconds, key=lambda name: busy_seconds[name], default="nothing")
    return RESOURCES.get(name, name)


class Summary:
    """Adds up the steps of one call, each of ``tokens`` tokens with ``flops_per_token``, recomputation not counted."""

    def __init__(self, tokens: int, flops_per_token: float) -> None:
        self.steps = 0
        self._tokens = tokens
        self._flops_per_token = flops_per_token
        self._first: StepResult | None = None
        self._seconds = 0.0
        self._sent = 0.0
        self._moved = [0, 0]
        self._busy = Counter[str]()
        self._clipped = self._updated_again = 0

    def add(self, result: StepResult, seconds: float, moved: tuple[int, int]) -> None:
        """Count a step that took ``seconds`` and moved bytes from and to SSDs."""
        self.steps = self.steps + 1
        self._first = self._first or result
        self._last = result
        self._seconds += seconds
        self._sent += result.sent_bytes or 0.0
        self._busy.update(result.busy_seconds)
        self._clipped += result.clipped
        self._updated_again += result.updated_again
        self.add_moved(moved)

    def add_moved(self, moved: tuple[int, int]) -> None:
        """Count bytes that steps moved after the last one had ended."""
        self._moved = [before + more for before, more in zip(self._moved, moved, strict=True)]

    def text(self, usage: Usage, clip_by: str | None, past_host: bool) -> str:
        """Return a few lines about steps, one or more; ``past_host``: whether parameters did not cross host memory."""
        first = self._first
        last = self._last
        steps = self.steps
        seconds = self._seconds
        assert first is not None
        rate = steps * self._tokens / seconds
        lines = {
            "loss": f"{first.loss:.4f} in the first step, {last.loss:.4f} in the last of {steps:,}",
            "time": f"{format_seconds(seconds)}, {format_seconds(seconds / steps)} per step",
            "rate": f"{format_count(rate)} tokens/s, {rate * self._flops_per_token / 1e12:.3g} TFLOP/s",
            "memory": f"at its peak {format_bytes(usage.host_peak_bytes)} of host memory "
            f"({format_bytes(usage.host_peak_bytes - usage.host_baseline_bytes)} more than before the model), "
            f"{format_bytes(usage.device_bytes)} of device memory",
        }
        if self._busy:
            share = max(self._busy.values()) / seconds
            lines["time"] += f", bound by {bound(self._busy)} ({share:.0%} of the time)"
        for name, what in (("rewards/accuracies", "the better answer"), ("accuracy", "the right class")):
            if name in first.watched:
                begun = first.watched[name]
                ended = last.watched[name]
                lines["prefers"] = (
                    f"{what} in {begun:.1%} of the first step's cases, in {ended:.1%} of the last"
                )
        if clip_by is not None:
            again = f", {self._updated_again:,} of them updated again" if clip_by == "speculation" else ""
            lines["clipping"] = f"by {clip_by}: {self._clipped:,} of {steps:,} steps clipped{again}"
        if usage.io is not None:
            read, written = (format_bytes(nbytes / steps) for nbytes in self._moved)
            past = "; parameters to the device past host memory (kvikio)" if past_host else ""
            in_all = format_bytes(usage.io[1] + usage.created_bytes)
            lines["ssd"] = f"{read} read and {written} written per step; {in_all} written in all{past}"
        if last.sent_bytes is not None:
            lines["network"] = f"{format_bytes(self._sent / steps)} sent by each node per step"
        return "\n".join(f"{name:8} {text}" for name, text in lines.items())
