"""Inspect this machine for a run (``finetune check``) and verify stores (``finetune verify``)."""

import platform
import shlex
import shutil
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from peft import PeftConfig

from cli.job.machine import device_name, directories_at_hand, job_at_hand
from cli.job.outputs import BASE, CHECKPOINTS, ENTRY_POINTS, FILES, RESULT, Outputs
from cli.job.replaced import check_put_back
from cli.job.resumed import directory_at, faults_of_losses, faults_of_references, faults_of_store
from cli.options.run_record import (
    COMMITS,
    CONFIG,
    DESCRIPTION,
    METRICS,
    RUN,
    STORE,
    RunRecord,
    StorePlace,
    read_json,
    store_places,
)
from cli.options.settings import Settings
from cli.report.log import versions
from cli.report.progress import BOLD, RED, painted
from common.activity import activity
from common.errors import FinetuneError, UserError, as_message, on_one_line
from common.files import cache_directory, distinct_paths, read_text_file
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
from common.store.directories import DirectoryLock
from common.units import counted, format_bytes
from fuyou.checkpoint.run_files import find_runs, verify_run, without_common_step
from fuyou.layout.record import DTYPES, Precision
from fuyou.optimizer.chunk_update import slow_updates
from fuyou.planner import TrainingJob
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
    precision = Precision.named(settings.dtype if settings.dtype in DTYPES else "bf16", settings.optimizer)
    job = job_at_hand(settings, device_name(settings.gpu)) if settings.model else None
    gpus = list_gpus()
    problems = [*machine_problems(), *filter(None, [slow_updates(precision)])]
    available = f"{format_bytes(memory_available_bytes())} available"
    limit = memory_limit_bytes()
    memory = psutil.virtual_memory().total
    limited = f"; the control group allows {format_bytes(limit)}" if limit < memory else ""
    _section("versions", versions().items())
    machine = {
        "processors": f"{cpu_count()}, {platform.machine()}",
        "memory": f"{format_bytes(memory)}, {available}{limited}",
        "huge pages": "on" if huge_pages_enabled() else "off",
        "GPUs": ", ".join(f"{gpu.name}, {format_bytes(gpu.memory_bytes)}" for gpu in gpus)
        or "none: the CPU computes",
    }
    _section("machine", machine.items())
    drives = []
    for directory in directories:
        try:
            with activity(f"measuring {directory}"):
                drives.append(measure_drive(directory))
        except (FinetuneError, OSError) as error:  # full, read-only
            problems.append(
                (f"{directory} cannot hold a store: {on_one_line(error)}", "Name another with --ssd.")
            )
        else:
            _section("drive", _drive_rows(drives[-1]))
    problems += drive_problems(drives, settings.model, job.record_bytes if job else 0)
    print(painted("potential problems", BOLD))
    for what, remedy in problems:
        print(f"  {painted('!', RED)} {what}\n      {remedy}")
    if not problems:
        print("  nothing that was looked for")
    print()
    _section(f"caches in {cache_directory()}", _cache_rows())
    if job:
        _section("model", [("trains as in memory", _proof(job, settings.engine.adapters))])


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
        drive = measured.drive
        where = measured.drive.directory
        if drive.is_in_memory:
            yield f"{where} is {drive.file_system}: it takes host memory instead of a drive.", on_nvme
        elif drive.is_over_a_network:
            yield f"{where} is a network file system ({drive.file_system}).", on_nvme
        elif drive.is_hard_disk:
            yield f"{where} is on a hard disk.", on_nvme
        elif not measured.direct:
            system = drive.file_system or "The file system"
            yield (
                f"{system} of {where} has no direct I/O: the page cache takes memory.",
                "ext4 and xfs have it.",
            )
        preset = drive.preset
        read = measured.rates.read
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
            yield (
                f"{same} share one file system, its speed, and its room.",
                "Give one directory per drive with --ssd.",
            )

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
    return MeasuredDrive(
        drive_of(directory), directory.stat().st_dev, usage.total, usage.free, rates.direct, rates
    )


def _drive_rows(measured: MeasuredDrive) -> list[tuple[str, str]]:
    drive = measured.drive
    rates = measured.rates
    io = "direct I/O" if measured.direct else "through the page cache"
    return [
        ("directory", str(drive.directory)),
        (
            "on",
            ", ".join(filter(None, [drive.model, drive.device, drive.file_system or "unknown file system"])),
        ),
        ("room", f"{format_bytes(measured.free_bytes)} free of {format_bytes(measured.total_bytes)}"),
        ("read", f"{rates.read / 1e9:.3g} GB/s, {io}"),
        (
            "written",
            f"{rates.burst_write / 1e9:.3g} GB/s at first, {rates.write / 1e9:.3g} GB/s after "
            f"{format_bytes(rates.filled_bytes)}; a commit in {rates.commit_seconds * 1e3:.2g} ms",
        ),
    ]


