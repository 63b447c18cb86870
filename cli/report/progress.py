"""One line that says how the run is doing: drawn over and over on a terminal, written out once per step elsewhere."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from tqdm import tqdm

from cli.report.summary import RESOURCES
from common.units import format_bytes, format_count


@dataclass(frozen=True)
class StepLine:
    """A step in figures."""

    step: int
    loss: float
    grad_norm: float
    tokens_per_second: float
    flops_per_second: float
    read_per_second: float
    """Bytes from SSD."""
    written_per_second: float
    device_bytes: int
    """Device memory in use, at its peak so far."""
    host_bytes: int
    """Host memory in use, all our processes together."""
    bound: str
    """Resource that bounds the step."""
    emulated: bool = False
    """Whether nothing was computed: there is no loss."""
    ssd_bytes: int = 0
    """What the store takes on all drives."""
    busy_seconds: Mapping[str, float] = field(default_factory=dict)
    """By resource."""
    sent_bytes: float | None = None
    """By a node to others, where there are several ranks; all else is of one node too, but for the rates."""
    skipped: bool = False
    """Whether loss or gradient were not finite, and nothing was changed."""
    aux_loss: float | None = None
    """The router loss, not multiplied by its coefficient, where it is a part of the loss."""

    def __str__(self) -> str:
        sent = "" if self.sent_bytes is None else f"{format_bytes(self.sent_bytes)} across nodes, "
        learned = "emulated" if self.emulated else _learned(self)
        return (
            f"{learned}, {format_count(self.tokens_per_second)} tokens/s, "
            f"{self.flops_per_second / 1e12:.3g} TFLOP/s, SSD {self.read_per_second / 1e9:.2f} GB/s read "
            f"{self.written_per_second / 1e9:.2f} written, {sent}device {format_bytes(self.device_bytes)}, "
            f"host {format_bytes(self.host_bytes)}, bound by {RESOURCES.get(self.bound, self.bound)}"
        )


@dataclass(frozen=True)
class ClusterLine:
    """A step of several ranks in figures."""

    step: int
    loss: float
    grad_norm: float
    tokens_per_second: float
    """Of all ranks together."""
    flops_per_second: float
    sent_bytes: float
    """By each node to others."""
    device_bytes: int
    """Device memory in use by one rank, at its peak so far."""
    host_bytes: int
    """Host memory in use by the ranks of one node, at its peak so far."""
    skipped: bool = False
    """Whether loss or gradient were not finite, and nothing was changed."""
    aux_loss: float | None = None
    """The router loss, not multiplied by its coefficient, where it is a part of the loss."""

    def __str__(self) -> str:
        return (
            f"{_learned(self)}, {format_count(self.tokens_per_second)} tokens/s, "
            f"{self.flops_per_second / 1e12:.3g} TFLOP/s, {format_bytes(self.sent_bytes)} across nodes, "
            f"device {format_bytes(self.device_bytes)}, host {format_bytes(self.host_bytes)}"
        )


def _learned(line: StepLine | ClusterLine) -> str:
    router = "" if line.aux_loss is None else f" (router {line.aux_loss:.4f})"
    return f"{'skipped: ' if line.skipped else ''}loss {line.loss:.4f}{router}, norm {line.grad_norm:.3g}"


class Progress:
    """Shows steps as they are done: on standard error if that is a terminal, else line by line on standard output."""

    def __init__(self, total: int, done: int) -> None:
        self._total = total
        self._bar = None
        if sys.stderr.isatty():
            self._bar = tqdm(
                total=total, initial=done, dynamic_ncols=True,
                bar_format="step {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}",
            )  # fmt: skip

    def show(self, line: StepLine | ClusterLine) -> None:
        """A step is done."""
        if self._bar is None:
            print(f"step {line.step}/{self._total}: {line}", flush=True)
            return
        self._bar.set_postfix_str(str(line), refresh=False)
        self._bar.update()

    def say(self, text: str) -> None:
        """Something that is worth a line of its own."""
        if self._bar is None:
            print(text, flush=True)
        else:
            self._bar.write(text, file=sys.stderr)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()
