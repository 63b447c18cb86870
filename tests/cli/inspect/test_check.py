"""``finetune --check``: what it finds here, and what its rules make of other machines."""

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from cli.inspect.check import MeasuredDrive, _cache_rows, drive_problems, machine_problems
from common.files import CACHE_VARIABLE
from common.hardware.directory_drive import Drive, drive_of
from fuyou.planner.profiling.measure import DriveRates
from tests.cli.conftest import Finetune

RATES = DriveRates(7.1e9, 2e9, 6.5e9, 64 << 30, 0.003)
DRIVE = MeasuredDrive(
    Drive(Path("/mnt/nvme0"), "ext4", "nvme0n1", "Samsung SSD 990 PRO 2TB", False, 0), 7, 2 * 10**12, 10**12, True,
    RATES,
)  # fmt: skip


def on(drive: MeasuredDrive, **changes: object) -> MeasuredDrive:
    return replace(drive, drive=replace(drive.drive, **changes))  # type: ignore[arg-type]


def at_rates(**changes: float) -> MeasuredDrive:
    return replace(DRIVE, rates=replace(RATES, **changes))  # type: ignore[arg-type]


def trouble(*drives: MeasuredDrive, store: int = 10**12) -> list[tuple[str, str]]:
    return list(drive_problems(drives, "gpt3-13b", store))


def test_a_good_drive_is_left_alone() -> None:
    assert trouble(DRIVE) == []


@pytest.mark.parametrize(("found", "what", "remedy"), [
    (trouble(on(DRIVE, file_system="tmpfs")), "/mnt/nvme0 is tmpfs", "--ssd"),
    (trouble(on(DRIVE, file_system="fuse.glusterfs")), "network file system", "--ssd"),
    (trouble(on(DRIVE, is_rotational=True, model="ST4000DM004")), "hard disk", "--ssd"),
    (trouble(replace(DRIVE, direct=False)), "no direct I/O", "xfs"),
    (trouble(at_rates(read=2e9)), "reads 2 GB/s here, and its maker says 7.45", "busy"),
    (trouble(DRIVE, on(DRIVE, directory=Path("/mnt/b"))), "/mnt/nvme0 and /mnt/b share one file system", "per"),
    (trouble(DRIVE, store=2 * 10**12), "gpt3-13b takes 1.82 TiB on the drives, and 931 GiB", "more or larger drives"),
])  # fmt: skip
def test_problems_of_drives(found: list[tuple[str, str]], what: str, remedy: str) -> None:
    assert len(found) == 1 and what in found[0][0] and remedy in found[0][1], found


def test_problems_of_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "list_gpus": lambda: [object()], "huge_pages_enabled": lambda: False, "obstacle": lambda: "it is a stone",
        "platform.release": lambda: "5.15-microsoft-standard-WSL2",
    }.items():  # fmt: skip
        monkeypatch.setattr(f"cli.inspect.check.{name}", value)
    text = str(list(machine_problems()))
    for words in ("transparent_hugepage/enabled", "cannot be used: it is a stone", "No Sysmem Fallback"):
        assert words in text


def test_the_drive_below_a_volume_on_a_partition(tmp_path: Path) -> None:
    """As /sys has it for a logical volume on the second partition of an NVMe drive."""
    sys, pci = tmp_path / "sys", tmp_path / "sys/devices/pci0000:00/0000:00:01.0"
    drive, volume = pci / "nvme/nvme0/nvme0n1", tmp_path / "sys/devices/virtual/block/dm-3"
    for folder in (
        drive / "nvme0n1p2",
        drive / "queue",
        volume / "slaves",
        sys / "dev/block",
        sys / "class/block",
    ):
        folder.mkdir(parents=True)
    for file, text in {
        drive / "queue/rotational": "0", drive / "dev": "259:0", drive / "nvme0n1p2/partition": "2",
        drive / "nvme0n1p2/dev": "259:2", volume / "dev": "253:3", drive.parent / "model": "Samsung SSD 980 PRO 1TB  ",
        pci / "numa_node": "1",
    }.items():  # fmt: skip
        file.write_text(text + "\n")
    (drive / "device").symlink_to("..")
    (drive.parent / "device").symlink_to("../..")
    (volume / "slaves/nvme0n1p2").symlink_to(drive / "nvme0n1p2")
    (sys / "dev/block/253:3").symlink_to(volume)
    (sys / "dev/block/259:2").symlink_to(drive / "nvme0n1p2")
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "20 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        f"30 20 253:3 / {tmp_path}/my\\040drives rw,noatime shared:3 - xfs /dev/mapper/data rw\n"
    )
    directory = tmp_path / "my drives" / "nvme0"
    directory.mkdir(parents=True)
    found = drive_of(directory, sys, mounts)
    assert found == Drive(
        directory, "xfs", "nvme0n1", "Samsung SSD 980 PRO 1TB", False, 1
    )  # fmt: skip
    assert found.preset is not None and found.preset.name == "samsung-980-pro-1tb"
    assert drive_of(tmp_path, sys, mounts) == Drive(tmp_path, "ext4", None, None, False, None)


