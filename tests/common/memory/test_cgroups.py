"""Control groups, against small imitations of /proc and /sys/fs/cgroup as real systems show them."""

from pathlib import Path

import pytest
from capped import CappedGroup

from common.memory.cgroups import own_groups

GIB = 1 << 30
NO_LIMIT_V1 = 9223372036854771712


class Machine:
    """A /proc/self and cgroup mounts under one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.proc_self = folder / "proc"
        self.proc_self.mkdir()
        (self.proc_self / "mountinfo").write_text("24 1 0:22 / /proc rw,nosuid - proc proc rw\n")
        (self.proc_self / "cgroup").write_text("")

    def mount(self, name: str, kind: str, options: str, root: str = "/") -> Path:
        point = self.folder / name
        point.mkdir()
        with (self.proc_self / "mountinfo").open("a") as file:
            print(f"35 31 0:32 {root} {point} rw,relatime shared:9 - {kind} {kind} {options}", file=file)
        return point

    def member(self, *lines: str) -> None:
        (self.proc_self / "cgroup").write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def write(folder: Path, **files: str | int) -> None:
    """Files of one group; ``__`` in a name stands for a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_version_2_goes_from_the_own_group_to_the_top(machine: Machine) -> None:
    top = machine.mount("unified", "cgroup2", "rw,nsdelegate")
    machine.member("0::/user.slice/job")
    write(top / "user.slice", memory__max=8 * GIB, memory__high=3 * GIB, cpu__max="150000 100000")
    write(
        top / "user.slice/job", memory__max="max", memory__high="max", memory__current=2 * GIB, memory__peak=3 * GIB,
        memory__stat=f"anon 100\nfile 900\nshmem 50\ninactive_file {GIB}", memory__events="low 0\noom 2\noom_kill 1",
        cpu__max="max 100000",
    )  # fmt: skip
    own, slice_, root = own_groups("memory", machine.proc_self)
    assert (own.path, slice_.path, root.path) == (top / "user.slice/job", top / "user.slice", top)
    assert (own.memory_limit(), slice_.memory_limit(), root.memory_limit()) == (None, 3 * GIB, None)
    capped, whole = (CappedGroup(group.path, group.version) for group in (own, root))
    assert (capped.memory_in_use(), capped.memory_peak(), capped.memory_unreclaimable()) == (
        GIB,
        3 * GIB,
        150,
    )
    assert (capped.out_of_memory_kills(), whole.out_of_memory_kills()) == (1, 0)
    assert (own.processors(), slice_.processors(), root.processors()) == (None, 1.5, None)
    assert whole.memory_peak() is None


def test_version_1_next_to_version_2_takes_the_one_that_has_the_controller(machine: Machine) -> None:
    machine.mount("unified", "cgroup2", "rw")
    machine.mount("cpuset", "cgroup", "rw,cpuset")
    memory = machine.mount("memory", "cgroup", "rw,memory")
    cpu = machine.mount("cpu", "cgroup", "rw,cpu,cpuacct")
    machine.member("9:name=systemd:/", "4:memory:/jobs/a:b", "1:cpu,cpuacct:/", "0::/")
    write(
        memory / "jobs/a:b",
        memory__limit_in_bytes=NO_LIMIT_V1,
        memory__usage_in_bytes=5000,
        memory__max_usage_in_bytes=7000,
        memory__stat=f"total_inactive_file 1000\ntotal_rss 10\ntotal_shmem 5\nhierarchical_memory_limit {2 * GIB}",
        memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 3",
    )
    write(memory, memory__limit_in_bytes=NO_LIMIT_V1)
    write(cpu, cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    own, jobs, root = own_groups("memory", machine.proc_self)
    assert (own.path, jobs.path, root.path) == (memory / "jobs/a:b", memory / "jobs", memory)
    assert own.memory_limit() == 2 * GIB, "an ancestor's limit shows in the own group's statistics"
    assert root.memory_limit() is None
    capped = CappedGroup(own.path, own.version)
    assert (capped.memory_in_use(), capped.memory_peak(), capped.memory_unreclaimable()) == (4000, 7000, 15)
    assert capped.out_of_memory_kills() == 3
    assert [group.processors() for group in own_groups("cpu", machine.proc_self)] == [None]
    write(cpu, cpu__cfs_quota_us=250000)
    assert own_groups("cpu", machine.proc_self)[0].processors() == 2.5


def test_a_container_that_sees_the_hosts_paths(machine: Machine) -> None:
    # As docker mounts version 1: membership names the host's path, the mount shows only the part below it.
    memory = machine.mount("memory", "cgroup", "ro,memory", root="/docker/c0ffee")
    machine.member("4:memory:/docker/c0ffee/inner")
    write(memory / "inner", memory__limit_in_bytes=GIB)
    assert [group.path for group in own_groups("memory", machine.proc_self)] == [memory / "inner", memory]


@pytest.mark.parametrize("path", ["/elsewhere/job", "/../../outside", "/gone"])
def test_a_path_outside_the_mount_falls_back_to_its_top(machine: Machine, path: str) -> None:
    top = machine.mount("unified", "cgroup2", "rw", root="/" if path == "/gone" else "/here")
    machine.member(f"0::{path}")
    assert [group.path for group in own_groups("memory", machine.proc_self)] == [top]
