"""Each call to the operating system and to CUDA fails once: one message, nothing left behind, and the run continues."""

import errno
import gc
import mmap
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

import fuyou
from common.errors import FinetuneError
from common.models.checkpoint import writer
from tests.helpers.accelerator import QueuedDevice
from tests.helpers.small_engine import small_engine, train

PRODUCT = tuple(str(Path(fuyou.__file__).parents[1] / package) + os.sep for package in ("fuyou", "common"))
CALLS = (
    "open", "preadv", "pwritev", "write", "fdatasync", "fsync", "posix_fallocate", "replace", "rename", "unlink",
    "mkdir", "rmdir", "chmod", "ftruncate", "dup", "memfd_create", "scandir", "listdir", "fstat",
)  # fmt: skip


Call = tuple[str, int]
"""A function's name, and which of its calls: threads make them in another order each time."""


class SystemCalls:
    """Counts what this process asks of the system from the product's code, and lets one of these calls fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: QueuedDevice) -> None:
        self.seen: Counter[str] = Counter()
        self._target: Call | None = None
        self._lock, self._process = threading.Lock(), os.getpid()
        for name in CALLS:
            monkeypatch.setattr(os, name, self._counted(name, getattr(os, name)))
        monkeypatch.setattr(mmap, "mmap", self._counted("mmap", mmap.mmap))
        monkeypatch.setattr(writer, "write_new_file", self._counted("write_new_file", writer.write_new_file))
        assert device.cudart is not None
        register = device.cudart.cudaHostRegister

        def cuda_host_register(*arguments: Any) -> int:
            assert device.cudart is not None
            return device.cudart._refused(2) if self._fails("cudaHostRegister") else register(*arguments)

        monkeypatch.setattr(device.cudart, "cudaHostRegister", cuda_host_register)

    @contextmanager
    def failing(self, target: "Call | None") -> Iterator[None]:
        """Let this call fail; None: none."""
        self.seen, self._target = Counter(), target
        try:
            yield
        finally:
            self._target = None

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if self._is_ours(sys._getframe(1)) and self._fails(name):
                raise OSError(errno.EIO, os.strerror(errno.EIO), name)
            return function(*arguments, **options)

        return call

    def _is_ours(self, frame: Any) -> bool:
        """Return whether the product has called, at most a few functions of Python between."""
        for _ in range(5):
            if frame is None or os.getpid() != self._process:
                return False
            if frame.f_code.co_filename.startswith(PRODUCT):
                return True
            frame = frame.f_back
        return False

    def _fails(self, name: str) -> bool:
        with self._lock:
            self.seen[name] += 1
            return self._target == (name, self.seen[name])


def held() -> tuple[list[str], set[str], list[int]]:
    """Return what this process has open, its threads, and its children."""
    gc.collect()
    targets = []
    for descriptor in Path("/proc/self/fd").iterdir():
        if os.path.lexists(descriptor):
            targets.append(os.readlink(descriptor))
    threads = {
        thread.name for thread in threading.enumerate() if thread.name.startswith(("fuyou", "memory-meter"))
    }
    return sorted(targets), threads, [child.pid for child in psutil.Process().children(recursive=True)]


def sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: Callable[[Counter[str]], list[Call]]
) -> Counter[str]:
    """Let chosen calls of a short life fail, one in each; return how often it ended in which way."""
    device = QueuedDevice(protects=False).install(monkeypatch)
    device.pageable = True
    calls, out, ways = SystemCalls(monkeypatch, device), tmp_path / "out", Counter[str]()

    def live(ssd: Path, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
        with small_engine(ssd, lr=1e-3, prove=False, host_cache=0, **options) as engine:
            losses = train(engine, 3 - engine.step_count)
            engine.save_pretrained(out)
        return losses, load_file(out / "model.safetensors")

    (tmp_path / "first").mkdir()
    with calls.failing(None):
        losses, weights = live(tmp_path / "first")
    targets, before = chosen(calls.seen), held()
    for number, target in enumerate(targets):
        ssd, failure = tmp_path / str(number), None
        ssd.mkdir()
        try:
            with calls.failing(target):
                live(ssd)
        except (FinetuneError, OSError) as error:
            failure = type(error), str(error)  # not the error, whose frames hold buffers
        if failure is not None:
            assert issubclass(failure[0], FinetuneError) and len(failure[1]) > 20, (target, failure)
        assert held() == before, target
        assert device.cudart is not None and not device.cudart.registered and not device.cudart.pending, (
            target
        )
        ways["survived" if failure is None else failure[0].__name__] += 1
        print(target, failure)
        try:
            rest, saved = live(ssd, resume=True)
        except FinetuneError:  # nothing was committed yet
            rest, saved = live(ssd, overwrite=True)
            assert len(rest) == 3
        assert rest == losses[3 - len(rest) :], target
        assert all(torch.equal(saved[name], value) for name, value in weights.items()), target
        assert [path.name for path in out.iterdir() if path.name.startswith(".")] == [], target
    return ways


def test_some_calls_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = sweep(tmp_path, monkeypatch, lambda _: [("cudaHostRegister", 1), ("write_new_file", 1)])
    assert ways["survived"] == 1 and ways["StoreError"] == 1, ways


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_every_kind_of_call_fails(part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first, the last, and a middle call of every kind, and others between."""

    def chosen(seen: Counter[str]) -> list[Call]:
        points = {
            (name, number)
            for name, count in seen.items()
            for number in (1, (count + 1) // 2, count, *range(7, count, 53))
        }
        return sorted(points)[part::4]

    ways = sweep(tmp_path, monkeypatch, chosen)
    assert ways["StoreError"] > 2, ways
