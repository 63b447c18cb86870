"""The compiled library is loaded only if it is whole and nobody else could write it; a slow run names the reason."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from common.files import CACHE_VARIABLE
from fuyou.layout.record import Precision
from fuyou.layout.record_parts import ADAMW_8BIT
from fuyou.optimizer import chunk_update, kernels
from fuyou.optimizer.chunk_update import slow_updates

BF16 = Precision(torch.bfloat16)
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, kernels.COMPILERS)), reason="needs a C++ compiler"
)


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    """Load the library as a new process does, with an empty cache and temporary directory."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(kernels, "_FLAGS", ("-shared", "-fPIC"))

    def load() -> Any:
        for cached in (kernels.compiled_library, chunk_update.tried_kernels):
            cached.cache_clear()
        return kernels.compiled_library()

    yield load
    for cached in (kernels.compiled_library, chunk_update.tried_kernels):
        cached.cache_clear()
    assert not list((tmp_path / "tmp").iterdir())


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The compiler's calls, which compile an empty file: that is quicker."""
    calls, real = [], subprocess.run

    def run(command: Any, **options: Any) -> Any:
        calls.append(command)
        return real([*command[:-1], "-x", "c", os.devnull], **options)

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def library(tmp_path: Path) -> Path:
    (file,) = (tmp_path / "cache" / "kernels").glob("*.so")
    return file


@needs_compiler
def test_a_damaged_library_is_compiled_again(
    build: Callable[[], Any], compiled: list[Any], tmp_path: Path
) -> None:
    assert isinstance(build(), ctypes.CDLL) and len(compiled) == 1
    assert isinstance(build(), ctypes.CDLL) and len(compiled) == 1
    whole = library(tmp_path).read_bytes()
    assert library(tmp_path).stem.endswith(hashlib.sha256(whole).hexdigest())
    flipped = whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:]
    for number, damaged in enumerate((b"", bytes(len(whole)), whole[: len(whole) // 2], flipped), 2):
        # A new file: the mapped one stays whole, or this process ends with SIGBUS.
        (tmp_path / "damaged").write_bytes(damaged)
        os.replace(tmp_path / "damaged", library(tmp_path))
        assert isinstance(build(), ctypes.CDLL) and len(compiled) == number
        assert library(tmp_path).read_bytes() == whole


@needs_compiler
def test_the_library_that_was_checked_is_loaded(tmp_path: Path) -> None:
    compiler = next(filter(None, map(shutil.which, kernels.COMPILERS)))
    answers = []
    for answer in (1, 2):
        path = tmp_path / f"{answer}.so"
        source = f"int answer() {{ return {answer}; }}"
        command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
        subprocess.run(command, input=source.encode(), check=True)
        loaded = kernels._load(path, hashlib.sha256(path.read_bytes()).hexdigest())
        assert loaded is not None
        answers.append(loaded.answer())
    assert answers == [1, 2]  # dlopen knows libraries by name, and both were opened under the same number


@needs_compiler
@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
def test_a_library_that_others_can_write_is_not_loaded(
    build: Callable[[], Any], compiled: list[Any], tmp_path: Path
) -> None:
    assert isinstance(build(), ctypes.CDLL)
    file, folder = library(tmp_path), library(tmp_path).parent
    nobody = 65534
    file.chmod(0o777)
    assert isinstance(build(), ctypes.CDLL) and len(compiled) == 2 and file.stat().st_mode & 0o777 == 0o755
    os.chown(file, nobody, nobody)
    folder.chmod(0o777)
    assert isinstance(build(), ctypes.CDLL) and len(compiled) == 3
    assert library(tmp_path).stat().st_uid == 0 and folder.stat().st_mode & 0o777 == 0o755
    os.chown(folder, nobody, nobody)  # it is compiled where nobody else can write, and removed
    assert isinstance(build(), ctypes.CDLL) and isinstance(build(), ctypes.CDLL) and len(compiled) == 5
    assert library(tmp_path) == file


def test_a_run_without_a_compiler_says_so(build: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert build() == "there is no C++ compiler"
    what, remedy = slow_updates(BF16) or ("", "")
    assert what == "Adam's updates take 4 times as long as compiled ones: there is no C++ compiler."
    assert remedy == "Install a C++ compiler: apt install g++"
    assert "6 to 10 times" in (slow_updates(Precision(torch.float32, ADAMW_8BIT)) or "")[0]
    assert slow_updates(Precision(torch.float32)) is None  # PyTorch's is as fast


def test_a_compiler_that_fails_is_reported_and_tried_again_by_the_next_process(
    build: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho one >> \"$(dirname $0)/calls\"\necho 'no cc1plus' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(broken))
    for _ in range(2):
        assert build() == f"{broken} fails (no cc1plus)"
        assert kernels.compiled_library() == f"{broken} fails (no cc1plus)"
    assert (tmp_path / "calls").read_text() == "one\n" * 2
    assert "fails (no cc1plus)" in (slow_updates(BF16) or "")[0]
