"""What a run did and what it cost: a short summary to read, and the same as JSON."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from common.files import replace_file
from common.store.errors import described
from common.units import format_bytes, format_count, format_seconds
from fuyou.optimizer.clipping import ClipBy


@dataclass(frozen=True)
class Report:
    """Everything here is about the steps of one call of ``finetune``: a resumed run has a report for each part."""

    parameters: int
    trainable_parameters: int
    steps: int
    losses: list[float]
    """NaN, and null in JSON, where it was not finite."""
    step_seconds: list[float]
    tokens_per_second: float
    """Padding counted, as it is computed."""
    flops_per_second: float
    """Model FLOPs: 6 per parameter and token plus attention, recomputation not counted."""
    hardware_flops_per_second: float
    """Recomputation counted."""
    device_peak_bytes: int
    host_peak_bytes: int
    """Proportional set size summed over our processes, at its peak."""
    host_baseline_bytes: int
    """The same just before the model was touched."""
    ssd_read_bytes_per_step: float
    """Measured, by what our processes asked the system for."""
    ssd_written_bytes_per_step: float
    planned_ssd_read_bytes_per_step: float
    """What the schedule says."""
    planned_ssd_written_bytes_per_step: float
    bound_seconds: dict[str, float]
    """Per resource, the time for which a step keeps it busy: no step can be shorter than the largest of them."""
    overlap_efficiency: float
    """Largest bound over measured step time: 1 means that all else hides behind it. 0 without any step."""
    network_sent_bytes_per_step: float = 0.0
    """By each node to others; counted where they are sent, or, for FSDP2's own strategies, by the formula. The first
    step of a run fills caches."""
    planned_network_sent_bytes_per_step: float = 0.0
    """What the formula says for a step that is not the first."""
    skipped_steps: int = 0
    """Of ``steps``: loss or gradient were not finite, and nothing was changed."""
    clip_by: str | None = None
    """How gradients were clipped out of core: ``deferral`` or ``speculation``; None: they were not, or in memory."""
    clipped_steps: int = 0
    """Steps whose gradients were scaled down."""
    updated_again_steps: int = 0
    """Of those, the ones whose updates had been done before that was known, and were done again."""

    def write(self, path: Path) -> None:
        """As JSON, complete or not at all."""
        losses = [loss if math.isfinite(loss) else None for loss in self.losses]
        with described("writing", path):
            replace_file(path, json.dumps({**asdict(self), "losses": losses}, indent=2) + "\n")

    def summary(self, total_written: int) -> str:
        """A few lines to read.

        Args:
            total_written: bytes written to SSD, the making of the store included.
        """
        if not self.steps:
            return "no step was left to take"
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
        if self.clip_by is not None:
            again = f", {self.updated_again_steps:,} of them updated again" if self.clip_by == "speculation" else ""
            lines["clipping"] = f"by {self.clip_by}: {self.clipped_steps:,} of {self.steps:,} steps clipped{again}"
        if self.bound_seconds:
            lines["ssd"] = (
                f"{format_bytes(self.ssd_read_bytes_per_step)} read and "
                f"{format_bytes(self.ssd_written_bytes_per_step)} written per step; "
                f"{total_written / 1e12:.3g} TB written in all"
            )
        if not self.bound_seconds or self.network_sent_bytes_per_step:
            lines["network"] = f"{format_bytes(self.network_sent_bytes_per_step)} sent by each node per step"
        return "\n".join(f"{name:8} {text}" for name, text in lines.items())

    def _bound(self) -> str:
        """What bounds a step, where that was measured."""
        if not self.bound_seconds:
            return ""
        bound = max(self.bound_seconds, key=lambda name: self.bound_seconds[name])
        return f", bound by {RESOURCES.get(bound, bound)} ({self.overlap_efficiency:.0%} of the time)"


RESOURCES = {
    "gpu": "computing",
    "host_to_device": "copies to the device",
    "device_to_host": "copies from the device",
    "ssd": "the SSDs",
    "adam": "the optimizer",
    "intra_node": "the ranks of a node exchanging data",
    "inter_node": "the network",
}
"""How people call what bounds a step."""


class Measurements:
    """Collects what the steps measure.

    Args:
        tokens_per_step: of one step.
        model_flops, hardware_flops: per token.
    """

    def __init__(self, tokens_per_step: int, model_flops: float, hardware_flops: float) -> None:
        self.tokens_per_step = tokens_per_step
        self.model_flops = model_flops
        self.hardware_flops = hardware_flops
        self.losses: list[float] = []
        self.step_seconds: list[float] = []
        self._bounds: dict[str, float] = {}
        self._skipped_steps = self._clipped_steps = self._updated_again_steps = 0
        self._other_io = self._other_planned = (0, 0)

    def leave_out(self, io_bytes: tuple[int, int], planned_bytes: tuple[int, int]) -> None:
        """Bytes read and written, and as planned, that no step has to answer for."""
        self._other_io = (self._other_io[0] + io_bytes[0], self._other_io[1] + io_bytes[1])
        planned = self._other_planned
        self._other_planned = (planned[0] + planned_bytes[0], planned[1] + planned_bytes[1])

    def add(
        self,
        loss: float,
        seconds: float,
        bounds: dict[str, float],
        clipped: bool = False,
        skipped: bool = False,
        updated_again: bool = False,
    ) -> None:
        """Take in a step: its loss, duration, seconds per resource; whether its gradients were clipped, whether it was
        left out because they are not finite, and whether updates were done again."""
        self._clipped_steps += clipped
        self._skipped_steps += skipped
        self._updated_again_steps += updated_again
        self.losses.append(loss)
        self.step_seconds.append(seconds)
        for name, value in bounds.items():
            self._bounds[name] = self._bounds.get(name, 0.0) + value

    def report(
        self,
        parameters: tuple[int, int],
        memory: tuple[int, int, int],
        io_bytes: tuple[int, int],
        planned_bytes: tuple[int, int],
        network_bytes: tuple[float, float] = (0.0, 0.0),
        clip_by: ClipBy | None = None,
    ) -> Report:
        """The whole.

        Args:
            parameters: all, trainable.
            memory: peak of the device, peak of the host, baseline of the host.
            io_bytes: read and written since the first step began.
            planned_bytes: what the schedule says that comes to.
            network_bytes: sent by a node per step, and what the formula says.
            clip_by: how gradients were clipped out of core, if they were.
        """
        io_bytes = (io_bytes[0] - self._other_io[0], io_bytes[1] - self._other_io[1])
        planned_bytes = (planned_bytes[0] - self._other_planned[0], planned_bytes[1] - self._other_planned[1])
        steps = len(self.losses)
        per_step = 1 / steps if steps else 0.0
        seconds = sum(self.step_seconds)
        rate = steps * self.tokens_per_step / seconds if seconds else 0.0
        bounds = {name: value * per_step for name, value in self._bounds.items()}
        return Report(
            parameters=parameters[0],
            trainable_parameters=parameters[1],
            steps=steps,
            losses=self.losses,
            step_seconds=self.step_seconds,
            tokens_per_second=rate,
            flops_per_second=rate * self.model_flops,
            hardware_flops_per_second=rate * self.hardware_flops,
            device_peak_bytes=memory[0],
            host_peak_bytes=memory[1],
            host_baseline_bytes=memory[2],
            ssd_read_bytes_per_step=io_bytes[0] * per_step,
            ssd_written_bytes_per_step=io_bytes[1] * per_step,
            planned_ssd_read_bytes_per_step=planned_bytes[0] * per_step,
            planned_ssd_written_bytes_per_step=planned_bytes[1] * per_step,
            bound_seconds=bounds,
            overlap_efficiency=max(bounds.values(), default=0.0) / (seconds * per_step) if seconds else 0.0,
            network_sent_bytes_per_step=network_bytes[0],
            planned_network_sent_bytes_per_step=network_bytes[1],
            skipped_steps=self._skipped_steps,
            clip_by=clip_by and clip_by.value,
            clipped_steps=self._clipped_steps,
            updated_again_steps=self._updated_again_steps,
        )
