"""Results of a step, an evaluation, and a whole run, with its summary as text and as JSON."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path

from common.files import replace_file
from common.units import format_bytes, format_count, format_seconds

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
        return IoCounts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: "IoCounts") -> "IoCounts":
        return IoCounts(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


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
    clipped: bool = False  # Whether the gradient was scaled down
    updated_again: bool = False  # Whether updates ran before the norm was known, and ran again
    aux_loss: float | None = None  # Router loss before its coefficient, where it is a part of the loss
    sent_bytes: float | None = None  # Bytes that a node sent to others; None: this process trains alone
    busy_seconds: Mapping[str, float] = field(default_factory=dict)  # Time for which the step kept each resource busy
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
        result = self.result
        router = "" if result.aux_loss is None else f" (router {result.aux_loss:.4f})"
        learned = f"loss {result.loss:.4f}{router}{_preferred(result.watched)}, norm {result.grad_norm:.3g}"
        parts = [learned, f"lr {self.lr:.3g}"]
        if self.epoch is not None:
            parts.append(f"epoch {self.epoch:.2f}")
        parts.append(f"{format_count(self.tokens_per_second)} tokens/s")
        if self.io is not None:
            busy = result.busy_seconds
            bound = max(busy, key=lambda name: busy[name], default="nothing")
            parts.append(f"bound by {SHORT.get(bound, bound)}")
        return ", ".join(parts)


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
    planned_sent_bytes: float | None = None
    clip_by: str | None = None  # How gradients were clipped out of core, if they were
    way: str | None = None  # How parameters got from SSDs to device, out of core: `posix` or `kvikio`

    @property
    def total_written(self) -> int:
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
        "n_tokens_seen": step * tokens,
    }


@dataclass(frozen=True)
class Report:
    """Results of the steps of one call of ``finetune``; each call of a resumed run has a report."""

    parameters: int
    trainable_parameters: int
    steps: int
    losses: list[float]  # Loss of each step: NaN, and null in JSON, where it was not finite
    step_seconds: list[float]  # Duration of each step
    tokens_per_second: float  # Tokens per second, padding counted, as it is computed
    flops_per_second: float  # Model FLOPs: 6 per parameter and token plus attention, recomputation not counted
    hardware_flops_per_second: float  # FLOPs with recomputation counted
    device_peak_bytes: int
    host_peak_bytes: int  # Proportional set size summed over our processes, at its peak
    host_baseline_bytes: int  # Proportional set size just before the model was touched
    ssd_read_bytes_per_step: float  # Bytes read, as requested from the system by our processes
    ssd_written_bytes_per_step: float
    planned_ssd_read_bytes_per_step: float  # Bytes read, by the schedule
    planned_ssd_written_bytes_per_step: float
    bound_seconds: dict[str, float]  # Time for which a step keeps each resource busy; the largest bounds it
    overlap_efficiency: float  # Largest bound over measured step time; 1 if it hides all else
    # Bytes that each node sends to others: counted where they are sent, or, for FSDP2's own strategies, by the formula.
    # The first step of a run fills caches.
    network_sent_bytes_per_step: float = 0.0
    planned_network_sent_bytes_per_step: float = 0.0  # Bytes sent by the formula, in a step that is not the first
    clip_by: str | None = None  # `deferral` or `speculation`; None if not clipped, or in memory
    way: str | None = None  # Route of parameters to the device: `posix` or `kvikio`; None in memory
    clipped_steps: int = 0  # Steps whose gradients were scaled down
    updated_again_steps: int = 0  # Clipped steps whose updates had been done before that was known, and were done again
    # Other metrics of each step, by name: `rewards/accuracies`, ...
    watched: dict[str, list[float]] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        from common.store.errors import described  # which imports PyTorch, and a help does not

        losses = [loss if math.isfinite(loss) else None for loss in self.losses]
        with described("writing", path):
            replace_file(path, json.dumps({**asdict(self), "losses": losses}, indent=2) + "\n")

    def summary(self, total_written: int) -> str:
        """Return a few lines about steps, one or more; ``total_written`` includes the creation of the store."""
        seconds = sum(self.step_seconds)
        lines = {
            "loss": f"{self.losses[0]:.4f} in the first step, {self.losses[-1]:.4f} in the last of {self.steps:,}",
            "time": f"{format_seconds(seconds)}, {format_seconds(seconds / self.steps)} per step{self._bound()}",
            "rate": f"{format_count(self.tokens_per_second)} tokens/s, {self.flops_per_second / 1e12:.3g} TFLOP/s "
            f"({self.hardware_flops_per_second / 1e12:.3g} with recomputation)",
            "memory": f"at its peak {format_bytes(self.host_peak_bytes)} of host memory "
            f"({format_bytes(self.host_peak_bytes - self.host_baseline_bytes)} more than before the model), "
            f"{format_bytes(self.device_peak_bytes)} of device memory",
        }
        for name, what in (("rewards/accuracies", "the better answer"), ("accuracy", "the right class")):
            if name in self.watched:
                first, last = self.watched[name][0], self.watched[name][-1]
                lines["prefers"] = f"{what} in {first:.1%} of the first step's cases, in {last:.1%} of the last"
        if self.clip_by is not None:
            again = f", {self.updated_again_steps:,} of them updated again" if self.clip_by == "speculation" else ""
            lines["clipping"] = f"by {self.clip_by}: {self.clipped_steps:,} of {self.steps:,} steps clipped{again}"
        if self.bound_seconds:
            past = "; parameters to the device past host memory (kvikio)" if self.way == "kvikio" else ""
            lines["ssd"] = (
                f"{format_bytes(self.ssd_read_bytes_per_step)} read and "
                f"{format_bytes(self.ssd_written_bytes_per_step)} written per step; "
                f"{total_written / 1e12:.3g} TB written in all{past}"
            )
        if not self.bound_seconds or self.network_sent_bytes_per_step:
            lines["network"] = f"{format_bytes(self.network_sent_bytes_per_step)} sent by each node per step"
        return "\n".join(f"{name:8} {text}" for name, text in lines.items())

    def _bound(self) -> str:
        if not self.bound_seconds:
            return ""
        bound = max(self.bound_seconds, key=lambda name: self.bound_seconds[name])
        return f", bound by {RESOURCES.get(bound, bound)} ({self.overlap_efficiency:.0%} of the time)"


class Measurements:
    """Collects the results of steps. FLOPs are per token, with recomputation (``hardware_flops``) and without."""

    def __init__(self, tokens_per_step: int, model_flops: float, hardware_flops: float) -> None:
        self.tokens_per_step = tokens_per_step
        self.model_flops = model_flops
        self.hardware_flops = hardware_flops
        self._steps: list[tuple[float, StepResult]] = []

    def add(self, seconds: float, result: StepResult) -> None:
        self._steps.append((seconds, result))

    def report(self, totals: RunTotals) -> Report:
        results, io = [result for _, result in self._steps], totals.io - totals.evaluation_io
        steps, seconds = len(results), sum(seconds for seconds, _ in self._steps)
        per_step = 1 / steps if steps else 0.0
        rate = steps * self.tokens_per_step / seconds if seconds else 0.0
        bounds: dict[str, float] = {}
        watched: dict[str, list[float]] = {}
        for result in results:
            for name, value in result.busy_seconds.items():
                bounds[name] = bounds.get(name, 0.0) + value
            for name, value in result.watched.items():
                watched.setdefault(name, []).append(value)
        bounds = {name: value * per_step for name, value in bounds.items()}
        sent, planned_sent = sum(result.sent_bytes or 0.0 for result in results) * per_step, totals.planned_sent_bytes
        return Report(
            parameters=totals.parameters,
            trainable_parameters=totals.trainable_parameters,
            steps=steps,
            losses=[result.loss for result in results],
            step_seconds=[seconds for seconds, _ in self._steps],
            tokens_per_second=rate,
            flops_per_second=rate * self.model_flops,
            hardware_flops_per_second=rate * self.hardware_flops,
            device_peak_bytes=totals.memory.device_bytes,
            host_peak_bytes=totals.memory.host_bytes,
            host_baseline_bytes=totals.host_baseline_bytes,
            ssd_read_bytes_per_step=io.read * per_step,
            ssd_written_bytes_per_step=io.written * per_step,
            planned_ssd_read_bytes_per_step=io.planned_read * per_step,
            planned_ssd_written_bytes_per_step=io.planned_written * per_step,
            bound_seconds=bounds,
            overlap_efficiency=max(bounds.values(), default=0.0) / (seconds * per_step) if seconds else 0.0,
            network_sent_bytes_per_step=sent,
            planned_network_sent_bytes_per_step=sent if planned_sent is None else planned_sent,
            clip_by=totals.clip_by,
            way=totals.way,
            clipped_steps=sum(result.clipped for result in results),
            updated_again_steps=sum(result.updated_again for result in results),
            watched=watched,
        )