_CACHES = {
    "tokens": "data as tokens",
    "gguf": "configurations and tokenizers of GGUF files",
    "demo": "the demo's model",
    "kernels": "compiled updates",
    "profiles": "measurements",
    "proofs": "proofs of families",
}


def _cache_rows() -> Iterator[tuple[str, str]]:
    """Yield what each cache takes."""
    folders = [path for path in sorted(cache_directory().glob("*")) if path.is_dir()]
    for folder in folders:
        what = f"{_CACHES[folder.name]}, " if folder.name in _CACHES else ""
        yield folder.name, f"{what}{format_bytes(_size(folder))}; made again if removed"
    if not folders:
        yield "nothing", "is cached yet"


def _size(folder: Path) -> int:
    sizes = []
    for path in folder.rglob("*"):
        with suppress(OSError):  # another process removes it
            sizes.append(path.lstat().st_size)
    return sum(sizes)


def _proof(job: TrainingJob, adapters: PeftConfig | None) -> str:
    from fuyou import prove

    start_time = time.monotonic()
    with activity("proving on a small model that this family trains out of core as in memory"):
        prove(job.config, adapters=adapters, dtype=job.layout.precision.dtype)
    seconds = time.monotonic() - start_time
    return f"losses and all gradients of a small {job.config.model_type}, block by block ({seconds:.1f} s)"


def _section(heading: str, rows: Iterable[tuple[str, str]]) -> None:
    print(painted(heading, BOLD))
    for name, text in rows:
        print(f"  {name:14} {text}")
    print(flush=True)


def run_verify(folders: Sequence[str]) -> int:
    """Compare commits and stores with their checksums, and what runs have written with their lists; return the exit
    status: 1 where something is damaged."""
    from fcdp.checkpoint import ShardedCheckpoints

    outputs = distinct_paths(Path(folder).expanduser() for folder in folders)
    for folder in outputs:
        _check_is_outer(folder)
        check_put_back(folder)
    records = {folder: record for folder in outputs if (record := RunRecord.read(folder)) is not None}
    elsewhere = {folder: _stores_elsewhere(folder, record) for folder, record in records.items()}
    known = {store.store for stores in elsewhere.values() for store in stores}

    def is_there(store: StorePlace) -> bool:
        now = directory_at(store)  # of exchanged folders, another one, which is named later
        return store.is_there() or (now is not None and now.store in known)

    there = [Path(store.path) for stores in elsewhere.values() for store in stores if is_there(store)]
    paths, status = distinct_paths([*outputs, *there]), 0
    commits = {
        folder: [each for each in (folder, folder / COMMITS) if ShardedCheckpoints(each).newest() is not None]
        for folder in paths
    }
    signs = (DESCRIPTION, FILES, CONFIG, METRICS)
    lists = [folder for folder in outputs if any((folder / RUN / name).exists() for name in signs)]
    stores = find_runs(paths, [*lists, *(folder for folder, committed in commits.items() if committed)])

    def report(where: str, what: str, damage: Sequence[str]) -> None:
        nonlocal status
        print(
            f"verify   {where}: {what}: {f'{len(damage)} damaged' if damage else 'all as written'}",
            flush=True,
        )
        for sentence in damage:
            status = 1
            print(f"finetune: error: {as_message(sentence)}", file=sys.stderr)

    for directory in distinct_paths(each for committed in commits.values() for each in committed):
        commit = ShardedCheckpoints(directory).verify()
        what = f"step {commit.step:,}, {commit.parts:,} parts of tensors, {format_bytes(commit.nbytes)}"
        report(str(directory), what, commit.damage)
    verified = []
    for directories in stores:
        run = verify_run(directories)
        verified.append(run)
        what = f"step {run.step:,}, {run.records:,} parts of records, {format_bytes(run.nbytes)}"
        report(", ".join(map(str, run.directories)), what, run.damage)
    for where, sentence in without_common_step(verified):
        report(where, "steps of the ranks", [sentence])
    for folder in lists:
        gone = [store for store in elsewhere.get(folder, ()) if not is_there(store)]
        lost = ", ".join(store.path for store in gone)
        if faults := [store.fault for store in gone if store.fault]:
            report(lost, "of the run", faults)
        elif lost and (records[folder].ended_after is None or len(gone) < len(records[folder].places)):
            report(
                lost, "of the run", [f"The store of the run in {folder} is not in {lost}: mount its drive."]
            )
        elif lost:
            print(f"verify   {lost}: not there, which a finished run can do without", flush=True)
        with DirectoryLock([folder]):
            files = Outputs.read(folder)
            report(str(folder), f"{counted(len(files.files), 'file')} of its run", _faults(files))
        for sentence in faults_of_losses(folder)[1]:  # lost lines, which the run has reported
            print(f"gap      {sentence.removesuffix('.')}", flush=True)
    for folder in outputs:
        if folder not in lists and (names := [name for name in ENTRY_POINTS if (folder / name).exists()]):
            why = f"{folder} holds {names[0]}, and without {folder / RUN} nothing tells whether it is what a run wrote"
            report(
                str(folder),
                "files without a list",
                [f"{why}: copy that folder back, or do not trust the files."],
            )
    return status


