"""Files of checkpoints and adapters: the user's umask, older files, and what a killed process has left."""

import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from common.models.checkpoint.export import (
    make_staging_folder,
    move_into_place,
    save_tensors,
)
from common.store.errors import StoreError


@pytest.fixture
def umask() -> Iterator[int]:
    before = os.umask(0o027)
    yield 0o027
    os.umask(before)


def test_the_umask_decides_who_may_read(tmp_path: Path, umask: int) -> None:
    save_tensors(tmp_path / "weights", {"a": torch.arange(6.0).view(2, 3).T})
    (tmp_path / "other").touch()
    assert stat.S_IMODE((tmp_path / "weights").stat().st_mode) == stat.S_IMODE((tmp_path / "other").stat().st_mode)
    assert load_file(tmp_path / "weights")["a"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


def test_what_the_system_rejects_is_reported_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("common.models.checkpoint.export.save_file", full)
    with pytest.raises(
        StoreError, match=rf"writing of weights in {re.escape(str(tmp_path))} failed: No space left"
    ) as told:
        save_tensors(tmp_path / "weights", {})
    assert os.strerror(errno.ENOSPC) in str(told.value) and "Free some space there" in str(told.value)


def test_files_come_in_order_after_older_ones_have_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "out"
    (make_staging_folder(directory) / ".tmp5fH2xa").touch()  # of one that was killed
    (directory / "config").write_text("old")
    (directory / "mine").touch()
    folder = make_staging_folder(directory)
    for name in ("weights", "config", "a"):
        (folder / name).write_text("new")
    moved: list[tuple[str, bool]] = []
    real = os.replace

    def replace(source: Path, target: Path) -> None:
        moved.append((target.name, (directory / "config").exists()))
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    move_into_place(directory, [directory / "config", directory / "none"], last=["weights", "config"])
    assert moved == [("a", False), ("weights", False), ("config", False)]
    assert {path.name for path in directory.iterdir()} == {"a", "config", "mine", "weights"}
