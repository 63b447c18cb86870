"""What the machine is and can do at most: versions, and what ``finetune check`` and ``finetune profile`` say."""

import importlib.metadata
import platform
import shutil
import subprocess
from functools import partial

import torch

from gpu.journal import Check

_PACKAGES = (
    "torch", "triton", "transformers", "datasets", "peft", "accelerate", "safetensors", "numpy", "kvikio-cu13",
    "kvikio-cu12",
)  # fmt: skip


def run(check: Check) -> None:
    match check.name:
        case "versions":
            versions(check)
        case "machine":
            check.command("text", ("check", "--ssd", check.ssd))
        case "limits":
            gpu = check.settings.device.rpartition(":")[2]
            check.command("text", ("profile", "--output", check.directory("limits"), "--gpu", gpu))


def versions(check: Check) -> None:
    """Keep what explains a failure of all that follows."""
    check.note(python=platform.python_version(), kernel=platform.release())
    for name in _PACKAGES:
        check.attempt(name, partial(importlib.metadata.version, name))
    check.note(compilers=" ".join(filter(None, map(shutil.which, ("cc", "g++")))) or "none")
    if not check.cuda:
        return
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.free", "--format=csv"]
    check.attempt("driver", lambda: subprocess.run(query, capture_output=True, text=True, timeout=20).stdout)
    device = torch.device(check.settings.device)
    capability = torch.cuda.get_device_capability(device)
    check.note(
        cuda=torch.version.cuda, nccl=".".join(map(str, torch.cuda.nccl.version())), capability=list(capability),
        name=torch.cuda.get_device_name(device), built_for=" ".join(torch.cuda.get_arch_list()),
        sum=float(torch.ones(8, device=device).sum()),
    )  # fmt: skip
