"""This machine's memory, processors and GPUs, as far as this process may use them, and whether PyTorch can.

AMD's GPUs are CUDA's to PyTorch's ROCm build.
"""

import math
import os
import re
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

import psutil

from common.errors import UserError, on_one_line
from common.memory.cgroups import PROC_SELF, own_groups
from common.units import format_bytes


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
    # WSL2 has Windows' driver, and no device file of NVIDIA's
    wsl = "usr/lib/wsl/lib/libcuda.so*"
    if any(list(root.glob(pattern)) for pattern in ("proc/driver/nvidia/gpus/*", "dev/nvidia[0-9]*", wsl)):
        return True
    import torch

    return (root / "dev/kfd").exists() and torch.version.hip is not None  # not run on AMD


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
    """A GPU that PyTorch sees: of one that is divided (MIG), a slice."""

    index: int  # PyTorch's number for it, as in ``torch.device("cuda", index)``
    uuid: str  # Identifier: `GPU-` and a UUID
    name: str  # Name, as the driver reports it: `NVIDIA GeForce RTX 4090`
    memory_bytes: int  # Bytes of all its memory, used or not


def list_gpus() -> list[Gpu]:
    """Return the GPUs that PyTorch can compute on. Starts CUDA if there is one, but takes no memory there."""
    import torch

    if not torch.cuda.is_available():
        return []
    properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [Gpu(index, f"GPU-{gpu.uuid}", gpu.name, gpu.total_memory) for index, gpu in enumerate(properties)]


def nvlink_peers() -> list[set[int]]:
    """Return for each GPU of :func:`list_gpus` which others it reaches over NVLink, switches included."""
    import pynvml

    gpus = list_gpus()
    peers: list[set[int]] = [set() for _ in gpus]
    # Without the management library, with an older driver, or of slices of GPUs: none.
    with suppress(pynvml.NVMLError), ExitStack() as stack:
        pynvml.nvmlInit()
        stack.callback(pynvml.nvmlShutdown)
        handles = [pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid) for gpu in gpus]
        for (index, handle), (other, its_handle) in permutations(enumerate(handles), 2):
            status = pynvml.nvmlDeviceGetP2PStatus(handle, its_handle, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
            if status == pynvml.NVML_P2P_STATUS_OK:
                peers[index].add(other)
    return peers


def usable_gpus() -> list[Gpu]:
    """Return the GPUs to compute on: none only where the system has none, or they are hidden on purpose."""
    gpus = list_gpus()
    if gpus or not system_has_gpu():
        return gpus
    raise UserError(
        f"This machine has a GPU, and {obstacle() or 'CUDA does not list it'}. To compute on the CPU all the same, use "
        "--gpu cpu."
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
        raise UserError(
            f"--gpu {spec}: no NVIDIA GPU was found on this machine. Use --gpu cpu to train on the CPU."
        )
    there = ", ".join(f"{gpu.index}: {gpu.name} ({format_bytes(gpu.memory_bytes)})" for gpu in gpus)
    raise UserError(
        f"--gpu {spec} is not a GPU of this machine ({there}). Give an index or part of a name, or use --gpu cpu."
    )


def _matches(spec: str, gpu: Gpu) -> bool:
    name = re.sub(r"[^a-z0-9]", "", gpu.name.lower())
    parts = re.findall(r"[a-z0-9]+", spec.lower())
    return gpu.uuid == spec or (bool(parts) and all(part in name for part in parts))


def torch_name(gpu: Gpu | None) -> str:
    """Return the name of PyTorch's device: ``"cuda:1"``, or ``"cpu"`` for None."""
    return "cpu" if gpu is None else f"cuda:{gpu.index}"


def describe_machine() -> str:
    """Describe the machine: ``4 processors, 23.5 GiB of memory (22.9 GiB available), no NVIDIA GPU``."""
    gpus = [f"{gpu.name} with {format_bytes(gpu.memory_bytes)}" for gpu in list_gpus()] or ["no NVIDIA GPU"]
    memory = (
        f"{format_bytes(memory_limit_bytes())} of memory ({format_bytes(memory_available_bytes())} available)"
    )
    return ", ".join([f"{cpu_count()} processors", memory, *gpus])
