"""Files of checkpoints and adapters: the user's umask, older files, and what a killed process has left."""

import errno
import itertools
import json
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from common.errors import FinetuneError
from common.models.checkpoint.shards import DTYPES, read_header
from common.models.checkpoint.writer import (
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
    assert stat.S_IMODE((tmp_path / "weights").stat().st_mode) == stat.S_IMODE(
        (tmp_path / "other").stat().st_mode
    )
    assert load_file(tmp_path / "weights")["a"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


def test_what_the_system_rejects_is_reported_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        StoreError, match=rf"writing of weights in {re.escape(str(tmp_path))} failed: No space left"
    ) as told:
        save_tensors(tmp_path / "weights", {})
    assert "Free some space there" in str(told.value)


@given(
    st.dictionaries(
        st.text("aé.0", min_size=1, max_size=9),
        st.tuples(st.sampled_from([*DTYPES.values()]), st.lists(st.integers(0, 700), max_size=2)),
        max_size=6,
    )
)
@settings(max_examples=50, deadline=None)
def test_safetensors_reads_what_was_saved(described: dict[str, tuple[torch.dtype, list[int]]]) -> None:
    tensors = {
        name: torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).squeeze(-1)
        for name, (dtype, shape) in described.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        save_tensors(Path(folder) / "weights", tensors, z="last", a="é")
        loaded = load_file(Path(folder) / "weights")
        with safe_open(Path(folder) / "weights", "pt") as opened:
            assert opened.metadata() == {"format": "pt", "z": "last", "a": "é"}
        shards = read_header(Path(folder) / "weights")
    assert loaded.keys() == tensors.keys() == shards.keys()
    for name, value in tensors.items():
        assert loaded[name].dtype == value.dtype
        assert loaded[name].shape == value.shape == shards[name].shape
        assert loaded[name].view(-1).view(torch.uint8).equal(value.reshape(-1).view(torch.uint8))


def test_files_of_one_dtype_are_those_of_safetensors(tmp_path: Path) -> None:
    tensors = {name: torch.randn(300, 1000) for name in ("b", "a", "c.d")}
    save_tensors(tmp_path / "ours", tensors)
    save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_files_come_in_order_after_older_ones_have_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_tensors_that_share_bytes_or_leave_some_out_are_damage(tmp_path: Path) -> None:
    """safetensors refuses such files, too."""
    file = tmp_path / "weights"
    save_file({name: torch.full((2,), float(value)) for value, name in enumerate("abcd")}, file)
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    ranges = {name: header[name]["data_offsets"] for name in "abcd"}
    for names in itertools.product("abcd", repeat=4):
        changed = {
            name: header[name] | {"data_offsets": ranges[of]} for name, of in zip("abcd", names, strict=True)
        }
        text = json.dumps(changed).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
        if len(set(names)) == 4:
            assert read_header(file).keys() == set("abcd")
        else:
            with pytest.raises(FinetuneError, match=r"weights is damaged: its"):
                read_header(file)
