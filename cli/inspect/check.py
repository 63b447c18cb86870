"""Inspect this machine for a run (``finetune check``) and verify stores (``finetune verify``)."""

import platform
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from cli.job.machine import PlannedRun, device_name, directories_at_hand, plan_at_hand
from cli.options.settings import COMMITS, Settings
from cli.report.log import versions
from cli.report.progress import BOLD, RED, painted
from common.activity import activity
from common.errors import FinetuneError, on_one_line
from common.hardware.directory_drive import Drive, drive_of
from common.hardware.machine import (
    cpu_count,
    huge_pages_enabled,
    list_gpus,
    memory_available_bytes,
    memory_limit_bytes,
    obstacle,
    system_has_gpu,
)
from common.units import format_bytes
from fuyou.checkpoint.run_files import find_runs, verify_run
from fuyou.planner.profiling.measure import DriveRates, measure_drives

Problem = tuple[str, str]  # What was found, and what to do about it


@dataclass(frozen=True)
class MeasuredDrive:
    """A directory for a store, with measured rates."""

    drive: Drive
    file_system_id: int  # Number of the file system
    total_bytes: int
    free_bytes: int
    direct: bool  # Whether direct I/O works
    rates: DriveRates


def run_check(settings: Settings) -> None:
    """Print what this machine is, how fast its drives are, and what would make a run fail or slow."""
    directories = directories_at_hand(settings, writable=False)
    planned = plan_at_hand(settings, device_name(settings.gpu)) if settings.model else None
    gpus, problems = list_gpus(), list(machine_problems())
    available = f"{format_bytes(memory_available_bytes())} available"
    limit, memory = memory_limit_bytes(), psutil.virtual_memory().total
    limited = f"; the control group allows {format_bytes(limit)}" if limit < memory else ""
    _section("versions", versions().items())
    machine = {
        "processors": f"{cpu_count()}, {platform.machine()}",
        "memory": f"{format_bytes(memory)}, {available}{limited}",
        "huge pages": "on" if huge_pages_enabled() else "off",
        "GPUs": ", ".join(f"{gpu.name}, {format_bytes(gpu.memory_bytes)}" for gpu in gpus) or "none: the CPU computes",
    }
    _section("machine", machine.items())
    drives = []
    for directory in directories:
        try:
            with activity(f"measuring {directory}"):
                drives.append(measure_drive(directory))
        except (FinetuneError, OSError) as error:  # full, read-only
            problems.append((f"{directory} cannot hold a store: {on_one_line(error)}", "Name another with --ssd."))
        else:
            _section("drive", _drive_rows(drives[-1]))
    problems += drive_problems(drives, settings.model, planned.training.record_bytes if planned else 0)
    print(painted("potential problems", BOLD))
    for what, remedy in problems:
        print(f"  {painted('!', RED)} {what}\n      {remedy}")
    if not problems:
        print("  nothing that was looked for")
    if planned:
        _section("model", [("trains as in memory", _proof(planned))])


def machine_problems() -> Iterator[Problem]:
    """Yield what processors, memory, and GPUs lack."""
    if not huge_pages_enabled():
        yield (
            "Huge pages are off: direct I/O then takes two to three times as long.",
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        )
    why = obstacle() if list_gpus() or system_has_gpu() else None
    if why is not None:
        yield (
            f"The NVIDIA GPU of this machine cannot be used: {why}.",
            "Install a driver and a PyTorch that fit together; pytorch.org/get-started says how.",
        )
    if list_gpus() and "microsoft" in platform.release().lower():
        yield (
            "In WSL2, device memory that runs out is taken from the host, which is slow, and CUDA page-locks little.",
            "Set Windows' NVIDIA Control Panel to 'Prefer No Sysmem Fallback', and give a low --host-memory.",
        )


