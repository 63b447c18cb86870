"""This machine's memory, processors and GPUs, as far as this process may use them, and whether PyTorch can.

AMD's GPUs are CUDA's to PyTorch's ROCm build.
"""

import functools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from common.errors import UserError, on_one_line
from common.memory.cgroups import PROC_SELF, own_groups
from common.units import format_bytes

_DESCRIBE = (
    "import json, torch; print(json.dumps([[str(gpu.uuid), gpu.name, gpu.total_memory, "
    "'%04x:%02x:%02x.0' % (gpu.pci_domain_id, gpu.pci_bus_id, gpu.pci_device_id)] "
    "for gpu in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))]))"
)
_PATIENCE_SECONDS = 120


def obstacle() -> str | None:
    """Return why PyTorch cannot use an NVIDIA GPU, as the end of a sentence; None where it can."""
    import torch

    if not torch.backends.cuda.is_built():
        return f"this PyTorch ({torch.__version__}) is a build without CUDA: install one with it (see pytorch.org)"
    if torch.cuda.is_available():
        return None
    try:
        torch.cuda.init()
    except Exception as error:  # a driver that is too old, a library that is missing: PyTorch names it
        return f"PyTorch cannot start CUDA: {on_one_line(error)}"
    return "PyTorch finds no CUDA device"


def system_has_gpu(root: Path = Path("/")) -> bool:
    """Return whether the kernel has an NVIDIA GPU, or AMD's with a PyTorch for it, that is not hidden from everyone."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.strip().startswith(("0", *"123456789", "GPU-", "MIG-")):
        return False
    if any(list(root.glob(pattern)) for pattern in ("proc/driver/nvidia/gpus/*", "dev/nvidia[0-9]*")):
        return True
    return (root / "dev/kfd").exists() and _is_for_rocm()  # not run on AMD


def _is_for_rocm() -> bool:
    import torch

    return torch.version.hip is not None


def gpus_by_pytorch() -> list[tuple[str, str, int, str]]:
    """Return UUID, name, bytes of memory and PCI address of the GPUs that PyTorch sees, in its order.

    For containers without the driver's management library. A separate process looks, as PyTorch starts CUDA for it.
    """
    return _gpus_by_pytorch(os.environ.get("CUDA_VISIBLE_DEVICES"))


@functools.cache
def _gpus_by_pytorch(_: str | None) -> list[tuple[str, str, int, str]]:
    try:
        command = [sys.executable, "-c", _DESCRIBE]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=True)
        return [tuple(gpu) for gpu in json.loads(done.stdout)]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def memory_limit_bytes(proc_self: Path = PROC_SELF) -> int:
    """Return the host memory that this process may use: all of it, or a control group's limit if that is less."""
    limits = [group.memory_limit() for group in own_groups("memory", proc_self)]
    return min([psutil.virtual_memory().total, *(limit for limit in limits if limit is not None)])


def memory_available_bytes(proc_self: Path = PROC_SELF) -> int:
    """Return the host memory that this process can still take; page cache that can be dropped counts as available."""
    rooms = [psutil.virtual_memory().available]
    for group in own_groups("memory", proc_self):
        limit = group.memory_limit()
        if limit is not None:
            rooms.append(limit - group.memory_in_use())
    return max(0, min(rooms))


def cpu_count(proc_self: Path = PROC_SELF) -> int:
    """Return how many processors this process may use: its affinity, or a control group's share of time rounded up."""
    shares = [group.processors() for group in own_groups("cpu", proc_self)]
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([affinity, *(math.ceil(share) for share in shares if share is not None)]))


