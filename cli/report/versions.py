"""Versions of everything that has a say in a run's result, for its description and for bug reports."""

import platform
from importlib.metadata import PackageNotFoundError, version

LIBRARIES = ("torch", "transformers", "peft", "safetensors", "tokenizers", "datasets", "accelerate", "numpy", "kvikio")


def versions() -> dict[str, str]:
    """Return versions by name, ``-`` for what is not installed, without importing any library."""
    kvikio = next((name for name in ("kvikio-cu13", "kvikio-cu12") if _version(name) != "-"), "kvikio")
    return {
        "fuyou": _version("fuyou"),
        "Python": platform.python_version(),
        **{name: _version(kvikio if name == "kvikio" else name) for name in LIBRARIES},
        "system": platform.platform(),
        "NVIDIA driver": nvidia_driver() or "-",
    }


def nvidia_driver() -> str | None:
    """Return the version of the NVIDIA driver; None without one."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "-"
