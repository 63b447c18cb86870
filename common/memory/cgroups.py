"""The control groups of this process, which limit its memory and processors inside a container.

``/proc/meminfo`` and psutil describe the whole host, so a budget taken from them gets a container killed. A group's
limit holds for all below it; the effective one is therefore the least over the process's own group and every ancestor.
Version 1 (one hierarchy per controller) and version 2 (one for all) are both in use, sometimes side by side.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common.files import mounts

PROC_SELF = Path("/proc/self")


@dataclass(frozen=True)
class ControlGroup:
    """A control group: a directory of a cgroup file system."""

    path: Path  # The group's directory
    version: int  # Version of the hierarchy, 1 or 2: decides the names of the files inside

    def _number(self, name: str) -> int | None:
        """Return the single number in file ``name``; None where there is no such file, or it says ``max``."""
        text = _read(self.path / name).strip()
        return int(text) if text.lstrip("-").isdigit() else None

    def _table(self, name: str) -> dict[str, int]:
        """Return the ``key number`` lines in file ``name``; empty where there is no such file."""
        rows = (line.split() for line in _read(self.path / name).splitlines())
        return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}

    def memory_limit(self) -> int | None:
        """Return the bytes that this group allows, or None without a limit."""
        if self.version == 2:
            limits = [self._number("memory.max"), self._number("memory.high")]
        else:  # the second one counts ancestors above our mount point, whose files a container cannot see
            hierarchical = self._table("memory.stat").get("hierarchical_memory_limit")
            limits = [self._number("memory.limit_in_bytes"), hierarchical]
        # Version 1 writes "no limit" as the largest multiple of the page size below 2^63.
        return min((limit for limit in limits if limit is not None and limit < 2**62), default=None)

    def memory_in_use(self) -> int:
        """Return the bytes charged to this group, less the page cache that the kernel takes back on demand."""
        usage = self._number("memory.current" if self.version == 2 else "memory.usage_in_bytes") or 0
        inactive = self._table("memory.stat").get(
            "inactive_file" if self.version == 2 else "total_inactive_file", 0
        )
        return max(0, usage - inactive)

    def processors(self) -> float | None:
        """Return how many processors' time this group may use, 1.5 for instance, or None without a limit."""
        if self.version == 2:
            quota, _, period = _read(self.path / "cpu.max").strip().partition(" ")
        else:
            quota, period = (_read(self.path / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
        return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def own_groups(controller: str, proc_self: Path = PROC_SELF) -> list[ControlGroup]:
    """Return this process's group for ``controller`` ("memory", "cpu"), if any, then its ancestors up to the mount
    point."""
    membership = _membership(controller, proc_self)
    if membership is None:
        return []
    version, member_path = membership
    for root, mount_point in _mounts(controller, version, proc_self):
        # The membership is a path in the whole hierarchy, of which a container may have mounted a part only.
        inside = os.path.relpath(member_path, root)
        group = mount_point if inside.startswith("..") else mount_point / inside
        if not group.is_dir():
            group = mount_point
        above = [parent for parent in group.parents if parent.is_relative_to(mount_point)]
        return [ControlGroup(path, version) for path in (group, *above)]
    return []


def _membership(controller: str, proc_self: Path) -> tuple[int, str] | None:
    """Return the version of the hierarchy that has ``controller``, and this process's path in it."""
    unified = None
    for line in _read(proc_self / "cgroup").splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return 1, path
        if hierarchy == "0":
            unified = path
    return None if unified is None else (2, unified)


def _mounts(controller: str, version: int, proc_self: Path) -> Iterator[tuple[str, Path]]:
    """Yield (root of the mounted part, mount point) of the mounts of that hierarchy."""
    for mount in mounts(proc_self / "mountinfo"):
        if (version == 2 and mount.file_system == "cgroup2") or (
            version == 1 and mount.file_system == "cgroup" and controller in mount.options.split(",")
        ):
            yield mount.root, Path(mount.point)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