def drive_problems(drives: Sequence[MeasuredDrive], model: str | None, needed: int) -> Iterator[Problem]:
    """Yield what makes drives slow, or no drives, and whether ``model``, whose records take ``needed`` bytes, fits."""
    on_nvme = "Give a directory on a local NVMe drive with --ssd; --output may stay."
    for measured in drives:
        drive, where = measured.drive, measured.drive.directory
        if drive.is_in_memory:
            yield f"{where} is {drive.file_system}: it takes host memory instead of a drive.", on_nvme
        elif drive.is_over_a_network:
            yield f"{where} is a network file system ({drive.file_system}).", on_nvme
        elif drive.is_hard_disk:
            yield f"{where} is on a hard disk.", on_nvme
        elif not measured.direct:
            system = drive.file_system or "The file system"
            yield f"{system} of {where} has no direct I/O: the page cache takes memory.", "ext4 and xfs have it."
        preset, read = drive.preset, measured.rates.read
        if preset is not None and read < 0.5 * preset.read_bytes_per_second:
            promised = preset.read_bytes_per_second / 1e9
            yield (
                f"{preset.title} reads {read / 1e9:.3g} GB/s here, and its maker says {promised:.3g}.",
                "Is it busy, hot, nearly full, encrypted, or in a slower slot?",
            )
    sharing = Counter(measured.file_system_id for measured in drives)
    for number, count in sharing.items():
        same = " and ".join(str(each.drive.directory) for each in drives if each.file_system_id == number)
        if count > 1:
            yield f"{same} share one file system, its speed, and its room.", "Give one directory per drive with --ssd."

    free = min((each.free_bytes // sharing[each.file_system_id] for each in drives), default=0) * len(drives)
    if drives and needed > free:
        yield (
            f"{model} takes {format_bytes(needed)} on the drives, and {format_bytes(free)} can be used.",
            "Name more or larger drives with --ssd.",
        )


def measure_drive(directory: Path) -> MeasuredDrive:
    """Return the drive of a directory and its free space, and measure its speed, for half a minute."""
    usage = shutil.disk_usage(directory)
    rates = measure_drives([directory], None, past_cache=True)
    return MeasuredDrive(drive_of(directory), directory.stat().st_dev, usage.total, usage.free, rates.direct, rates)


def _drive_rows(measured: MeasuredDrive) -> list[tuple[str, str]]:
    drive, rates = measured.drive, measured.rates
    io = "direct I/O" if measured.direct else "through the page cache"
    return [
        ("directory", str(drive.directory)),
        ("on", ", ".join(filter(None, [drive.model, drive.device, drive.file_system or "unknown file system"]))),
        ("room", f"{format_bytes(measured.free_bytes)} free of {format_bytes(measured.total_bytes)}"),
        ("read", f"{rates.read / 1e9:.3g} GB/s, {io}"),
        (
            "written",
            f"{rates.burst_write / 1e9:.3g} GB/s at first, {rates.write / 1e9:.3g} GB/s after "
            f"{format_bytes(rates.filled_bytes)}; a commit in {rates.commit_seconds * 1e3:.2g} ms",
        ),
    ]


def _proof(planned: PlannedRun) -> str:
    from fuyou import prove

    config = planned.training.config
    start_time = time.monotonic()
    with activity("proving on a small model that this family trains out of core as in memory"):
        prove(config, adapters=planned.engine.adapters, dtype=planned.engine.precision.dtype)
    seconds = time.monotonic() - start_time
    return f"losses and all gradients of a small {config.model_type}, block by block ({seconds:.1f} s)"


def _section(heading: str, rows: Iterable[tuple[str, str]]) -> None:
    print(painted(heading, BOLD))
    for name, text in rows:
        print(f"  {name:14} {text}")
    print(flush=True)


def run_verify(folders: Sequence[str]) -> int:
    """Compare commits and stores with their checksums, and return the exit status: 1 where something is damaged."""
    from fcdp.checkpoint import ShardedCheckpoints

    paths, status = [Path(folder).expanduser() for folder in folders], 0
    commits = {
        folder: [each for each in (folder, folder / COMMITS) if ShardedCheckpoints(each).newest() is not None]
        for folder in paths
    }
    stores = find_runs(paths, [folder for folder, committed in commits.items() if committed])

    def report(where: str, step: int, parts: str, nbytes: int, damage: Sequence[str]) -> None:
        nonlocal status
        result = f"{len(damage)} damaged" if damage else "all as written"
        print(f"verify   {where}: step {step:,}, {parts}, {format_bytes(nbytes)}: {result}", flush=True)
        for sentence in damage:
            status = 1
            print(f"finetune: error: {sentence}", file=sys.stderr)

    for directory in dict.fromkeys(each for committed in commits.values() for each in committed):
        commit = ShardedCheckpoints(directory).verify()
        report(str(directory), commit.step, f"{commit.parts:,} parts of tensors", commit.nbytes, commit.damage)
    for directories in stores:
        run = verify_run(directories)
        where = ", ".join(map(str, run.directories))
        report(where, run.step, f"{run.records:,} parts of records", run.nbytes, run.damage)
    return status
