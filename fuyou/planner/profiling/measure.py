"""Measure everything that a prediction of a step needs, and cache the profile.

This takes 6 to 12 s, three of them to start the optimizer process, and at most 20 s on slow drives or processors. It
needs about as much memory as the engine for one block or the head, and 24 MiB per drive.
"""

import contextlib
import hashlib
import json
import os
import platform
import time
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig

from common.errors import UserError
from common.files import cached_path, read_cached, write_cached
from common.hardware.machine import core_count, cpu_count
from common.models.meta_model import build_meta_model
from common.units import Interval, merge, total
from fuyou.layout.model_layout import ModelLayout
from fuyou.layout.record import Precision
from fuyou.model.loss.router_loss import switch_router_logits
from fuyou.model.model_records import model_records
from fuyou.model.streamed_model import StreamedModel
from fuyou.optimizer.process.client import OptimizerLink
from fuyou.planner.profiling.blocks import BlockBench
from fuyou.planner.profiling.contention import Load, RepeatedCall, measure_contention
from fuyou.planner.profiling.drives import SLOWER, measure_link, open_scratch
from fuyou.planner.profiling.optimizer import OptimizerBench, scratch_records
from fuyou.planner.rates import FORMAT, PartTimes, Profile
from fuyou.runtime.devices.device import Device, optimizer_threads
from fuyou.runtime.devices.out_of_memory import DeviceMemoryError
from fuyou.schedule.memory_plan import MemoryPlan
from fuyou.schedule.tasks import Resource


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
        config: PreTrainedConfig,
        precision: Precision,
        plan: MemoryPlan,
        directories: Sequence[Path],
    ) -> "ProfiledWorkload":
        """Return the workload of a run with this memory plan."""
        batch = plan.batch
        return ProfiledWorkload(
            config,
            precision,
            batch.micro_rows,
            batch.columns,
            tuple(directories),
            plan.head_columns,
            plan.chunk_elements,
        )

    @property
    def tokens(self) -> int:
        return self.rows * self.seq_len


def measure(workload: ProfiledWorkload, device: Device, *, past_cache: bool = False) -> Profile:
    """Measure ``device`` and the drives of the workload's directories.

    Args:
        past_cache: write past the drives' fast caches, for up to 30 s and in at most half of their free space.

    Raises:
        UserError: if the directories have no space for scratch files, the model cannot be streamed, or a whole block
            does not fit the device.
        FinetuneError: if a drive or the optimizer process failed.
    """
    start = time.monotonic()
    throttle = device.throttle
    link = OptimizerLink()  # imports PyTorch while the model is built
    bench: OptimizerBench | None = None
    try:
        model = build_meta_model(workload.config, dtype=workload.precision.dtype)
        switch_router_logits(model, False)  # which the model itself would look for
        stack = StreamedModel(model, device.torch_device)
        shape = model_records(stack, workload.precision)
        block_bytes = shape.block_elements * workload.precision.parameter_bytes
        records = scratch_records(workload.chunk_elements, workload.precision)
        link.wait_until_up()
        with open_scratch(workload.directories, records, throttle) as scratch:
            drives = scratch.measure(past_cache=past_cache)
            copies = measure_link(device, block_bytes)
            parts, blocks = _parts(stack, shape, device, workload)
            threads = optimizer_threads(device)
            bench = OptimizerBench(link, scratch, workload.precision, workload.chunk_elements, threads, throttle)
            loads: dict[Resource, Load] = {Resource.ADAM: bench.updating, Resource.SSD: bench.writing}
            if blocks is not None and device.shares_host_memory:
                loads[Resource.GPU] = RepeatedCall(blocks.work())
            alone, contention = measure_contention(loads)
    except (torch.OutOfMemoryError, DeviceMemoryError) as error:
        raise UserError(
            f"A whole block of this model and its gradient, which are to be measured, do not fit {device.name}: plan "
            "with presets (finetune plan --gpu NAME --drive NAME), or train without measuring."
        ) from error
    finally:
        if bench is not None:
            bench.close()
        else:
            link.close()
    return Profile(
        device=device.name,
        tokens=workload.tokens,
        **vars(parts),
        block_parameters=shape.active_parameters(shape.largest_block),
        upload_bytes_per_second=copies.upload,
        download_bytes_per_second=copies.download,
        upload_beside_bytes_per_second=copies.upload_beside,
        download_beside_bytes_per_second=copies.download_beside,
        read_bytes_per_second=drives.read,
        write_bytes_per_second=drives.write,
        burst_write_bytes_per_second=drives.burst_write,
        mixed_bytes_per_second=drives.mixed,
        commit_seconds=drives.commit_seconds,
        adam_parameters_per_second=alone[Resource.ADAM] * workload.chunk_elements,
        adam_threads=threads,
        contention=contention,
        measured_at=time.time(),
        measured_in_seconds=time.monotonic() - start,
        versions=versions(),
    )


def versions() -> dict[str, str]:
    """Return the versions of libraries that change what is measured."""
    return {"torch": torch.__version__, "transformers": transformers.__version__}


def _parts(
    stack: StreamedModel, shape: ModelLayout, device: Device, workload: ProfiledWorkload
) -> tuple[PartTimes, BlockBench | None]:
    blocks = BlockBench(stack, shape, device, workload.rows, workload.seq_len, workload.head_columns)
    return blocks.measure(), blocks


_KIND = "profiles"
_WATCHED_STEPS = 3  # Steps over which the rate of writes is averaged
MAX_AGE_SECONDS = 30 * 86400.0  # Drives fill up and wear, drivers change: older profiles are measured again


def load(workload: ProfiledWorkload, device: Device) -> Profile | None:
    """Return the cached profile; None if there is none, it is too old, or its file is damaged."""
    content = read_cached(_KIND, describe(workload, device), FORMAT)
    if content is None:
        return None
    try:
        profile = Profile.from_dict(content["profile"])
    except (ValueError, KeyError, TypeError):
        return None
    return profile if 0 <= time.time() - profile.measured_at < MAX_AGE_SECONDS else None


def save(profile: Profile, workload: ProfiledWorkload, device: Device) -> Profile:
    """Cache ``profile`` if possible, and return it."""
    write_cached(_KIND, describe(workload, device), FORMAT, profile=profile.to_dict())
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
        sharing = [speeds[Resource.SSD] for speeds in profile.contention.speeds.values() if Resource.SSD in speeds]
        self._slow = SLOWER * self._planned * min(1.0, mixing) * min([1.0, *sharing])
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
        "versions": versions(),
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
