"""What the machine has: limits from control groups, and which GPU a word means."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from common.errors import UserError
from common.hardware import machine as hardware
from common.hardware.machine import Gpu
from fuyou.runtime.device import open_device

GIB = 1 << 30


@pytest.fixture
def capped(tmp_path: Path) -> Path:
    """A /proc/self in a group limited to 100 MiB, of which 60 are in use, 20 of them yielding, and 1.2 processors."""
    group = tmp_path / "cgroup/job"
    group.mkdir(parents=True)
    (tmp_path / "mountinfo").write_text(f"35 31 0:32 / {tmp_path / 'cgroup'} rw - cgroup2 cgroup2 rw\n")
    (tmp_path / "cgroup_").write_text("")
    proc = tmp_path / "proc"
    proc.mkdir()
    (tmp_path / "mountinfo").rename(proc / "mountinfo")
    (proc / "cgroup").write_text("0::/job\n")
    (group / "memory.max").write_text(f"{100 << 20}\n")
    (group / "memory.current").write_text(f"{60 << 20}\n")
    (group / "memory.stat").write_text(f"inactive_file {20 << 20}\n")
    (group / "cpu.max").write_text("120000 100000\n")
    return proc


def test_a_control_group_bounds_what_the_host_has(capped: Path) -> None:
    assert hardware.memory_limit_bytes(capped) == 100 << 20
    assert hardware.memory_available_bytes(capped) == 60 << 20
    assert hardware.cpu_count(capped) == min(2, len(os.sched_getaffinity(0)))


def test_without_groups_the_host_is_the_limit(tmp_path: Path) -> None:
    assert hardware.memory_limit_bytes(tmp_path) == psutil.virtual_memory().total
    assert hardware.memory_available_bytes(tmp_path) <= psutil.virtual_memory().total
    assert hardware.cpu_count(tmp_path) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("pairs", "cores"), [(1, 8), (2, 4)])
def test_hyperthreads_of_a_core_count_once(
    pairs: int, cores: int, tmp_path: Path, capped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(1, 9)))
    for number in range(10):
        place = tmp_path / f"cpu{number}/topology"
        place.mkdir(parents=True)
        first = (number - 1) // pairs
        (place / "thread_siblings_list").write_text(f"{first},{first + 10}\n")
    assert hardware.core_count(tmp_path, tmp_path) == cores
    assert hardware.core_count(capped, tmp_path) == 2  # a control group's share of time
    assert hardware.core_count(tmp_path, tmp_path / "nothing") == 8


@pytest.mark.parametrize(("text", "enabled"), [
    ("always [madvise] never", True),
    ("[always] madvise never", True),
    ("always madvise [never]", False),
    (None, False),
])  # fmt: skip
def test_huge_pages(tmp_path: Path, text: str | None, enabled: bool) -> None:
    switch = tmp_path / "enabled"
    if text is not None:
        switch.write_text(text)
    assert hardware.huge_pages_enabled(switch) is enabled


class FakeDriver:
    """Stands in for the management library: three GPUs, in bus order."""

    NVMLError = type("NVMLError", (Exception,), {})

    NVML_DEVICE_MIG_ENABLE = 1

    def __init__(self) -> None:
        self.gpus = [
            ("GPU-aaaa-1", b"NVIDIA GeForce RTX 4090", 24, "00000000:01:00.0"),
            ("GPU-aabb-2", "NVIDIA A100-SXM4-80GB", 80, "00000000:65:00.0"),
            (b"GPU-cccc-3", "NVIDIA GeForce RTX 3090", 24, "0000000A:B1:00.0"),
        ]
        self.open = 0
        self.slices: dict[str, list[tuple | None]] = {}
        """Slices of each GPU in MIG mode, by its UUID."""

    def nvmlDeviceGetMigMode(self, handle: tuple) -> tuple[int, int]:
        if handle[0] != "GPU-aabb-2":
            raise self.NVMLError("not supported")
        enabled = int(handle[0] in self.slices)
        return enabled, enabled

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: tuple) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: tuple, index: int) -> tuple:
        there = self.slices[handle[0]]
        found = there[index] if index < len(there) else None
        if found is None:
            raise self.NVMLError("not found")
        return found

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> tuple:
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> tuple:
        if uuid != "MIG-dddd":
            raise self.NVMLError(uuid)
        return (uuid, "NVIDIA A100-SXM4-80GB MIG 1g.10gb", 10, None)

    def nvmlDeviceGetUUID(self, handle: tuple) -> str | bytes:
        return handle[0]

    def nvmlDeviceGetName(self, handle: tuple) -> str | bytes:
        return handle[1]

    def nvmlDeviceGetMemoryInfo(self, handle: tuple) -> SimpleNamespace:
        if handle[2] is None:
            raise self.NVMLError("insufficient permissions")
        return SimpleNamespace(total=handle[2] * GIB)

    def nvmlDeviceGetPciInfo(self, handle: tuple) -> SimpleNamespace:
        if handle[3] is None:
            raise self.NVMLError("not supported")
        return SimpleNamespace(busId=handle[3])


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return fake


@pytest.fixture
def no_driver(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise driver.NVMLError("Driver Not Loaded")

    monkeypatch.setattr(driver, "nvmlInit", fail)


def names() -> list[str]:
    return [gpu.name.rpartition(" ")[2] for gpu in hardware.list_gpus()]


def test_lists_what_the_driver_knows(driver: FakeDriver) -> None:
    first, _, last = hardware.list_gpus()
    assert first == Gpu(0, "GPU-aaaa-1", "NVIDIA GeForce RTX 4090", 24 * GIB, "0000:01:00.0", first.numa_node)
    assert (last.index, last.uuid, last.pci_bus_id, last.numa_node) == (2, "GPU-cccc-3", "000a:b1:00.0", None)
    assert driver.open == 0, "the library is closed again"


@pytest.mark.parametrize(("visible", "seen"), [
    ("2,0", ["3090", "4090"]),
    ("", []),
    ("-1", []),
    ("1,7,0", ["A100-SXM4-80GB"]),
    ("GPU-cccc,0", ["3090", "4090"]),
    ("GPU-aa", []),
    ("MIG-dddd", ["1g.10gb"]),
    ("MIG-none,0", []),
])  # fmt: skip
def test_visible_devices_hide_and_order(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, visible: str, seen: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert names() == seen
    assert [gpu.index for gpu in hardware.list_gpus()] == list(range(len(seen)))


def test_a_divided_gpu_is_its_first_slice(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    slices = [None, ("MIG-eeee", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", 40, None), ("MIG-ffff", "other", 20, None)]
    driver.slices = {"GPU-aabb-2": slices}
    assert names() == ["4090", "3g.40gb", "3090"]
    one = hardware.list_gpus()[1]
    assert (one.uuid, one.memory_bytes, one.pci_bus_id, one.numa_node) == ("MIG-eeee", 40 * GIB, "", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid="aabb-2"))
    assert hardware.torch_index(one) == 0, "CUDA may call a slice by the whole GPU's UUID"
    driver.slices = {"GPU-aabb-2": []}
    assert names() == ["4090", "3090"], "without slices nothing can be computed there"


@pytest.mark.parametrize(("spec", "index"), [
    ("auto", 0),
    ("cpu", None),
    ("CPU", None),
    ("0", 0),
    ("2", 2),
    ("4090", 0),
    ("3090", 2),
    ("rtx-3090", 2),
    ("RTX4090", 0),
    ("a100", 1),
    ("a100-80g", 1),
    ("GPU-cccc-3", 2),
    ("geforce", 0),
])  # fmt: skip
def test_picks_the_gpu_that_is_meant(driver: FakeDriver, spec: str, index: int | None) -> None:
    picked = hardware.pick_gpu(spec)
    assert (picked.index if picked else None) == index


@pytest.mark.parametrize("spec", ["3", "h100", "5090", "", "-", "40 90x"])
def test_no_such_gpu_says_which_there_are(driver: FakeDriver, spec: str) -> None:
    with pytest.raises(UserError) as caught:
        hardware.pick_gpu(spec)
    for part in ("0: NVIDIA GeForce RTX 4090 (24 GiB)", "1: NVIDIA A100", "2: NVIDIA GeForce RTX 3090", "device cpu"):
        assert part in str(caught.value)


@pytest.mark.usefixtures("no_driver")
def test_without_a_driver_there_is_the_cpu() -> None:
    assert hardware.list_gpus() == []
    assert hardware.pick_gpu("auto") is None
    assert hardware.pick_gpu("cpu") is None
    with pytest.raises(UserError, match=r"device 4090: no NVIDIA GPU was found.*device cpu"):
        hardware.pick_gpu("4090")
    assert "no NVIDIA GPU" in hardware.describe_machine()


TOO_OLD = "The NVIDIA driver on your system is too old (found version 12040)."


@pytest.mark.parametrize("spec", ["auto", "4090"])
@pytest.mark.parametrize(("built", "cause"), [(False, "is a build without CUDA"), (True, "is too old .found version")])
def test_why_a_gpu_cannot_be_used_is_named(
    built: bool, cause: str, spec: str, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU is never taken without a word."""

    def fail() -> None:
        raise RuntimeError(TOO_OLD)

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fail)
    with pytest.raises(UserError, match=f"has NVIDIA GeForce RTX 4090, and .*{cause}.*device cpu"):
        hardware.pick_gpu(spec)
    with pytest.raises(UserError, match=f"no device cuda:0 here: .*{cause}"):
        open_device("cuda:0")
    assert hardware.pick_gpu("cpu") is None


