"""Scratch folders of killed processes go when the next is made; nothing else does."""

import os
import signal
from pathlib import Path

import pytest

from common.files import CACHE_VARIABLE, read_cached, write_cached
from common.scratch import LOCK, PREFIX, scratch_folder


def killed(folder: Path) -> Path:
    """The scratch folder of a process that was killed."""
    pid = os.fork()
    if pid == 0:
        with scratch_folder(folder) as scratch:
            (scratch / "file").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    (left,) = folder.glob(f"{PREFIX}*")
    return left


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    left = killed(tmp_path)
    assert (left / "file").exists()
    with scratch_folder(tmp_path) as scratch:
        assert not left.exists() and scratch.is_dir()
    assert not list(tmp_path.iterdir())
    (tmp_path / f"{PREFIX}empty").mkdir()  # its process was killed before it made the lock
    with scratch_folder(tmp_path) as scratch:
        assert [path.name for path in tmp_path.iterdir()] == [scratch.name]


def test_what_is_in_use_or_of_others_stays(tmp_path: Path) -> None:
    mine = tmp_path / f"{PREFIX}notes"  # a user's own, without a lock
    mine.mkdir()
    (mine / "notes.txt").write_text("keep")
    aim = tmp_path / "aim"
    aim.mkdir()
    (aim / LOCK).touch()
    (tmp_path / f"{PREFIX}link").symlink_to(aim)
    with scratch_folder(tmp_path) as first, scratch_folder(tmp_path) as second:
        assert first.is_dir() and second.is_dir() and first != second
    assert (mine / "notes.txt").exists() and (aim / LOCK).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
def test_what_belongs_to_another_user_stays(tmp_path: Path) -> None:
    left = killed(tmp_path)
    os.chown(left, 65534, 65534)
    with scratch_folder(tmp_path):
        assert left.is_dir()


def test_no_other_temporary_folders_are_made() -> None:
    """The product makes them with :func:`scratch_folder` only, and this is the only way to find them again."""
    root, allowed = Path(__file__).parents[2], {Path("common/scratch.py")}
    words = ("TemporaryDirectory", "mkdtemp", "NamedTemporaryFile", "mkstemp")
    files = [
        file for package in ("cli", "common", "fcdp", "fuyou") for file in (root / package).rglob("*.py")
    ]
    using = {file.relative_to(root) for file in files if any(word in file.read_text() for word in words)}
    assert using == allowed


def test_unfinished_files_of_the_cache_are_removed_by_the_next_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    folder = tmp_path / "numbers"
    folder.mkdir()
    # The largest number of a process is 2 ** 22 on Linux: none has the next.
    old, killed, recent = folder / "a.json.1.tmp", folder / f"a.json.{2**22 + 1}.tmp", folder / "b.json.1.tmp"
    for file in (old, killed, recent):
        file.touch()
    os.utime(old, (0, 0))
    write_cached("numbers", {"key": 1}, 1, value=2)
    assert not old.exists() and not killed.exists()
    assert recent.exists()  # process 1 may be writing it
    cached = read_cached("numbers", {"key": 1}, 1)
    assert cached is not None and cached["value"] == 2
