"""What a profile depends on, and profiles in files."""

import contextlib
import hashlib
import json
import os
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig

from common.files import cached_path, read_cached, write_cached
from common.hardware.machine import core_count, cpu_count
from fuyou.layout.model_layout import Phase
from fuyou.layout.record import Precision
from fuyou.planner.simulator import TaskRates
from fuyou.runtime.device import Device

_KIND = "profiles"
MAX_AGE_SECONDS = 30 * 86400.0  # Drives fill up and wear, drivers change: older profiles are measured again


FORMAT = 8  # Version of the JSON: profiles of another one are not read, but measured again


@dataclass(frozen=True)
class Profile:
    """Rates and times of one machine with one model and one micro-batch."""

    device: str  # Name of the device that computes
    tokens: int  # Tokens in a micro-batch
    # Seconds of one micro-batch, part by part, as in the engine's tasks.
    measured_tokens: int  # Tokens that were run; times are scaled up to a whole micro-batch
    # FLOPs per second of matrix products with the shapes of the block's parameters
    matmul_flops_per_second: float
    embed_forward_seconds: float
    block_forward_seconds: float
    block_backward_seconds: float  # Seconds with the forward pass computed again, as far as it is needed
    block_finish_seconds: float  # Seconds for squaring a block's gradient, once per visit
    head_seconds: float  # Seconds of forward and backward pass
    head_forward_seconds: float
    embed_backward_seconds: float
    # Parameters of a block that one token uses: of routed experts those that it visits
    block_parameters: float
    upload_bytes_per_second: float  # Bytes per second from host to device while both directions are busy
    download_bytes_per_second: float

    read_bytes_per_second: float  # Bytes per second from all SSDs together, through the store, reading only
    write_bytes_per_second: float  # Past the drives' fast caches
    burst_write_bytes_per_second: float  # At first, while the fast caches have room
    commit_seconds: float  # Seconds for `fdatasync` and manifest

    adam_parameters_per_second: float  # Parameters per second that the optimizer process updates alone
    adam_threads: int

    measured_at: float  # Time of the measurement, in seconds since the epoch
    measured_in_seconds: float

    def is_plausible(self) -> bool:
        """Return whether all figures can have been measured: a file may hold anything."""
        numbers = {name: value for name, value in vars(self).items() if name != "device"}
        if not all(type(value) in (int, float) and value >= 0 for value in numbers.values()):
            return False
        counts = [value for name, value in numbers.items() if name.endswith(("tokens", "_per_second"))]
        divisors = self.block_forward_seconds, self.block_backward_seconds, self.block_parameters
        return min(counts) >= 1 and min(divisors) > 0

    def rates(self, recomputed: float = 1.0) -> TaskRates:
        """Return the rates for the simulator.

        Args:
            recomputed: fraction of a block's forward FLOPs that the measured backward pass computed again.
        """
        flops = 2.0 * self.block_parameters * self.tokens
        return TaskRates(
            flops_per_second=flops / self.block_forward_seconds,
            backward_flops_per_second=(2 + recomputed) * flops / self.block_backward_seconds,
            upload_bytes_per_second=self.upload_bytes_per_second,
            download_bytes_per_second=self.download_bytes_per_second,
            read_bytes_per_second=self.read_bytes_per_second,
            write_bytes_per_second=self.write_bytes_per_second,
            adam_parameters_per_second=self.adam_parameters_per_second,
            commit_seconds=self.commit_seconds,
            non_block_seconds=(
                (Phase.EMBED_FORWARD, self.embed_forward_seconds / self.tokens),
                (Phase.HEAD, self.head_seconds / self.tokens),
                (Phase.HEAD_EVAL, self.head_forward_seconds / self.tokens),
                (Phase.EMBED_BACKWARD, self.embed_backward_seconds / self.tokens),
            ),
            finish_seconds=self.block_finish_seconds,
        )


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


def load(workload: ProfiledWorkload, device: Device) -> Profile | None:
    """Return the cached profile; None if there is none, it is too old, or its file is damaged."""
    content = read_cached(_KIND, describe(workload, device), FORMAT)
    if content is None:
        return None
    try:
        profile = Profile(**content["profile"])
        is_recent = 0 <= time.time() - profile.measured_at < MAX_AGE_SECONDS
        return profile if is_recent and profile.is_plausible() else None
    except (KeyError, TypeError):
        return None


def save(profile: Profile, workload: ProfiledWorkload, device: Device) -> Profile:
    """Cache ``profile`` if possible, and return it."""
    write_cached(_KIND, describe(workload, device), FORMAT, profile=asdict(profile))
    return profile


def profile_path(key: dict[str, Any]) -> Path:
    """Return the file of the profile with this key of :func:`describe`."""
    return cached_path(_KIND, key)


def describe(workload: ProfiledWorkload, device: Device) -> dict[str, Any]:
    """Return everything that a profile depends on, as JSON: the key of its file."""
    # The configuration without its depth and its name.
    config = {
        name: value
        for name, value in workload.config.to_dict().items()
        if name
        not in ("num_hidden_layers", "n_layer", "_name_or_path", "layer_types", "transformers_version")
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
        "precision": [str(workload.precision.dtype), "torch.float32", workload.precision.optimizer],
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
