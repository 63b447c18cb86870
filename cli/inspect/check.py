"""Inspect this machine for a run (``finetune --check``) and verify stores (``finetune --verify``)."""

import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from cli.inspect.findings import DriveFound, Finding, GpuFound, MachineFound, find_trouble
from cli.job.machine import directories_at_hand, precision_of, training_of
from cli.options.adapters import peft_config_of
from cli.options.computing_dtype import with_dtype
from cli.options.settings import COMMITS, Settings
from cli.report.run_directory import versions
from common.hardware.drives import drive_of
from common.hardware.machine import (
    cpu_count,
    huge_pages_enabled,
    list_gpus,
    memory_available_bytes,
    memory_limit_bytes,
    obstacle,
    system_has_gpu,
)
from common.models.presets import load_config
from common.units import format_bytes
from fuyou.checkpoint.run_files import find_runs, verify_run

RED, YELLOW, GREEN, BOLD = 31, 33, 32, 1


@dataclass(frozen=True)
class Paint:
    """Colors text on a terminal, unless ``NO_COLOR`` is set (no-color.org)."""

    on: bool = field(
        default_factory=lambda: (
            sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        )
    )

    def __call__(self, text: str, code: int) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.on else text


def run_check(settings: Settings) -> None:
    """Inspect the machine, measure the drives, and print the results.

    Raises:
        UserError: if a named directory or model does not exist.
    """
    paint = Paint()
    directories = directories_at_hand(settings)
    settings = with_dtype(settings)
    store = training_of(settings).record_bytes if settings.model else None
    _section(paint, "versions", list(versions().items()))
    machine = look_at_machine()
    _section(paint, "machine", list(_machine_rows(machine)))
    gpus = look_at_gpus()
    _section(paint, "GPUs", [row for gpu in gpus for row in _gpu_rows(gpu)] or [("none", "the CPU computes")])
    drives = []
    for directory in directories:
        drives.append(look_at_drive(directory))
        _section(paint, "drive", list(_drive_rows(drives[-1])))
    _print_findings(paint, find_trouble(machine, gpus, drives, store, settings.model))
    if settings.model:
        _section(paint, "model", [("trains as in memory", _proof(settings))])


def _proof(settings: Settings) -> str:
    from fuyou import prove

    assert settings.model is not None
    config, _ = load_config(settings.model)
    start_time = time.monotonic()
    dtype, adapters = precision_of(settings).dtype, peft_config_of(settings)
    prove(config, adapters=adapters, dtype=dtype)
    seconds = time.monotonic() - start_time
    return f"losses and all gradients of a small {config.model_type}, block by block ({seconds:.1f} s)"


def look_at_machine() -> MachineFound:
    """Return memory, processors, control group limits, and kernel settings."""
    import torch

    governor = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    return MachineFound(
        processors=cpu_count(),
        all_processors=os.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        limit_bytes=memory_limit_bytes(),
        available_bytes=memory_available_bytes(),
        huge_pages=huge_pages_enabled(),
        numa_nodes=max(1, len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))),
        governor=governor.read_text().strip() if governor.exists() else None,
        has_p2p_storage=Path("/proc/driver/nvidia-fs/version").exists(),
        torch_cuda=torch.version.cuda,
        gpu_obstacle=obstacle() if list_gpus() or system_has_gpu() else None,
        is_wsl="microsoft" in platform.release().lower(),
    )


