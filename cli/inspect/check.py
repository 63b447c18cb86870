"""Inspect this machine for a run (``finetune check``) and verify stores (``finetune verify``)."""

import contextlib
import math
import os
import platform
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from cli.job.machine import directories_at_hand, training_of, with_dtype
from cli.options.settings import COMMITS, Settings
from cli.report.log import versions
from cli.report.progress import draws_on
from common.activity import activity
from common.errors import FinetuneError, on_one_line
from common.hardware.directory_drive import Drive, drive_of
from common.hardware.machine import (
    Gpu,
    cpu_count,
    huge_pages_enabled,
    list_gpus,
    memory_available_bytes,
    memory_limit_bytes,
    obstacle,
    system_has_gpu,
)
from common.models.presets import load_config
from common.units import format_bytes, format_count
from fuyou.checkpoint.run_files import find_runs, verify_run
from fuyou.planner.profiling.measure import DriveRates, open_scratch


@dataclass(frozen=True)
class MachineFound:
    """Processors and memory of this machine."""

    processors: int = field(default_factory=cpu_count)  # Processors that this process may use
    memory_bytes: int = field(default_factory=lambda: psutil.virtual_memory().total)  # Memory of the whole machine
    limit_bytes: int = field(default_factory=memory_limit_bytes)  # Memory that control groups allow, at most all
    available_bytes: int = field(default_factory=memory_available_bytes)
    huge_pages: bool = field(default_factory=huge_pages_enabled)  # Whether memory gets huge pages on request
    # Whether the kernel module of GPUDirect Storage is loaded
    has_p2p_storage: bool = field(default_factory=Path("/proc/driver/nvidia-fs/version").exists)
    # CUDA version that PyTorch was built for
    torch_cuda: str | None = field(default_factory=lambda: torch.version.cuda)
    # Why PyTorch cannot use a GPU that the system has
    gpu_obstacle: str | None = field(default_factory=lambda: obstacle() if list_gpus() or system_has_gpu() else None)
    is_wsl: bool = field(default_factory=lambda: "microsoft" in platform.release().lower())  # Whether it is WSL2


@dataclass(frozen=True)
class GpuFound:
    """A GPU of this machine."""

    gpu: Gpu
    used_bytes: int  # Bytes of its memory in use by anybody
    link_width: int  # PCI Express lanes in use; 0: unknown
    full_link_width: int  # Lanes that device and slot could have


@dataclass(frozen=True)
class DriveFound:
    """A directory for a store, with measured rates."""

    drive: Drive
    file_system_id: int  # Number of the file system
    total_bytes: int
    free_bytes: int
    direct: bool  # Whether direct I/O works
    rates: DriveRates


@dataclass(frozen=True)
class Finding:
    """A potential problem."""

    what: str
    remedy: str = ""  # What to do about it; a command where possible
    severe: bool = False  # Whether a run will fail, or be several times slower


Rule = tuple[object, bool, str, str]  # Whether it applies, whether it is severe, what is found, and what to do