def core_count(proc_self: Path = PROC_SELF, devices: Path = Path("/sys/devices/system/cpu")) -> int:
    """Return how many whole cores this process may use: hyperthreads of one core count once, where that is known."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    try:
        cores = {(devices / f"cpu{number}/topology/thread_siblings_list").read_text() for number in usable}
    except OSError:
        return cpu_count(proc_self)
    return min(len(cores), cpu_count(proc_self))


def huge_pages_enabled(switch: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled")) -> bool:
    """Return whether private memory gets huge pages by ``madvise(MADV_HUGEPAGE)``."""
    try:
        return "[never]" not in switch.read_text()
    except OSError:
        return False


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU that CUDA programs started from here would see."""

    # Place among the visible GPUs: in CUDA_VISIBLE_DEVICES' order, else in that of the PCI bus, as in nvidia-smi.
    # PyTorch may count differently ("fastest first"): see :func:`torch_index`.
    index: int
    uuid: str  # Identifier: `GPU-` and a UUID, or `MIG-` and a UUID for a slice of one
    name: str  # Name, as the driver reports it: `NVIDIA GeForce RTX 4090`
    memory_bytes: int  # Bytes of all its memory, used or not; 0 where the driver does not tell this user
    pci_bus_id: str  # Address in /sys/bus/pci/devices: `0000:65:00.0`. Empty where the driver does not tell.
    numa_node: int | None  # Host memory node that it is attached to; None where the kernel does not tell


def list_gpus() -> list[Gpu]:
    """Return the NVIDIA GPUs that CUDA_VISIBLE_DEVICES does not hide; empty without a driver.

    They are those of the driver's management library, which neither starts CUDA nor takes memory on a GPU. In a
    container without it, they are PyTorch's.
    """
    with _driver() as handles:
        if handles is not None:
            return [_describe(index, handle) for index, handle in enumerate(handles)]
    properties = gpus_by_pytorch() if system_has_gpu() else []
    return [
        Gpu(index, f"GPU-{uuid}", name, nbytes, bus_id, _numa_node(bus_id))
        for index, (uuid, name, nbytes, bus_id) in enumerate(properties)
    ]


def nvlink_peers() -> list[set[int]]:
    """Return for each GPU of :func:`list_gpus` which others it reaches over NVLink, switches included."""
    with _driver() as handles:
        return [
            {index for index, other in enumerate(handles or ()) if other is not handle and _over_nvlink(handle, other)}
            for handle in handles or ()
        ]


@contextmanager
def _driver() -> Iterator[list[Any] | None]:
    """Yield the driver's handles of the GPUs that CUDA sees, which are good in this context; None without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield list(_visible_handles())
    finally:
        pynvml.nvmlShutdown()


def _over_nvlink(handle: Any, other: Any) -> bool:
    import pynvml

    try:
        status = pynvml.nvmlDeviceGetP2PStatus(handle, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except pynvml.NVMLError:  # older drivers, slices of a GPU
        return False
    return bool(status == pynvml.NVML_P2P_STATUS_OK)


def _visible_handles() -> Iterator[Any]:
    """Yield the management library's handles of what CUDA sees, in its order: of a GPU in MIG mode one slice."""
    for handle in _listed_handles():
        slices = _slices(handle)
        yield from [handle] if slices is None else slices[:1]


def _slices(handle: Any) -> list[Any] | None:
    """Return the slices of a GPU in MIG mode; None for a GPU, or a slice of one, that is not divided."""
    import pynvml

    slices = []
    try:
        mode, _ = pynvml.nvmlDeviceGetMigMode(handle)
        if mode != pynvml.NVML_DEVICE_MIG_ENABLE:
            return None
        count = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except pynvml.NVMLError:  # GPUs without such a mode, and slices themselves
        return None
    for index in range(count):
        with suppress(pynvml.NVMLError):  # not every place is taken
            slices.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
    return slices


def _listed_handles() -> Iterator[Any]:
    """Yield the management library's handles, in CUDA_VISIBLE_DEVICES' order, up to the first bad entry, like CUDA."""
    import pynvml

    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        yield from handles
        return
    for entry in (entry.strip() for entry in visible.split(",")):
        if entry.isdigit() and int(entry) < len(handles):
            yield handles[int(entry)]
            continue
        try:
            if entry.startswith("MIG-"):
                yield pynvml.nvmlDeviceGetHandleByUUID(entry)
                continue
        except pynvml.NVMLError:
            return
        named = [handle for handle in handles if entry and _text(pynvml.nvmlDeviceGetUUID(handle)).startswith(entry)]
        if len(named) != 1:
            return
        yield named[0]


