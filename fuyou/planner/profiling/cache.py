"""Caches profiles: one small JSON file per machine, model shape and micro-batch."""

import contextlib
import hashlib
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

from common.files.result_cache import cached_path, read_cached, write_cached
from common.hardware.machine import core_count, cpu_count
from fuyou.planner.profiling.measure import ProfiledWorkload, versions
from fuyou.planner.profiling.profile import FORMAT, Profile
from fuyou.runtime.devices.device import Device

_KIND = "profiles"
MAX_AGE_SECONDS = 30 * 86400.0  # Drives fill up and wear, drivers change: older profiles are measured again


def load(workload: ProfiledWorkload, device: Device) -> Profile | None:
    """Return the cached profile, or None if there is none, it is too old, or its file is damaged."""
    content = read_cached(_KIND, describe(workload, device), FORMAT)
    if content is None:
        return None
    try:
        profile = Profile.from_dict(content["profile"])
    except (ValueError, KeyError, TypeError):
        return None
    return profile if 0 <= time.time() - profile.measured_at < MAX_AGE_SECONDS else None


def save(profile: Profile, workload: ProfiledWorkload, device: Device) -> Profile:
    """Cache ``profile``, and return it. Where the cache cannot be written, the next run measures again."""
    write_cached(_KIND, describe(workload, device), FORMAT, profile=profile.to_dict())
    return profile


def profile_path(key: dict[str, Any]) -> Path:
    """Return the file of the profile with this key, which :func:`describe` returns."""
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
        "versions": versions(),
        **({"compiled": True} if workload.compiled else {}),
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
