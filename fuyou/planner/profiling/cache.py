"""What a profile depends on, profiles in files, and what corrects them."""

import contextlib
import hashlib
import json
import os
import platform
import time
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig

from common.files import cached_path, read_cached, write_cached
from common.hardware.machine import core_count, cpu_count
from common.units import Interval, merge, total
from fuyou.layout.record import Precision
from fuyou.planner.rates import FORMAT, Profile
from fuyou.runtime.device import Device
from fuyou.schedule.memory_plan import MemoryPlan

_KIND = "profiles"
_WATCHED_STEPS = 3  # Steps over which the rate of writes is averaged
MAX_AGE_SECONDS = 30 * 86400.0  # Drives fill up and wear, drivers change: older profiles are measured again
SLOWER = 0.7  # A rate below this fraction of the one before is another rate, and no noise


@dataclass(frozen=True)
class ProfiledWorkload:
    """The work that a profile measures: one micro-batch of a run."""

    config: PreTrainedConfig
    precision: Precision
    rows: int  # Sequences in a micro-batch
    seq_len: int
    directories: tuple[Path, ...]  # Directories of the run's files, one per drive
    head_columns: int  # Tokens of each row that go through the head at once
    chunk_elements: int  # Parameters that the optimizer updates at once

    @staticmethod
    def planned(
        config: PreTrainedConfig, precision: Precision, plan: MemoryPlan, directories: Sequence[Path]
    ) -> "ProfiledWorkload":
        """Return the workload of a run with this memory plan."""
        rows, columns = plan.batch.micro_rows, plan.batch.columns
        return ProfiledWorkload(
            config, precision, rows, columns, tuple(directories), plan.head_columns, plan.chunk_elements
        )

    @property
    def tokens(self) -> int:
        return self.rows * self.seq_len


def load(workload: ProfiledWorkload, device: Device) -> Profile | None:
    """Return the cached profile; None if there is none, it is too old, or its file is damaged."""
    content = read_cached(_KIND, describe(workload, device), FORMAT)
    if content is None:
        return None
    try:
        profile = Profile(**content["profile"])
        return profile if 0 <= time.time() - profile.measured_at < MAX_AGE_SECONDS else None
    except (KeyError, TypeError):
        return None


def save(profile: Profile, workload: ProfiledWorkload, device: Device) -> Profile:
    """Cache ``profile`` if possible, and return it."""
    write_cached(_KIND, describe(workload, device), FORMAT, profile=asdict(profile))
    return profile


class WriteWatch:
    """Notices drives that write slower than their profile says, such as those whose fast cache is full.

    Args:
        profile: profile that the run was planned with.
        ranks_per_node: ranks that share the drives of the profile evenly.

    Attributes:
        slow_rate: bytes per second that this rank writes, once that has become slow; else None.
    """

    def __init__(self, profile: Profile, ranks_per_node: int):
        self._profile, self._ranks = profile, ranks_per_node
        self._steps: deque[tuple[list[Interval], int, int]] = deque(maxlen=_WATCHED_STEPS)
        self._slow_windows = 0  # In a row; as many as a window has steps, and it holds none of before
        self._warned = False
        self._planned = profile.write_bytes_per_second / ranks_per_node
        self._read = profile.read_bytes_per_second / ranks_per_node
        mixing = profile.mixed_bytes_per_second * (1 / self._planned + 1 / self._read) / (2 * ranks_per_node)
        self._slow = SLOWER * self._planned * min(1.0, mixing)
        self.slow_rate: float | None = None

    def step(self, busy: list[Interval], read: int, written: int) -> None:
        """Take note of when this rank's drives were busy with these bytes."""
        self._steps.append((busy, read, written))
        if self.slow_rate is not None or len(self._steps) < _WATCHED_STEPS:
            return
        spans, reads, writes = zip(*self._steps, strict=True)
        written = sum(writes)
        # Steps overlap: what is written back in one is reported with the next.
        writing = total(merge([span for step in spans for span in step])) - sum(reads) / self._read
        self._slow_windows = self._slow_windows + 1 if 0 < written < self._slow * writing else 0
        if self._slow_windows == _WATCHED_STEPS:
            self.slow_rate = written / writing

    def warn(self, rates: Sequence[float | None]) -> Profile | None:
        """Warn if some rank's drives have become slow, the first time; return the profile for the next plan then.

        Args:
            rates: every rank's :attr:`slow_rate`.
        """
        slow = [(rate, rank) for rank, rate in enumerate(rates) if rate is not None]
        if self._warned or not slow:
            return None
        self._warned = True
        rate, rank = min(slow)
        of = f" of rank {rank}" if len(rates) > 1 else ""
        warnings.warn(
            f"The drives{of} write {rate / 1e9:.3g} GB/s, and {self._planned / 1e9:.3g} GB/s were planned: their fast "
            "cache is full, or they are hot. The next plan counts on the lower rate.",
            stacklevel=2,
        )
        return replace(self._profile, write_bytes_per_second=rate * self._ranks)


def profile_path(key: dict[str, Any]) -> Path:
    """Return the file of the profile with this key of :func:`describe`."""
    return cached_path(_KIND, key)


def describe(workload: ProfiledWorkload, device: Device) -> dict[str, Any]:
    """Return everything that a profile depends on, as JSON: the key of its file."""
    # The configuration without its depth and its name.
    config = {
        name: value
        for name, value in workload.config.to_dict().items()
        if name not in ("num_hidden_layers", "n_layer", "_name_or_path", "layer_types", "transformers_version")
    }
    shape = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()
    return {
        "device": device.name,
        "processor": _processor(),
        "processors": cpu_count(),
        "cores": core_count(),
        "threads": torch.get_num_threads() if device.shares_host_memory else 0,
        "drives": sorted(_drive(path) for path in workload.directories),
        "shape": shape,
        "precision": [*map(str, workload.precision.dtypes), workload.precision.optimizer],
        "rows": workload.rows,
        "seq_len": workload.seq_len,
        "head_columns": workload.head_columns,
        "chunk_elements": workload.chunk_elements,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Hardware", "Model"):
                return value.strip()
    return platform.processor() or platform.machine()


def _drive(directory: Path) -> str:
    number = directory.stat().st_dev
    return f"{os.major(number)}:{os.minor(number)}"