def _describe(index: int, handle: Any) -> Gpu:
    import pynvml

    try:
        # The library writes the PCI domain with eight digits, the kernel with four.
        bus_id = _text(pynvml.nvmlDeviceGetPciInfo(handle).busId).lower()[-12:]
    except pynvml.NVMLError:
        bus_id = ""
    try:
        nbytes = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except pynvml.NVMLError:  # a divided GPU's is its administrator's to know
        nbytes = 0
    uuid, name = _text(pynvml.nvmlDeviceGetUUID(handle)), _text(pynvml.nvmlDeviceGetName(handle))
    return Gpu(index, uuid, name, nbytes, bus_id, _numa_node(bus_id))


def _numa_node(bus_id: str) -> int | None:
    try:
        node = int(Path(f"/sys/bus/pci/devices/{bus_id}/numa_node").read_text())
    except OSError:
        return None
    return node if node >= 0 else None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def usable_gpus() -> list[Gpu]:
    """Return the GPUs to compute on: none only where the system has none, or they are hidden on purpose."""
    gpus = list_gpus()
    if not gpus and not system_has_gpu():
        return []
    why = obstacle()
    if why is None and gpus:
        return gpus
    raise UserError(
        f"This machine has {gpus[0].name if gpus else 'an NVIDIA GPU'}, and {why or 'CUDA does not list it'}. To "
        "compute on the CPU all the same, use --gpu cpu."
    )


def pick_gpu(spec: str) -> Gpu | None:
    """Return the GPU meant by ``--gpu auto|cpu|NAME|INDEX``; None stands for the CPU.

    ``auto`` is the first GPU, or the CPU where the system has none. One or two digits are an index; all
    else is part of a name, in any case and with any punctuation: ``4090``, ``rtx-4090``, ``A100-80G``. A UUID will do.

    Raises:
        UserError: if there is no such GPU (lists the existing ones), or PyTorch cannot use it (says why).
    """
    spec = spec.strip()
    if spec.lower() == "cpu":
        return None
    gpus = usable_gpus()
    if spec.lower() == "auto":
        return gpus[0] if gpus else None
    for gpu in gpus:
        if str(gpu.index) == spec if re.fullmatch(r"\d{1,2}", spec) else _matches(spec, gpu):
            return gpu
    if not gpus:
        raise UserError(f"--gpu {spec}: no NVIDIA GPU was found on this machine. Use --gpu cpu to train on the CPU.")
    there = ", ".join(f"{gpu.index}: {gpu.name} ({format_bytes(gpu.memory_bytes)})" for gpu in gpus)
    raise UserError(
        f"--gpu {spec} is not a GPU of this machine ({there}). Give an index or part of a name, or use --gpu cpu."
    )


def _matches(spec: str, gpu: Gpu) -> bool:
    name = re.sub(r"[^a-z0-9]", "", gpu.name.lower())
    parts = re.findall(r"[a-z0-9]+", spec.lower())
    return gpu.uuid == spec or (bool(parts) and all(part in name for part in parts))


def torch_index(gpu: Gpu) -> int:
    """Return PyTorch's number for ``gpu``, as in ``torch.device("cuda", number)``, or refuse. Starts CUDA."""
    import torch

    seen = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    number = seen.get(gpu.uuid.partition("-")[2])
    if number is None and gpu.uuid.startswith("MIG-") and len(seen) == 1:
        return 0  # a process sees one slice, which some versions of CUDA call by the whole GPU's UUID
    if number is None:
        raise UserError(
            f"PyTorch does not see {gpu.name} ({gpu.uuid}), it sees {len(seen)} other GPUs. If CUDA_VISIBLE_DEVICES "
            "is set, name the GPU there by its UUID, or set CUDA_DEVICE_ORDER=PCI_BUS_ID so that CUDA counts as "
            "nvidia-smi does."
        )
    return number


def torch_name(gpu: Gpu | None) -> str:
    """Return the name of PyTorch's device: ``"cuda:1"``, or ``"cpu"`` for None."""
    return "cpu" if gpu is None else f"cuda:{torch_index(gpu)}"


def describe_machine() -> str:
    """Describe the machine: ``4 processors, 23.5 GiB of memory (22.9 GiB available), no NVIDIA GPU``."""
    gpus = [f"{gpu.name} with {format_bytes(gpu.memory_bytes)}" for gpu in list_gpus()] or ["no NVIDIA GPU"]
    memory = f"{format_bytes(memory_limit_bytes())} of memory ({format_bytes(memory_available_bytes())} available)"
    return ", ".join([f"{cpu_count()} processors", memory, *gpus])
