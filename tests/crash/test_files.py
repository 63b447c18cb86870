"""Crashes at calls that change files outside the store; tests/crash/all_points.py tries what is left out here."""

import datetime
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.helpers.crash import syscalls
from tests.helpers.crash.journal import ENDINGS, KILLED, NAMES, NOTHING, TORN, Journal
from tests.helpers.crash.outputs import COMMANDS, Recorded

PARTS = 8
"""Of the points at which a command is called again, one for each day."""

needs_seccomp = pytest.mark.skipif(not syscalls.is_available(), reason="the kernel does not tell of calls")

WRITERS = """
import os, shutil, torch
from pathlib import Path
from safetensors.torch import save_file
os.makedirs("a/b")
Path("a/text").write_text("one\\n")
with open("a/text", "a") as file:
    file.write("two\\n")
    file.flush()
    file.write("three\\n")
save_file({"x": torch.arange(1000)}, "a/b/tensors")
save_file({"x": torch.arange(10)}, "a/b/tensors")
shutil.copytree("a", "c")
os.symlink("a/text", "link")
os.rename("c/b", "d")
descriptor = os.open("d/direct", os.O_RDWR | os.O_CREAT)
os.pwritev(descriptor, [b"abc", b"defgh"], 5)
os.posix_fallocate(descriptor, 0, 100)
os.ftruncate(descriptor, 90)
os.close(descriptor)
shutil.rmtree("c")
if not os.fork():
    Path("of-a-child").write_bytes(bytes(5000))
    os._exit(0)
os.wait()
"""


@needs_seccomp
def test_every_way_to_write_is_recorded(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    status, text = syscalls.record(["-c", WRITERS], journal.note, cwd=tmp_path)
    assert status == 0, text
    journal.check_complete()
    assert {change.kind for change in journal.changes} >= {
        "write",
        "create",
        "mkdir",
        "rename",
        "symlink",
        "unlink",
    }


@needs_seccomp
def test_a_change_that_nothing_tells_of_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    journal = Journal(tmp_path)
    code = "import mmap, os; f = os.open('file', os.O_RDWR); os.ftruncate(f, 9000); "
    code += "mmap.mmap(f, 9000)[8000:8001] = b'x'"
    status, text = syscalls.record(["-c", code], journal.note, cwd=tmp_path)
    assert status == 0, text
    with pytest.raises(AssertionError, match="file was changed by an unknown call"):
        journal.check_complete()


def replaced(journal: Journal, *, syncs_file: bool, syncs_folder: bool) -> None:
    """Replace ``file`` by way of another name, as a process would whose calls are recorded."""
    file, temporary = journal.root / "file", journal.root / "file.tmp"
    journal.note(1, "open", temporary, True, True)
    journal.note(1, "write", temporary, 0, b"new" * 1000)
    if syncs_file:
        journal.note(1, "sync", temporary)
    journal.note(1, "rename", temporary, file)
    if syncs_folder:
        journal.note(1, "sync", journal.root)


def left(journal: Journal, point: int, ending: str) -> bytes | None:
    file = journal.state(point, ending, journal.covered()).get(Path("file"))
    return None if file is None else file.data


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    (tmp_path / "file").write_bytes(b"old")
    return Journal(tmp_path)


def test_a_file_that_is_renamed_before_it_is_synced_loses_its_content(journal: Journal) -> None:
    replaced(journal, syncs_file=False, syncs_folder=True)
    end, new = len(journal.changes), b"new" * 1000
    assert [left(journal, end, ending) for ending in (KILLED, NAMES, NOTHING)] == [new, b"", b""]
    parts = {left(journal, number, TORN) for number in [end] * 3}
    assert all(part is not None and new.startswith(part) for part in parts)


def test_a_rename_lasts_once_its_directory_is_synced(journal: Journal) -> None:
    replaced(journal, syncs_file=True, syncs_folder=True)
    end, new = len(journal.changes), b"new" * 1000
    assert [left(journal, end - 1, ending) for ending in (KILLED, NAMES, NOTHING)] == [new, new, b"old"]
    assert all(left(journal, end, ending) == new for ending in ENDINGS)
    every_state = {left(journal, point, ending) for point in range(end + 1) for ending in ENDINGS}
    assert every_state == {b"old", new}


def assert_whole(recorded: Recorded) -> None:
    for point in recorded.points:
        for ending in ENDINGS:
            faults = recorded.faults(point, ending)
            assert not faults, f"before {recorded.kind(point)}, left {ending}: {'; '.join(faults)}"


@needs_seccomp
def test_no_crash_leaves_a_part_of_a_file(tmp_path: Path) -> None:
    assert_whole(Recorded(COMMANDS["classifier"], tmp_path))


@needs_seccomp
@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_after_a_crash_all_files_are_those_of_the_undisturbed_run(name: str, tmp_path: Path) -> None:
    recorded = Recorded(COMMANDS[name], tmp_path)
    assert_whole(recorded)
    crashes = list(recorded.sample(datetime.date.today().toordinal() % PARTS, PARTS))
    assert crashes

    def attempt(crash: tuple[int, str]) -> str:
        point, ending = crash
        try:
            recorded.resume(tmp_path / f"{point}-{ENDINGS.index(ending)}", point, ending)
        except AssertionError as error:
            return f"before {recorded.kind(point)}, left {ending}: {error}"
        return ""

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        failures = list(filter(None, pool.map(attempt, crashes)))
    assert not failures, "\n".join(failures)
