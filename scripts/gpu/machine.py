"""What the machine is: GPU, driver, link, processors, memory, drive, kvikio."""

import importlib.metadata
import os
import platform
import shutil
import threading
from pathlib import Path
from typing import Any

import torch

from common.hardware.machine import (
    core_count,
    cpu_count,
    huge_pages_enabled,
    memory_available_bytes,
    memory_limit_bytes,
)
from common.store.backends import kvikio_backend
from gpu.journal import Check

PACKAGES = ("torch", "transformers", "peft", "numpy", "safetensors", "nvidia-ml-py", "kvikio-cu13", "kvikio-cu12")


def run(check: Check) -> None:
    check.note(python=platform.python_version(), kernel=platform.release(), packages=_packages())
    check.attempt("processors", _processors)
    check.attempt("memory", _memory)
    check.attempt("drive", lambda: _drive(check.ssd))
    check.attempt("kvikio", _kvikio)
    if not check.cuda:
        check.note(gpu="skipped: no CUDA")
        return
    device = torch.device(check.settings.device)
    check.attempt("gpu", lambda: _gpu(device))
    check.attempt("link", lambda: _link(device))


def _packages() -> dict[str, str]:
    answers = {}
    for name in PACKAGES:
        try:
            answers[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            answers[name] = "not installed"
    return answers


def _processors() -> dict[str, Any]:
    info = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in info if line.startswith("model name")), "unknown")
    return {"model": model, "usable": cpu_count(), "cores": core_count(), "counted_by_os": os.cpu_count()}


def _memory() -> dict[str, Any]:
    shared = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return {
        "limit_bytes": memory_limit_bytes(),
        "available_bytes": memory_available_bytes(),
        "huge_pages": huge_pages_enabled(),
        "huge_pages_shared": shared.read_text().strip() if shared.exists() else "unknown",
    }


def _drive(path: Path) -> dict[str, Any]:
    usage = shutil.disk_usage(path)
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    under = [fields for fields in mounts if path.resolve().is_relative_to(fields[1])]
    mount = max(under, key=lambda fields: len(fields[1])) if under else ["unknown"] * 4
    blocks = {}
    for block in sorted(Path("/sys/block").glob("*")):
        if not block.name.startswith(("loop", "ram", "zram")):
            model = block / "device" / "model"
            size = int((block / "size").read_text()) * 512
            blocks[block.name] = {"bytes": size, "model": model.read_text().strip() if model.exists() else ""}
    return {
        "path": str(path), "free_bytes": usage.free, "total_bytes": usage.total, "source": mount[0],
        "file_system": mount[2], "options": mount[3], "block_devices": blocks,
    }  # fmt: skip


def _kvikio() -> dict[str, Any]:
    reason = kvikio_backend.why_unavailable()
    if reason:
        return {"available": False, "why": reason}
    import kvikio
    import kvikio.cufile_driver
    import kvikio.defaults

    result: dict[str, Any] = {"available": True, "version": kvikio.__version__}
    for name, ask in {
        "compat_mode": lambda: str(kvikio.defaults.get("compat_mode")),
        # True only with the nvidia-fs module; GPUDirect over PCI peer-to-peer does not show here.
        "nvidia_fs": lambda: kvikio.cufile_driver.get("is_gds_available"),
    }.items():
        try:
            result[name] = ask()
        except Exception as error:
            result[name] = f"unknown ({error})"
    result["udev"] = Path("/run/udev").is_dir()  # without it kvikio is in compatibility mode
    return result


def _gpu(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "name": properties.name, "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count, "memory_bytes": total, "free_bytes": free,
        "uuid": str(properties.uuid), "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
        "driver": _ask_driver(device, lambda nvml, _: _text(nvml.nvmlSystemGetDriverVersion())),
    }  # fmt: skip


def _link(device: torch.device) -> dict[str, Any]:
    """Generation and width while copies keep the link awake: idle, it drops to a lower generation."""
    source = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            for _ in range(8):
                target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(device)

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    try:
        stop.wait(0.5)
        result = {}
        for name, ask in {
            "generation": lambda nvml, gpu: nvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu),
            "generation_max": lambda nvml, gpu: nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu),
            "width": lambda nvml, gpu: nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu),
            "width_max": lambda nvml, gpu: nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu),
            "received_kb_per_s": lambda nvml, gpu: nvml.nvmlDeviceGetPcieThroughput(gpu, nvml.NVML_PCIE_UTIL_RX_BYTES),
        }.items():
            result[name] = _ask_driver(device, ask)
        return result
    finally:
        stop.set()
        thread.join()


def _ask_driver(device: torch.device, ask: Any) -> Any:
    """One question to the management library about this GPU; what it cannot answer is described."""
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        return ask(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid))
    except Exception as error:
        return f"unknown ({error})"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