def _stores_elsewhere(output: Path, record: RunRecord) -> list[StorePlace]:
    """Return the directories of a run's stores that are not in its output; of a copy, those of the original are."""
    inside = {store.store for store in store_places([output / STORE, output / COMMITS])}
    return [store for store in record.places if store.store not in inside]


def _check_is_outer(folder: Path) -> None:
    """Refuse what is a part of a run's output, which is verified as a whole."""
    path = folder.resolve()
    for outer in path.parents:
        if path.relative_to(outer).parts[0] in (CHECKPOINTS, BASE, RUN) and (outer / RUN / FILES).exists():
            raise UserError(
                f"{folder} is a part of what the run in {outer} has written: finetune verify {shlex.quote(str(outer))} "
                "verifies all of that."
            )


def _faults(files: Outputs) -> list[str]:
    """Return sentences about what a run has written that is not as it was written, and what to do about that."""
    output = files.directory
    description = list(_description_faults(output))
    if not files.has_list:
        return [
            *description,
            f"{output / RUN / FILES} is missing or damaged, or of another run, so nothing of what the run "
            "has written can be checked: move its result elsewhere, then finetune export --output "
            f"{shlex.quote(str(output))} writes it again.",
        ]
    record = RunRecord.read(output)
    saves = _saves(output)
    faults = [
        *files.edits(),
        *files.strays(saves=saves),
        *files.faults(),
        *faults_of_losses(output)[0],
        *faults_of_references(output),
    ]
    faults += faults_of_store(output)
    if record is None and not files.files:
        faults.append(
            f"{output} has neither a run nor a result: what was to write them was killed. Enter it again."
        )
    if saves and record is not None and record.ended_after is not None and not files.has_result:
        faults.append(
            f"{output / RUN / FILES} lists no result, and the run is finished, and had one to write."
        )
    is_to_be_written = saves and (record is None or record.ended_after is not None)
    if faults and (files.faults(RESULT) or (is_to_be_written and not files.has_result)):
        faults[-1] += f" {files.remedy(RESULT)}"
    return [*description, *faults]


def _description_faults(output: Path) -> Iterator[str]:
    """Yield what is wrong with the description of a run, without which its store is not found elsewhere."""
    path = output / RUN / DESCRIPTION
    content = read_json(output / RUN / DESCRIPTION)
    stores = content.get("stores")
    record = RunRecord.read(output)
    what = ""
    if not path.exists():
        what = "is missing" if any((output / RUN / name).exists() for name in (CONFIG, METRICS)) else ""
    elif not content:
        what = "cannot be read"
    elif not (isinstance(content.get("id"), str) and content["id"]):
        what = "has no id of the run"
    elif record is None or not (isinstance(stores, list) and 0 < len(stores) == len(record.places)):
        what = "does not name the directories of the run's store"
    if what:
        yield (
            f"{path} {what}, so a store on other drives was not looked for: name its drives, too (finetune verify "
            f"{shlex.quote(str(output))} DRIVE). The next finetune --output {shlex.quote(str(output))} --resume writes "
            "the description again; it needs --ssd with these drives."
        )


def _saves(output: Path) -> bool:
    """Return whether a run writes a result, as far as its options are known."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return not tomllib.loads(read_text_file(output / RUN / CONFIG))["output"]["no-save"]
    return True
