"""Find the file system and the drive that a directory is on, as the kernel tells."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.files import Mount, mounts
from common.hardware.presets import DrivePreset, drive_preset_of

UNKNOWN_ENDURANCE = (
    "--drive-life: the warranted writes of {drives} are not known (configs/drives has those that are). "
    "Leave it out, or give any."
)
IN_MEMORY = ("tmpfs", "ramfs")
# Names of file systems, without a leading `fuse.`.
OVER_A_NETWORK = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "lustre",
    "ceph",
    "9p",
    "glusterfs",
    "beegfs",
    "gpfs",
)
# Words in the models of drives that hypervisors and clouds offer.
_VIRTUAL = ("virtual", "qemu", "vbox", "vmware", "msft", "persistentdisk", "elastic block", "xen")


@dataclass(frozen=True)
class Drive:
    """The drive behind a directory."""

    directory: Path
    # Kind of file system: `ext4`, `xfs`, `tmpfs`, `nfs4`, ...; empty where the kernel does not tell
    file_system: str
    device: str | None  # Name of the whole drive: `nvme0n1`. None where there is none, or several behind one.
    model: str | None  # Model, as the drive reports it
    is_rotational: bool
    numa_node: int | None

    @property
    def preset(self) -> DrivePreset | None:
        return drive_preset_of(self.model) if self.model else None

    @property
    def is_hard_disk(self) -> bool:
        """Whether this is known to be a hard disk. Virtual drives often claim to rotate:
        they have no model, or that of the hypervisor."""
        virtual = any(word in (self.model or "virtual").lower() for word in _VIRTUAL)
        return self.is_rotational and not virtual

    @property
    def is_in_memory(self) -> bool:
        return self.file_system in IN_MEMORY

    @property
    def is_over_a_network(self) -> bool:
        return self.file_system.removeprefix("fuse.") in OVER_A_NETWORK


def drive_of(directory: Path, sys: Path = Path("/sys"), listed: Path = Path("/proc/self/mountinfo")) -> Drive:
    """Return the drive that ``directory`` is on. ``sys`` and ``listed`` (the mounts) are for tests."""
    mount = _mount_of(directory.resolve(), listed)
    device = _whole_drive(sys, mount.device, mount.source)
    if device is None:
        return Drive(directory, mount.file_system, None, None, False, None)
    node = _text(device / "device/numa_node") or _text(device / "device/device/numa_node")
    model = _text(device / "device/model") or None
    is_rotational = _text(device / "queue/rotational") == "1"
    numa_node = int(node) if node and int(node) >= 0 else None
    return Drive(directory, mount.file_system, device.name, model, is_rotational, numa_node)


def warranted_bytes(directories: Sequence[Path]) -> int | None:
    """Return the bytes that the makers of all drives behind ``directories`` warrant; None if one is not known."""
    presets = [drive_of(path).preset for path in directories]
    known = [preset.endurance_bytes for preset in presets if preset is not None and preset.endurance_bytes]
    return sum(known) if known and len(known) == len(presets) else None


def _mount_of(directory: Path, listed: Path) -> Mount:
    best = Mount("/", "", "", "", "", "")
    for mount in mounts(listed):
        # Of equally long ones the later: it hides what was mounted there before.
        if directory.is_relative_to(mount.point) and len(mount.point) >= len(best.point):
            best = mount
    return best


def _whole_drive(sys: Path, number: str, source: str) -> Path | None:
    """Return a device's folder in /sys: the drive of a partition, or the only drive behind a volume."""
    for link in (sys / "dev/block" / number, sys / "class/block" / os.path.basename(source)):
        if number and link.exists():
            device = link.resolve()
            break
    else:
        return None
    if (device / "partition").exists():
        device = device.parent
    below = list((device / "slaves").iterdir()) if (device / "slaves").is_dir() else []
    if below:
        return _whole_drive(sys, _text(below[0].resolve() / "dev"), "") if len(below) == 1 else None
    return device


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