def test_a_mount_point_in_any_alphabet(tmp_path: Path) -> None:
    directory = tmp_path / "Läufe 数据"
    directory.mkdir()
    listed = tmp_path / "mountinfo"
    point = str(directory).replace(" ", "\\040")
    listed.write_text(
        f"20 1 0:1 / / rw - ext4 /dev/sda1 rw\n30 20 0:2 / {point} rw - tmpfs  rw\n", encoding="utf-8"
    )
    assert drive_of(directory, tmp_path / "sys", listed).file_system == "tmpfs"


def test_this_machine(finetune: Finetune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuyou.planner.profiling.measure.PAST_CACHE_SECONDS", 0.0)
    drive = tmp_path / "drive"
    drive.mkdir()
    outcome = finetune("--check", "--ssd", drive, "--model", "gpt3-805b")
    assert outcome.status == 0 and outcome.err == "", outcome.err
    for text in ("torch ", "processors", "huge pages", f"directory      {drive}", "direct I/O", "GB/s at first",
                 "caches in ", "gpt3-805b takes", "trains as in memory"):  # fmt: skip
        assert text in outcome.out
    assert "\x1b" not in outcome.out, "colours are for terminals"
    assert list(drive.iterdir()) == []


def test_a_drive_that_cannot_be_written_is_a_finding(
    finetune: Finetune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", "check")

    monkeypatch.setattr("cli.inspect.check.measure_drive", refuse)
    outcome = finetune("--check", "--ssd", tmp_path)
    assert outcome.status == 0 and f"! {tmp_path} cannot hold a store: [Errno 30] Read-only" in outcome.out


def test_caches_are_listed_with_their_sizes_and_what_removes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv(CACHE_VARIABLE, str(cache))
    assert list(_cache_rows()) == [("nothing", "is cached yet")]
    (cache / "gguf/my model-1").mkdir(parents=True)
    (cache / "gguf/my model-1" / "tokenizer.json").write_bytes(bytes(3 << 20))
    (cache / "tokens").mkdir()
    rows = dict(_cache_rows())
    assert rows["gguf"].startswith("configurations and tokenizers of GGUF files, 3 MiB; ")
    assert rows["tokens"].startswith("data as tokens, 0")


def test_a_machine_without_a_compiler(
    finetune: Finetune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cli.inspect.check.measure_drive", lambda _: None)
    monkeypatch.setattr(
        "cli.inspect.check.slow_updates", lambda precision: (f"slow in {precision.dtype}", "g++")
    )
    monkeypatch.setattr("cli.inspect.check._drive_rows", lambda _: [])
    monkeypatch.setattr("cli.inspect.check.drive_problems", lambda *_: [])
    outcome = finetune("--check", "--ssd", tmp_path, "--dtype", "bf16")
    assert outcome.status == 0 and "! slow in torch.bfloat16\n      g++" in outcome.out


@pytest.mark.parametrize("model", [None, "QEMU HARDDISK", "Virtual disk", "PersistentDisk"])
def test_a_virtual_drive_is_no_hard_disk_however_fast_it_is_today(model: str | None) -> None:
    for read in (1e8, 5e9):
        drive = on(at_rates(read=read), is_rotational=True, model=model)
        assert not [problem for problem in trouble(drive) if "hard disk" in problem[0]]