def look_at_gpus() -> list[GpuFound]:
    """Return all GPUs that this process may use, from the driver's management library."""
    import pynvml

    gpus = []
    for gpu in list_gpus():
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            gpus.append(GpuFound(gpu, 0, 0, 0, 0, None))
            continue
        handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
        version = int(pynvml.nvmlSystemGetCudaDriverVersion())
        try:
            width = pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle), pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
            generation = pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)
        except pynvml.NVMLError:
            width, generation = (0, 0), 0
        try:
            used = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        except pynvml.NVMLError:
            used = 0
        pynvml.nvmlShutdown()
        gpus.append(GpuFound(gpu, used, generation, *width, (version // 1000, version % 1000 // 10)))
    return gpus


def look_at_drive(directory: Path) -> DriveFound:
    """Return the drive of a directory and its free space, and measure its speed, for half a minute."""
    from fuyou.layout.record import Kind, Precision, Record
    from fuyou.planner.profiling.drives import open_scratch

    usage = shutil.disk_usage(directory)
    record = Record.build(0, "check", Kind.BLOCK, Precision.named("bf16", "fp32"), [(("weight",), (1024,), True)])
    with open_scratch([directory], [record], None) as scratch:
        rates, direct = scratch.measure(past_cache=True), scratch.store.direct
    return DriveFound(
        drive=drive_of(directory),
        file_system_id=directory.stat().st_dev,
        total_bytes=usage.total,
        free_bytes=usage.free,
        direct=direct,
        read=rates.read,
        write=rates.write,
        burst_write=rates.burst_write,
        commit_seconds=rates.commit_seconds,
    )


# -- for people -------------------------------------------------------------------------------------------------------


def _machine_rows(machine: MachineFound) -> Iterator[tuple[str, str]]:
    yield (
        "processors",
        f"{machine.processors} of {machine.all_processors}, {platform.machine()}"
        + (f", governor {machine.governor}" if machine.governor else ""),
    )
    group = (
        ""
        if machine.limit_bytes >= machine.memory_bytes
        else f"; the control group allows {format_bytes(machine.limit_bytes)}"
    )
    yield "memory", f"{format_bytes(machine.memory_bytes)}, {format_bytes(machine.available_bytes)} available{group}"
    yield "huge pages", "on" if machine.huge_pages else "off"
    yield "NUMA nodes", str(machine.numa_nodes)
    yield "GPUDirect", "nvidia-fs is loaded" if machine.has_p2p_storage else "Storage: nvidia-fs is not loaded"
    yield "PyTorch", f"built for CUDA {machine.torch_cuda}" if machine.torch_cuda else "built without CUDA"


def _gpu_rows(measured: GpuFound) -> Iterator[tuple[str, str]]:
    gpu = measured.gpu
    link = f"PCIe {measured.link_generation}.0 x{measured.link_width}" if measured.link_width else "PCIe link unknown"
    node = "" if gpu.numa_node is None else f", NUMA node {gpu.numa_node}"
    yield (
        str(gpu.index),
        f"{gpu.name}, {format_bytes(gpu.memory_bytes)} ({format_bytes(measured.used_bytes)} in use), {link}{node}",
    )
    driver = None if measured.driver_cuda is None else ".".join(map(str, measured.driver_cuda))
    yield "", f"the driver is for CUDA {driver}" if driver else "the driver's management library (NVML) is not here"


def _drive_rows(measured: DriveFound) -> Iterator[tuple[str, str]]:
    drive = measured.drive
    node = None if drive.numa_node is None else f"NUMA node {drive.numa_node}"
    parts = [drive.model, drive.device, drive.file_system or "unknown file system", drive.link, node]
    yield "directory", str(drive.directory)
    yield "on", ", ".join(part for part in parts if part)
    yield "room", f"{format_bytes(measured.free_bytes)} free of {format_bytes(measured.total_bytes)}"
    yield (
        "measured",
        f"{measured.read / 1e9:.3g} GB/s read, {measured.burst_write / 1e9:.3g} GB/s written at first, "
        f"{measured.write / 1e9:.3g} GB/s past the fast cache, a commit in {measured.commit_seconds * 1e3:.2g} ms; "
        + ("direct I/O" if measured.direct else "through the page cache"),
    )


def _section(paint: Paint, heading: str, rows: list[tuple[str, str]]) -> None:
    print(paint(heading, BOLD))
    for name, text in rows:
        print(f"  {name:14} {text}")
    print(flush=True)


def _print_findings(paint: Paint, findings: list[Finding]) -> None:
    print(paint("potential problems", BOLD))
    for finding in findings:
        print(f"  {paint('!' if finding.severe else '-', RED if finding.severe else YELLOW)} {finding.what}")
        if finding.remedy:
            print(f"      {finding.remedy}")
    if not findings:
        print(f"  {paint('nothing that was looked for', GREEN)}")


def run_verify(folders: Sequence[str]) -> int:
    """Verify all runs in ``folders`` and print the results; return exit status 1 if anything is damaged."""
    status = 0
    start_time = time.monotonic()
    for where, step, parts, nbytes, damage in _verify([Path(folder).expanduser() for folder in folders]):
        result = f"{len(damage)} damaged" if damage else "all as written"
        seconds = time.monotonic() - start_time
        print(
            f"verify   {where}: step {step:,}, {parts}, {format_bytes(nbytes)} in {seconds:.1f} s: {result}", flush=True
        )
        for sentence in damage:
            status = 1
            print(f"finetune: error: {sentence}", file=sys.stderr)
        start_time = time.monotonic()
    return status


def _verify(folders: Sequence[Path]) -> Iterator[tuple[str, int, str, int, list[str]]]:
    """Yield where each run is, its committed step, what and how many bytes of it were read, and what is damaged."""
    from fcdp.checkpoint.commits import ShardedCheckpoints

    commits = {
        folder: [each for each in (folder, folder / COMMITS) if ShardedCheckpoints(each).newest() is not None]
        for folder in folders
    }
    stores = find_runs(folders, [folder for folder, committed in commits.items() if committed])
    for directory in dict.fromkeys(each for committed in commits.values() for each in committed):
        checked = ShardedCheckpoints(directory).verify()
        yield str(directory), checked.step, f"{checked.parts:,} parts of tensors", checked.nbytes, checked.damage
    for directories in stores:
        seen = verify_run(directories)
        where = ", ".join(map(str, seen.directories))
        yield where, seen.step, f"{seen.records:,} parts of records", seen.nbytes, seen.damage
