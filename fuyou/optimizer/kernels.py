"""Compiled updates: ``kernels.cpp`` makes one pass instead of several, with the same bits.

They are compiled at first use, for this processor, by the installed C++ compiler (two seconds), and cached. Without a
compiler, or if their bits differ from PyTorch's on this machine (checked on loading), PyTorch computes alone.

A cached library is loaded only if this user or root wrote it, nobody else can, and its bytes have the SHA-256 in its
name: it is rebuilt after a crash that cut it short, and no other user's code is run.
"""

import contextlib
import ctypes
import functools
import hashlib
import math
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import torch

from common.files import cache_directory, check_regular
from common.scratch import remove_abandoned, scratch_folder
from fuyou.layout.record_parts import ADAMW, ADAMW_8BIT, BLOCK_ELEMENTS
from fuyou.optimizer.adam import AdamConfig
from fuyou.optimizer.moments import MOMENT_CODES, OptimizerStates

# `-ffp-contract=off`: sums and products are rounded where PyTorch's are.
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC")
_COMPILE_SECONDS = 120.0


COMPILERS = ("c++", "g++", "clang++")


@functools.cache
def compiled_library() -> ctypes.CDLL | str:
    """Return the compiled ``kernels.cpp``, or why there is none. A failure is remembered for this process only."""
    source = Path(__file__).with_name("kernels.cpp")
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return "there is no C++ compiler"
    # The processor's features, too: machines that differ in them may share a cache.
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    key = "\n".join([source.read_text(), compiler, *_FLAGS, platform.machine(), features])
    name = hashlib.sha256(key.encode()).hexdigest()[:24]
    folder = _private_folder(cache_directory() / "kernels")
    try:
        for path in [] if folder is None else folder.glob(f"{name}-*.so"):
            library = _load(path, path.stem.removeprefix(f"{name}-"))
            if library is not None:
                remove_abandoned(path.parent)  # of a process that was killed when it had compiled
                return library
            path.unlink(missing_ok=True)
        with scratch_folder(folder or Path(tempfile.gettempdir())) as scratch:
            unfinished = scratch / "kernels.so"
            command = [compiler, *_FLAGS, "-o", str(unfinished), str(source)]
            subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_SECONDS)
            unfinished.chmod(0o755)
            digest = hashlib.sha256(unfinished.read_bytes()).hexdigest()
            library = _load(unfinished, digest)
            if folder is not None:
                with unfinished.open("rb") as file:
                    os.fsync(file.fileno())
                os.replace(unfinished, folder / f"{name}-{digest}.so")  # another process may compile it, too
            return library or f"{unfinished} was changed"
    except subprocess.SubprocessError as error:
        return f"{compiler} fails ({_last_line(error)})"
    except OSError as error:
        return f"the compiled code cannot be stored or loaded ({error})"


def _private_folder(folder: Path) -> Path | None:
    """Make ``folder`` and return it if this user can write there and nobody else but root; else None."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if folder.stat().st_uid == os.geteuid() and folder.stat().st_mode & _OTHERS_WRITE:
            folder.chmod(0o755)  # made with a lax umask; files in it are checked one by one
        if _is_private(folder.stat()) and os.access(folder, os.W_OK):
            return folder
    return None


_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def _is_private(state: os.stat_result) -> bool:
    return state.st_uid in (0, os.geteuid()) and not state.st_mode & _OTHERS_WRITE


def _load(path: Path, digest: str) -> ctypes.CDLL | None:
    """Return the library if it can be trusted and its bytes have this SHA-256."""
    check_regular(path)
    with contextlib.ExitStack() as if_not_loaded:
        file = if_not_loaded.enter_context(path.open("rb"))
        if not _is_private(os.fstat(file.fileno())) or hashlib.sha256(file.read()).hexdigest() != digest:
            return None
        # The file that was checked, not what may have its name by now.
        library = ctypes.CDLL(f"/proc/self/fd/{file.fileno()}")
        if_not_loaded.pop_all()
        # It stays open: dlopen knows libraries by name, and the number of a closed file names another one later.
        _loaded.append(file)
        return library


_loaded: list[BinaryIO] = []  # files of this process's libraries


def _last_line(error: subprocess.SubprocessError) -> str:
    output = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip().splitlines()
    return output[-1] if output else str(error)


_SMALLEST_SHARE = 1 << 14  # Elements below which another thread costs more than it saves


class _Job(ctypes.Structure):
    """``Job`` in ``kernels.cpp``."""

    _fields_ = (
        ("count", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("parameter", "low", "gradient", "mean", "variance")),
        *((name, ctypes.c_void_p) for name in ("mean_scale", "variance_scale")),
        ("values", ctypes.c_void_p * 2),
        *((name, ctypes.c_float) for name in ("gradient_scale", "decay", "lerp", "beta2", "rest2")),
        *((name, ctypes.c_float) for name in ("root", "eps", "step")),
    )


class Kernels:
    """Compiled updates, on as many threads as PyTorch has at creation."""

    def __init__(self, library: ctypes.CDLL):
        self._functions = {name: getattr(library, f"update_{name}") for name in (ADAMW, ADAMW_8BIT)}
        self._threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self._threads, "adam") if self._threads > 1 else None

    def update(
        self,
        optimizer: str,
        states: OptimizerStates,
        gradient: torch.Tensor,
        adam: AdamConfig,
        count: int,
        scale: float,
    ) -> None:
        """Update a range as :class:`fuyou.optimizer.chunk_update.ChunkOptimizer` does.

        Args:
            states: of ``n`` parameters, a multiple of 128; split master weights, or moments in 8 bits.
            gradient: ``[n]``, not changed; bf16 next to split master weights, else fp32.
            count: number of this update of these parameters, from 1.
            scale: factor for the gradient.
        """
        assert gradient.dtype == (torch.float32 if states.low is None else torch.bfloat16)
        size = states.parameter.numel()
        function = self._functions[optimizer]
        share = max(_SMALLEST_SHARE, -(-size // (self._threads * BLOCK_ELEMENTS)) * BLOCK_ELEMENTS)
        parts = [slice(start, min(start + share, size)) for start in range(0, size, share)]
        jobs = [_job(states.part(part), gradient[part], adam, count, scale) for part in parts]
        if self._pool is None or len(jobs) == 1:
            for job in jobs:
                function(ctypes.byref(job))
        else:  # ctypes releases the interpreter lock
            list(self._pool.map(lambda job: function(ctypes.byref(job)), jobs))


def _job(states: OptimizerStates, gradient: torch.Tensor, adam: AdamConfig, count: int, scale: float) -> _Job:
    """Return a kernel's arguments; numbers are computed in double precision, as PyTorch does."""
    lr, (beta1, beta2) = adam.lr, adam.betas
    mean, variance = (moment.data_ptr() for moment in states.moments)
    scales: Sequence[int | None] = [scale.data_ptr() for scale in states.scales] or [None, None]
    job = _Job(
        count=states.parameter.numel(),
        parameter=states.parameter.data_ptr(),
        low=None if states.low is None else states.low.data_ptr(),
        gradient=gradient.data_ptr(),
        mean=mean,
        variance=variance,
        mean_scale=scales[0],
        variance_scale=scales[1],
        gradient_scale=scale,
        decay=1 - lr * adam.weight_decay,
        lerp=1 - beta1,
        beta2=beta2,
        rest2=1 - beta2,
        root=math.sqrt(1 - beta2**count),
        eps=adam.eps,
        step=-(lr / (1 - beta1**count)),
    )
    for number, code in enumerate(MOMENT_CODES):
        job.values[number] = code.values.ctypes.data
    return job
