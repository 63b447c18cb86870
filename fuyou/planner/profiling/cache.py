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
from fuyou.layout.record import Precision
from fuyou.planner.rates import FORMAT, Profile
from fuyou.runtime.device import Device

_KIND = "profiles"
MAX_AGE_SECONDS = 30 * 86400.0  # Drives fill up and wear, drivers change: older profiles are measured again


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
        return profile if 0 <= time.time() - profile.measured_at < MAX_AGE_SECONDS else None
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
