"""``finetune --check``: what it finds here, and what its rules make of other machines."""

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from cli.inspect.check import DriveFound, Finding, GpuFound, MachineFound, find_trouble
from common.hardware.directory_drive import Drive, drive_of
from common.hardware.machine import Gpu
from fuyou.planner.profiling.measure import DriveRates
from tests.cli.conftest import Finetune

MACHINE = MachineFound(16, 64 << 30, 64 << 30, 50 << 30, True, False, "13.0", None)
GPU = GpuFound(Gpu(0, "GPU-x", "NVIDIA GeForce RTX 4090", 24 << 30, "0000:01:00.0", 0), 1 << 30, 16, 16)
LINK = "16.0 GT/s PCIe x4"
RATES = DriveRates(7.1e9, 2e9, 6.5e9, 64 << 30, 0.003)
DRIVE = DriveFound(
    Drive(Path("/mnt/nvme0"), "ext4", "nvme0n1", "Samsung SSD 990 PRO 2TB", False, LINK, LINK, 0),
    7, 2 * 10**12, 10**12, True, RATES,
)  # fmt: skip


def on(drive: DriveFound, **changes: object) -> DriveFound:
    return replace(drive, drive=replace(drive.drive, **changes))  # type: ignore[arg-type]


def at_rates(**changes: float) -> DriveFound:
    return replace(DRIVE, rates=replace(RATES, **changes))  # type: ignore[arg-type]


def trouble(
    machine: MachineFound = MACHINE, gpu: GpuFound | None = GPU, drives: tuple[DriveFound, ...] = (DRIVE,),
    store: int | None = None,
) -> list[Finding]:  # fmt: skip
    return find_trouble(machine, [gpu] if gpu else [], list(drives), store, "gpt3-13b")


def test_a_good_machine_is_left_alone() -> None:
    assert trouble(store=10**12) == []


@pytest.mark.parametrize(("found", "severe", "what", "remedy"), [
    (trouble(replace(MACHINE, huge_pages=False)), True, "Huge pages are off", "transparent_hugepage/enabled"),
    (trouble(replace(MACHINE, limit_bytes=8 << 30)), False, "allows 8 GiB of the machine's 64 GiB", "docker run"),
    (trouble(replace(MACHINE, gpu_obstacle="it is a stone")), True, "cannot be used: it is a stone", "fit together"),
    (trouble(replace(MACHINE, is_wsl=True)), False, "In WSL2", "No Sysmem Fallback"),
    (trouble(gpu=None), False, "No NVIDIA GPU", "nvidia-smi"),
    (trouble(gpu=replace(GPU, link_width=8)), False, "uses 8 of 16 PCI Express lanes", "slot"),
    (trouble(gpu=replace(GPU, used_bytes=6 << 30)), False, "6 GiB of memory on NVIDIA", "--device-memory"),
    (trouble(drives=(on(DRIVE, file_system="tmpfs"),)), True, "/mnt/nvme0 is tmpfs", "--ssd"),
    (trouble(drives=(on(DRIVE, file_system="fuse.glusterfs"),)), True, "network file system", "--ssd"),
    (trouble(drives=(on(DRIVE, is_rotational=True, model="ST4000DM004"),)), True, "hard disk", "--ssd"),
    (trouble(drives=(replace(DRIVE, direct=False),)), False, "no direct I/O", "xfs"),
    (trouble(drives=(on(DRIVE, link="8.0 GT/s PCIe x4"),)), False, "runs at 8.0 GT/s PCIe x4 and could", "slot"),
    (trouble(drives=(at_rates(read=2e9),)), False, "reads 2 GB/s here, and its maker says 7.45", "busy"),
    (trouble(drives=(on(DRIVE, model="Samsung SSD 970 EVO Plus 2TB"),)), False, "slows to 1.", "--drive"),
    (trouble(drives=(DRIVE, on(DRIVE, directory=Path("/mnt/b")))), False, "/mnt/nvme0 and /mnt/b are on one", "per"),
    (trouble(store=2 * 10**12), True, "gpt3-13b takes 1.82 TiB on the drives, and 931 GiB", "more or larger drives"),
])  # fmt: skip
def test_problems(found: list[Finding], severe: bool, what: str, remedy: str) -> None:
    assert len(found) == 1, found
    assert (found[0].severe, what in found[0].what, remedy in found[0].remedy) == (severe, True, True), found[0]


