"""Host memory on the same NUMA node as the GPU that copies from it: another node's lies behind a slower link."""

import contextlib
import ctypes
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""Number of the system call ``set_mempolicy``; the C library has no function for it."""
_DEFAULT, _PREFERRED = 0, 1


def node_of(device: torch.device) -> int | None:
    """Return the NUMA node that ``device`` is attached to; None for the CPU and where the kernel does not tell."""
    if device.type != "cuda":
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    bus_id = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    try:
        node = int(Path(f"/sys/bus/pci/devices/{bus_id}/numa_node").read_text())
    except OSError:
        return None
    return node if node >= 0 else None


@contextlib.contextmanager
def prefer(node: int | None) -> Iterator[None]:
    """Have pages that this thread first touches come from ``node`` while it has any. No effect where not allowed."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if node is None or number is None:
        yield
        return
    system_call = ctypes.CDLL(None, use_errno=True).syscall
    mask = ctypes.c_ulong(1 << node)
    system_call(number, _PREFERRED, ctypes.byref(mask), ctypes.c_ulong(8 * ctypes.sizeof(mask)))
    try:
        yield
    finally:
        system_call(number, _DEFAULT, None, ctypes.c_ulong(0))