def find_trouble(
    machine: MachineFound, gpus: list[GpuFound], drives: list[DriveFound], store_bytes: int | None, model: str | None
) -> list[Finding]:
    """Return all findings that apply, severe ones first; ``model`` takes ``store_bytes`` on all drives, if that is
    known."""
    rules = [*_machine_rules(machine), *_gpu_rules(machine, gpus)]
    for measured in drives:
        rules += [*_drive_rules(measured), *_preset_rules(measured)]
    shared = Counter(measured.file_system_id for measured in drives)
    for number, count in shared.items():
        same = [str(measured.drive.directory) for measured in drives if measured.file_system_id == number]
        what = f"{' and '.join(same)} are on one file system: they share its speed and its room."
        rules.append((count > 1, False, what, "Give one directory per drive with --ssd."))
    needed = store_bytes or 0
    free = min((each.free_bytes // shared[each.file_system_id] for each in drives), default=needed) * len(drives)
    what = f"{model} takes {format_bytes(needed)} on the drives, and {format_bytes(free)} can be used."
    rules.append((drives and needed > free, True, what, "Name more or larger drives with --ssd."))
    findings = [Finding(what, remedy, severe) for applies, severe, what, remedy in rules if applies]
    return sorted(findings, key=lambda finding: not finding.severe)


def _machine_rules(machine: MachineFound) -> Iterator[Rule]:
    yield (
        not machine.huge_pages,
        True,
        "Huge pages are off: direct I/O then takes two to three times as long.",
        "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
    )
    yield (
        machine.limit_bytes < machine.memory_bytes,
        False,
        f"A control group allows {format_bytes(machine.limit_bytes)} of the machine's "
        f"{format_bytes(machine.memory_bytes)} of memory.",
        "Budgets follow that limit. To raise it: docker run --memory, sbatch --mem, or systemd's MemoryMax.",
    )


def _gpu_rules(machine: MachineFound, gpus: list[GpuFound]) -> Iterator[Rule]:
    yield (
        machine.gpu_obstacle is not None,
        True,
        f"The NVIDIA GPU of this machine cannot be used: {machine.gpu_obstacle}.",
        "Install a driver and a PyTorch that fit together; pytorch.org/get-started says how.",
    )
    yield (
        machine.gpu_obstacle is None and not gpus,
        False,
        "No NVIDIA GPU was found: the CPU computes.",
        "If there is one, nvidia-smi must show it, and CUDA_VISIBLE_DEVICES must not hide it.",
    )
    yield (
        gpus and machine.is_wsl,
        False,
        "In WSL2, device memory that runs out is taken from the host, which is slow, and CUDA page-locks little.",
        "Set Windows' NVIDIA Control Panel to 'Prefer No Sysmem Fallback', and give a low --host-memory.",
    )
    for measured in gpus:
        yield (
            measured.link_width < measured.full_link_width,
            False,
            f"{measured.gpu.name} uses {measured.link_width} of {measured.full_link_width} PCI Express "
            "lanes, which slows copies down.",
            "Put it into a slot with all lanes, or check riser and BIOS settings.",
        )
        yield (
            measured.used_bytes > measured.gpu.memory_bytes // 10,
            False,
            f"{format_bytes(measured.used_bytes)} of memory on {measured.gpu.name} are in use by others.",
            "nvidia-smi says by whom. --device-memory gives what is left as the budget.",
        )


def _drive_rules(measured: DriveFound) -> Iterator[Rule]:
    drive, where, on_nvme = measured.drive, measured.drive.directory, "Give a directory on an NVMe drive with --ssd."
    yield drive.is_in_memory, True, f"{where} is {drive.file_system}: it takes host memory instead of a drive.", on_nvme
    yield (
        drive.is_over_a_network,
        True,
        f"{where} is a network file system ({drive.file_system}).",
        "Give a directory on a local NVMe drive with --ssd; --output may stay.",
    )
    yield drive.is_hard_disk, True, f"{where} is on a hard disk.", on_nvme
    yield (
        not measured.direct and not drive.is_in_memory,
        False,
        f"{drive.file_system or 'The file system'} of {where} has no direct I/O: the page cache takes memory.",
        "ext4 and xfs have it.",
    )
    yield (
        drive.link != drive.full_link,
        False,
        f"{drive.model or drive.device} runs at {drive.link} and could at {drive.full_link}.",
        "It is in a slower slot: move it, or check the BIOS settings.",
    )


def _preset_rules(measured: DriveFound) -> Iterator[Rule]:
    preset = measured.drive.preset
    if preset is None:
        return
    slow = preset.sustained_write_bytes_per_second or math.inf
    after = f" after {format_count(preset.cache_bytes / 1e9)} GB of writes" if preset.cache_bytes else " later"
    yield (
        slow < 0.9 * preset.write_bytes_per_second,
        False,
        f"{preset.title} slows to {slow / 1e9:.2g} GB/s{after}: a run of more than a few steps meets that.",
        "Plan with it: --drive knows this drive. More drives, or --commit-every, spread the writes.",
    )
    yield (
        measured.rates.read < 0.5 * preset.read_bytes_per_second,
        False,
        f"{preset.title} reads {measured.rates.read / 1e9:.3g} GB/s here, and its maker says "
        f"{preset.read_bytes_per_second / 1e9:.3g}.",
        "Is it busy, hot, nearly full or encrypted?",
    )


RED, YELLOW, GREEN, BOLD = 31, 33, 32, 1


@dataclass(frozen=True)
class Paint:
    """Colors text on a terminal, unless ``NO_COLOR`` is set (no-color.org)."""

    on: bool = field(default_factory=lambda: draws_on(sys.stdout) and not os.environ.get("NO_COLOR"))

    def __call__(self, text: str, code: int) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.on else text


def run_check(settings: Settings) -> None:
    paint = Paint()
    directories = directories_at_hand(settings, writable=False)
    settings = with_dtype(settings)
    store = training_of(settings).record_bytes if settings.model else None
    _section(paint, "versions", list(versions().items()))
    machine = MachineFound()
    _section(paint, "machine", list(_machine_rows(machine)))
    gpus = look_at_gpus()
    _section(paint, "GPUs", [row for gpu in gpus for row in _gpu_rows(gpu)] or [("none", "the CPU computes")])
    drives, unusable = [], []
    for directory in directories:
        try:
            with activity(f"measuring {directory}"):
                drives.append(look_at_drive(directory))
        except (FinetuneError, OSError) as error:  # full, read-only
            unusable.append(Finding(f"{directory} cannot hold a store: {on_one_line(error)}", severe=True))
            continue
        _section(paint, "drive", list(_drive_rows(drives[-1])))
    _print_findings(paint, [*unusable, *find_trouble(machine, gpus, drives, store, settings.model)])
    if settings.model:
        _section(paint, "model", [("trains as in memory", _proof(settings))])


def _proof(settings: Settings) -> str:
    from fuyou import prove

    assert settings.model is not None
    config, _ = load_config(settings.model)
    start_time = time.monotonic()
    with activity("proving on a small model that this family trains out of core as in memory"):
        prove(config, adapters=settings.engine.adapters, dtype=settings.engine.precision.dtype)
    seconds = time.monotonic() - start_time
    return f"losses and all gradients of a small {config.model_type}, block by block ({seconds:.1f} s)"


def look_at_gpus() -> list[GpuFound]:
    import pynvml

    gpus = []
    for gpu in list_gpus():
        used, width, full_width = 0, 0, 0
        with contextlib.suppress(pynvml.NVMLError), contextlib.ExitStack() as stack:
            pynvml.nvmlInit()
            stack.callback(pynvml.nvmlShutdown)
            handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
            with contextlib.suppress(pynvml.NVMLError):  # a divided GPU tells only its administrator
                used = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
            full_width = pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
            width = pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle)
        gpus.append(GpuFound(gpu, used, width, full_width))
    return gpus


def look_at_drive(directory: Path) -> DriveFound:
    """Return the drive of a directory and its free space, and measure its speed, for half a minute."""
    usage = shutil.disk_usage(directory)
    with open_scratch([directory], None) as scratch:
        rates, direct = scratch.measure(past_cache=True), scratch.store.direct
    number = directory.stat().st_dev
    return DriveFound(drive_of(directory), number, usage.total, usage.free, direct, rates)


def _machine_rows(machine: MachineFound) -> Iterator[tuple[str, str]]:
    yield "processors", f"{machine.processors}, {platform.machine()}"
    is_limited = machine.limit_bytes < machine.memory_bytes
    group = f"; the control group allows {format_bytes(machine.limit_bytes)}" if is_limited else ""
    yield "memory", f"{format_bytes(machine.memory_bytes)}, {format_bytes(machine.available_bytes)} available{group}"
    yield "huge pages", "on" if machine.huge_pages else "off"
    yield "GPUDirect", "nvidia-fs is loaded" if machine.has_p2p_storage else "Storage: nvidia-fs is not loaded"
    yield "PyTorch", f"built for CUDA {machine.torch_cuda}" if machine.torch_cuda else "built without CUDA"


def _gpu_rows(measured: GpuFound) -> Iterator[tuple[str, str]]:
    gpu = measured.gpu
    link = f"PCIe x{measured.link_width}" if measured.link_width else "PCIe link unknown"
    memory = f"{format_bytes(gpu.memory_bytes)} ({format_bytes(measured.used_bytes)} in use)"
    yield str(gpu.index), f"{gpu.name}, {memory}, {link}"


def _drive_rows(measured: DriveFound) -> Iterator[tuple[str, str]]:
    drive, rates = measured.drive, measured.rates
    parts = [drive.model, drive.device, drive.file_system or "unknown file system", drive.link]
    yield "directory", str(drive.directory)
    yield "on", ", ".join(part for part in parts if part)
    yield "room", f"{format_bytes(measured.free_bytes)} free of {format_bytes(measured.total_bytes)}"
    yield (
        "measured",
        f"{rates.read / 1e9:.3g} GB/s read, {rates.burst_write / 1e9:.3g} GB/s written at first, "
        f"{rates.write / 1e9:.3g} GB/s after {format_bytes(rates.filled_bytes)}, "
        f"a commit in {rates.commit_seconds * 1e3:.2g} ms; "
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
    from fcdp.checkpoint import ShardedCheckpoints

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
