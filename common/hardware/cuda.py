"""Whether PyTorch can use the GPUs that the system has, and if not, why. AMD's are CUDA's to PyTorch's ROCm build."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

from common.errors import on_one_line

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
    """Return whether the kernel's NVIDIA driver, or AMD's with a PyTorch for it, has a GPU that CUDA_VISIBLE_DEVICES
    does not hide from everybody."""
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
