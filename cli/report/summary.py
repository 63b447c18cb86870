"""Summary of a run, as text and as JSON."""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cli.report.results import RESOURCES, RunTotals, StepResult
from common.files import replace_file
from common.store.errors import described
from common.units import format_bytes, format_count, format_seconds


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
    skipped_steps: int = 0  # Steps whose loss or gradient were not finite, so that nothing was changed
    clip_by: str | None = None  # `deferral` or `speculation`; None if not clipped, or in memory
    way: str | None = None  # Route of parameters to the device: `posix` or `kvikio`; None in memory
    clipped_steps: int = 0  # Steps whose gradients were scaled down
    updated_again_steps: int = 0  # Clipped steps whose updates had been done before that was known, and were done again
    # Other metrics of each step, by name: `rewards/accuracies`, ...
    watched: dict[str, list[float]] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write the report as JSON, atomically."""
        losses = [loss if math.isfinite(loss) else None for loss in self.losses]
        with described("writing", path):
            replace_file(path, json.dumps({**asdict(self), "losses": losses}, indent=2) + "\n")

    def summary(self, total_written: int) -> str:
        """Return a few lines; ``total_written`` are bytes on SSD, including the creation of the store."""
        if not self.steps:
            return "nothing to do: all steps are done"
        seconds = sum(self.step_seconds)
        lines = {
            "loss": f"{self.losses[0]:.4f} in the first step, {self.losses[-1]:.4f} in the last of {self.steps:,}"
            + (f"; {self.skipped_steps:,} skipped, not finite" if self.skipped_steps else ""),
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
    """Collects the results of steps.

    Args:
        tokens_per_step: tokens, including padding.
        model_flops: FLOPs per token without recomputation.
        hardware_flops: FLOPs per token with recomputation.
    """

    def __init__(self, tokens_per_step: int, model_flops: float, hardware_flops: float) -> None:
        self.tokens_per_step = tokens_per_step
        self.model_flops = model_flops
        self.hardware_flops = hardware_flops
        self.is_saved = False  # Whether the result has been exported
        self.losses: list[float] = []
        self.step_seconds: list[float] = []
        self._bounds: dict[str, float] = {}
        self._skipped_steps = self._clipped_steps = self._updated_again_steps = 0
        self._sent_bytes = 0.0
        self._watched: dict[str, list[float]] = {}

    def add(self, seconds: float, result: StepResult) -> None:
        self._clipped_steps += result.clipped
        self._skipped_steps += result.skipped
        self._updated_again_steps += result.updated_again
        self._sent_bytes += result.sent_bytes or 0
        for name, value in result.watched.items():
            self._watched.setdefault(name, []).append(value)
        self.losses.append(result.loss)
        self.step_seconds.append(seconds)
        for name, value in result.busy_seconds.items():
            self._bounds[name] = self._bounds.get(name, 0.0) + value

    def report(self, totals: RunTotals) -> Report:
        io = totals.io - totals.evaluation_io
        steps = len(self.losses)
        per_step = 1 / steps if steps else 0.0
        seconds = sum(self.step_seconds)
        rate = steps * self.tokens_per_step / seconds if seconds else 0.0
        bounds = {name: value * per_step for name, value in self._bounds.items()}
        sent, planned_sent = self._sent_bytes / max(1, steps), totals.planned_sent_bytes_per_step
        return Report(
            parameters=totals.parameters,
            trainable_parameters=totals.trainable_parameters,
            steps=steps,
            losses=self.losses,
            step_seconds=self.step_seconds,
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
            skipped_steps=self._skipped_steps,
            clip_by=totals.clip_by,
            way=totals.way,
            clipped_steps=self._clipped_steps,
            updated_again_steps=self._updated_again_steps,
            watched=self._watched,
        )
