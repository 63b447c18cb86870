"""What the machine has: limits from control groups, and which GPU a word means."""

import os
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


GPUS = [
    ("aaaa-1", "NVIDIA GeForce RTX 4090", 24),
    ("aabb-2", "NVIDIA A100-SXM4-80GB", 80),
    ("cccc-3", "NVIDIA GeForce RTX 3090", 24),
]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def properties(index: int) -> SimpleNamespace:
        uuid, name, gib = GPUS[index]
        return SimpleNamespace(uuid=uuid, name=name, total_memory=gib * GIB)

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(GPUS))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)


@pytest.mark.usefixtures("gpus")
def test_lists_what_pytorch_sees() -> None:
    first, _, last = hardware.list_gpus()
    assert first == Gpu(0, "GPU-aaaa-1", "NVIDIA GeForce RTX 4090", 24 * GIB)
    assert hardware.torch_name(last) == "cuda:2"


class FakeNvml:
    """Stands in for the management library: the first and the last GPU are linked."""

    NVMLError = type("NVMLError", (Exception,), {})
    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 0
    failing, open = "", 0

    def __getattr__(self, name: str) -> object:
        def call(*arguments: object) -> object:
            if name == self.failing:
                raise self.NVMLError(name)
            self.open += {"nvmlInit": 1, "nvmlShutdown": -1}.get(name, 0)
            if name == "nvmlDeviceGetP2PStatus":
                return int("GPU-aabb-2" in arguments)
            return arguments[0] if arguments else None

        return call


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("failing", ["", "nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetP2PStatus"])
def test_links_between_gpus(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    nvml.failing = failing
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    assert hardware.nvlink_peers() == ([set()] * 3 if failing else [{2}, set(), {0}])
    assert nvml.open == 0, "the library is closed again"


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
@pytest.mark.usefixtures("gpus")
def test_picks_the_gpu_that_is_meant(spec: str, index: int | None) -> None:
    picked = hardware.pick_gpu(spec)
    assert (picked.index if picked else None) == index


@pytest.mark.parametrize("spec", ["3", "h100", "5090", "", "-", "40 90x"])
@pytest.mark.usefixtures("gpus")
def test_no_such_gpu_says_which_there_are(spec: str) -> None:
    with pytest.raises(UserError) as caught:
        hardware.pick_gpu(spec)
    for part in (
        "0: NVIDIA GeForce RTX 4090 (24 GiB)",
        "1: NVIDIA A100",
        "2: NVIDIA GeForce RTX 3090",
        "device cpu",
    ):
        assert part in str(caught.value)


def test_without_a_driver_there_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(hardware, "system_has_gpu", lambda: False)
    assert hardware.list_gpus() == []
    assert hardware.pick_gpu("auto") is None
    assert hardware.pick_gpu("cpu") is None
    with pytest.raises(UserError, match=r"device 4090: no NVIDIA GPU was found.*device cpu"):
        hardware.pick_gpu("4090")
    assert "no NVIDIA GPU" in hardware.describe_machine()


TOO_OLD = "The NVIDIA driver on your system is too old (found version 12040)."


@pytest.mark.parametrize("spec", ["auto", "4090"])
@pytest.mark.parametrize(
    ("built", "cause"), [(False, "is a build without CUDA"), (True, "is too old .found version")]
)
def test_why_a_gpu_cannot_be_used_is_named(
    built: bool, cause: str, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU is never taken without a word."""

    def fail() -> None:
        raise RuntimeError(TOO_OLD)

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fail)
    monkeypatch.setattr(hardware, "system_has_gpu", lambda: True)
    with pytest.raises(UserError, match=f"has a GPU, and .*{cause}.*device cpu"):
        hardware.pick_gpu(spec)
    with pytest.raises(UserError, match=f"no device cuda:0 here: .*{cause}"):
        open_device("cuda:0")
    assert hardware.pick_gpu("cpu") is None


@pytest.mark.parametrize("file", [
    "proc/driver/nvidia/gpus/0000:01:00.0", "dev/nvidia0", "usr/lib/wsl/lib/libcuda.so.1", "dev/nvidiactl", None
])  # fmt: skip
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


@pytest.mark.cuda
def test_a_real_gpu_is_found_on_both_sides() -> None:
    gpu = hardware.pick_gpu("auto")
    assert gpu is not None
    properties = torch.cuda.get_device_properties(hardware.torch_name(gpu))
    assert properties.name == gpu.name
