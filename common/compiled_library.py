"""C++ of this project, compiled when it is first needed, for the processor that is there, and kept in the cache."""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from common.files.result_cache import cache_directory

# `-ffp-contract=off`: sums and products are rounded where PyTorch's are.
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC")
_COMPILE_SECONDS = 120.0


@functools.cache
def compiled_library(source: Path) -> ctypes.CDLL | None:
    """Return ``source``, one file of C++, as a library; None where there is no compiler, or it does not compile.

    It takes two seconds the first time. Compare it with PyTorch before use.
    """
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    if compiler is None:
        return None
    key = "\n".join([source.read_text(), compiler, *_FLAGS, platform.machine(), _processor_features()])
    path = cache_directory() / "kernels" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.so"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                made = Path(folder) / path.name
                command = [compiler, *_FLAGS, "-o", str(made), str(source)]
                subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_SECONDS)
                os.replace(made, path)  # whole or not at all, whoever else compiles it
        return ctypes.CDLL(str(path))
    return None


def _processor_features() -> str:
    """Return what the processor can do: a cache may be shared by machines that differ in that."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return platform.processor()