@pytest.mark.usefixtures("no_driver")
def test_a_container_without_nvml_takes_what_pytorch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "system_has_gpu", lambda: True)
    monkeypatch.setattr(hardware, "gpus_by_pytorch", lambda: [("aaaa-1", "NVIDIA GeForce RTX 4090", 24 * GIB, "")])
    assert hardware.pick_gpu("auto") == Gpu(0, "GPU-aaaa-1", "NVIDIA GeForce RTX 4090", 24 * GIB, "", None)
    monkeypatch.setattr(hardware, "gpus_by_pytorch", list)
    with pytest.raises(UserError, match="has an NVIDIA GPU, and CUDA does not list it"):
        hardware.pick_gpu("auto")


@pytest.mark.parametrize("file", ["proc/driver/nvidia/gpus/0000:01:00.0", "dev/nvidia0", "dev/nvidiactl", None])
@pytest.mark.parametrize("visible", [None, "0", "GPU-1", "", "-1", "NoDevFiles"])
def test_a_gpu_that_the_system_has(
    visible: str | None, file: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if file is not None:
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).touch()
    there = file is not None and not file.endswith("ctl")
    assert hardware.system_has_gpu(tmp_path) == (there and visible in (None, "0", "GPU-1"))


def test_pytorch_is_queried_in_a_separate_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert hardware.gpus_by_pytorch() == []  # and the command runs: it reports it, rather than failing
    assert subprocess.run([sys.executable, "-c", hardware._DESCRIBE], capture_output=True, text=True).stdout == "[]\n"


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, cause in (("cuda:7", "PyTorch sees 2, from cuda:0 on"), ("mps", "a CPU or an NVIDIA GPU")):
        with pytest.raises(UserError, match=f"no device {name} here: .*{cause}"):
            open_device(name)


def test_a_build_without_kernels_for_a_gpu_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

    monkeypatch.setattr(torch, "ones", fail)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Tesla P100")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90"])
    monkeypatch.setattr("fuyou.runtime.device.obstacle", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(
        UserError, match=r"P100 runs no kernel of this PyTorch .*no kernel image.*built for sm_75 sm_90"
    ):
        open_device("cuda:0")


def test_pytorchs_own_order_is_matched_by_uuid(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    order = ["aabb-2", "aaaa-1"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(order))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=order[i]))
    rtx_4090, a100, rtx_3090 = hardware.list_gpus()
    assert (hardware.torch_index(rtx_4090), hardware.torch_index(a100)) == (1, 0)
    with pytest.raises(UserError, match="CUDA_DEVICE_ORDER"):
        hardware.torch_index(rtx_3090)


@pytest.mark.cuda
def test_a_real_gpu_is_found_on_both_sides() -> None:
    gpu = hardware.pick_gpu("auto")
    assert gpu is not None
    properties = torch.cuda.get_device_properties(hardware.torch_index(gpu))
    assert properties.name == gpu.name
    assert properties.total_memory == pytest.approx(gpu.memory_bytes, rel=0.05)