def test_the_drive_below_a_volume_on_a_partition(tmp_path: Path) -> None:
    """As /sys has it for a logical volume on the second partition of an NVMe drive."""
    sys, pci = tmp_path / "sys", tmp_path / "sys/devices/pci0000:00/0000:00:01.0"
    drive, volume = pci / "nvme/nvme0/nvme0n1", tmp_path / "sys/devices/virtual/block/dm-3"
    for folder in (drive / "nvme0n1p2", drive / "queue", volume / "slaves", sys / "dev/block", sys / "class/block"):
        folder.mkdir(parents=True)
    for file, text in {
        drive / "queue/rotational": "0", drive / "dev": "259:0", drive / "nvme0n1p2/partition": "2",
        drive / "nvme0n1p2/dev": "259:2", volume / "dev": "253:3", drive.parent / "model": "Samsung SSD 980 PRO 1TB  ",
        pci / "current_link_speed": "8.0 GT/s PCIe", pci / "current_link_width": "4",
        pci / "max_link_speed": "16.0 GT/s PCIe", pci / "max_link_width": "4", pci / "numa_node": "1",
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
        directory, "xfs", "nvme0n1", "Samsung SSD 980 PRO 1TB", False, "8.0 GT/s PCIe x4", LINK, 1
    )  # fmt: skip
    assert found.preset is not None and found.preset.name == "samsung-980-pro-1tb"
    assert drive_of(tmp_path, sys, mounts) == Drive(tmp_path, "ext4", None, None, False, None, None, None)


def test_a_mount_point_in_any_alphabet(tmp_path: Path) -> None:
    directory = tmp_path / "Läufe 数据"
    directory.mkdir()
    listed = tmp_path / "mountinfo"
    point = str(directory).replace(" ", "\\040")
    listed.write_text(f"20 1 0:1 / / rw - ext4 /dev/sda1 rw\n30 20 0:2 / {point} rw - tmpfs  rw\n", encoding="utf-8")
    assert drive_of(directory, tmp_path / "sys", listed).file_system == "tmpfs"


def test_this_machine(finetune: Finetune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuyou.planner.profiling.measure.PAST_CACHE_SECONDS", 0.0)
    drive = tmp_path / "drive"
    drive.mkdir()
    outcome = finetune("--check", "--ssd", drive, "--model", "gpt3-805b")
    assert outcome.status == 0 and outcome.err == "", outcome.err
    for text in ("torch ", "processors", "huge pages", f"directory      {drive}", "GB/s read", "GB/s written at first",
                 "gpt3-805b takes", "trains as in memory"):  # fmt: skip
        assert text in outcome.out
    assert "\x1b" not in outcome.out, "colours are for terminals"
    assert list(drive.iterdir()) == []


def test_a_drive_that_cannot_be_written_is_a_finding(
    finetune: Finetune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", "check")

    monkeypatch.setattr("cli.inspect.check.look_at_drive", refuse)
    outcome = finetune("--check", "--ssd", tmp_path)
    assert outcome.status == 0 and f"! {tmp_path} cannot hold a store: [Errno 30] Read-only" in outcome.out


@pytest.mark.parametrize("model", [None, "QEMU HARDDISK", "Virtual disk", "PersistentDisk"])
def test_a_virtual_drive_is_no_hard_disk_however_fast_it_is_today(model: str | None) -> None:
    for read in (1e8, 5e9):
        drive = on(at_rates(read=read), is_rotational=True, model=model)
        assert not [problem for problem in trouble(drives=(drive,)) if "hard disk" in problem.what]
