"""``scripts/capped.py`` with real control groups where this machine lets us make them."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.memory.cgroups import ControlGroup, own_groups
from tests.helpers.scripts import SCRIPTS, load_script

ALLOCATE = "import sys; held = b'x' * (int(sys.argv[1]) << 20); print('held', flush=True)"


capped = load_script("capped")


def _why_not() -> str:
    """Why no group can be made here, or nothing."""
    try:
        capped.remove_group(capped.make_group(1 << 30))
    except capped.CannotCapError as error:
        return str(error)
    return ""


WHY_NOT = _why_not()
needs_groups = pytest.mark.skipif(bool(WHY_NOT), reason=f"no memory control group can be made here: {WHY_NOT}")


def start(memory: str, *command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, SCRIPTS / "capped.py", "--memory", memory, "--", *command],
        env={**os.environ, "PYTHONPATH": str(SCRIPTS.parent)}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def run(memory: str, *command: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr; the group must be gone afterwards."""
    process = start(memory, *command)
    out, error = process.communicate(timeout=240)
    folders = {group.path for group in own_groups("memory")}
    assert not [left for folder in folders for left in folder.glob(f"capped-{process.pid}")]
    return process.returncode, out, error


@needs_groups
def test_within_the_cap_all_goes_through() -> None:
    status, out, error = run("200MiB", sys.executable, "-c", ALLOCATE, "100")
    assert (status, out) == (0, "held\n")
    used = re.search(r"used at most (\d+) MiB of 200 MiB .* nothing was killed; exit status 0\.", error)
    assert used, error
    assert 100 <= int(used[1]) < 200


@needs_groups
def test_beyond_the_cap_the_kernel_kills() -> None:
    status, out, error = run("200MiB", sys.executable, "-c", ALLOCATE, "300")
    assert (status, out) == (128 + signal.SIGKILL, "")
    assert "used at most 200 MiB of 200 MiB" in error
    assert "the kernel KILLED 1 at the limit" in error


@needs_groups
def test_the_cap_covers_children_and_shared_memory() -> None:
    child = "import mmap; held = mmap.mmap(-1, 150 << 20); [held.__setitem__(i, 1) for i in range(0, len(held), 4096)]"
    script = (
        f"import subprocess as s, sys; held = b'x' * (100 << 20); sys.exit(s.call([sys.executable, '-c', {child!r}]))"
    )
    status, _, error = run("200MiB", sys.executable, "-c", script)
    assert status != 0
    assert "KILLED" in error
    status, _, error = run("400MiB", sys.executable, "-c", script)
    assert (status, "nothing was killed" in error) == (0, True)


@needs_groups
@pytest.mark.parametrize("status", [0, 77])
def test_the_exit_status_comes_back(status: int) -> None:
    assert run("100MiB", "sh", "-c", f"exit {status}")[0] == status


@needs_groups
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_go_through(number: signal.Signals, status: int) -> None:
    process = start("100MiB", "sh", "-c", "echo ready; exec sleep 600")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.1)
    process.send_signal(number)
    _, error = process.communicate(timeout=120)
    assert process.returncode == status, error


@needs_groups
def test_what_is_left_behind_is_ended_and_told() -> None:
    began = time.monotonic()
    status, _, error = run("100MiB", "sh", "-c", "sleep 600 >/dev/null 2>&1 & exit 3")
    assert status == 3
    assert "left behind, and ended: 1" in error
    assert time.monotonic() - began < 300


@needs_groups
@pytest.mark.parametrize(("command", "status"), [("/no/such/command", 127), ("/etc", 126)])
def test_what_cannot_be_run(command: str, status: int) -> None:
    got, _, error = run("100MiB", command)
    assert (got, error.startswith(f"capped: cannot run {command}: ")) == (status, True)


def test_a_size_that_is_none() -> None:
    status, _, error = run("much", "true")
    assert status == capped.CANNOT_CAP
    assert error == "capped: 'much' is not a size. Write 24GiB, 512MiB, 80GB or a number of bytes.\n"


class TestVersion2:
    """The choice of place and the files written, on a plain folder that stands for the file system."""

    def groups(self, folder: Path, *, handed_down: str) -> list[ControlGroup]:
        (folder / "slice/own").mkdir(parents=True)
        (folder / "slice/cgroup.subtree_control").write_text(handed_down)
        (folder / "slice/own/cgroup.subtree_control").write_text("")
        return [ControlGroup(path, 2) for path in (folder / "slice/own", folder / "slice", folder)]

    def test_goes_below_the_nearest_that_hands_memory_down(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        groups = self.groups(tmp_path, handed_down="cpu memory pids\n")
        monkeypatch.setattr(capped, "own_groups", lambda controller: groups)
        group = capped.make_group(1 << 30)
        assert group == ControlGroup(tmp_path / f"slice/capped-{os.getpid()}", 2)
        assert group.memory_limit() == 1 << 30

    def test_says_what_else_works_where_none_does(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        groups = self.groups(tmp_path, handed_down="cpu\n")
        monkeypatch.setattr(capped, "own_groups", lambda controller: groups)
        with pytest.raises(capped.CannotCapError, match="systemd-run"):
            capped.make_group(1 << 30)

    def test_no_groups_at_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(capped, "own_groups", lambda controller: [])
        with pytest.raises(capped.CannotCapError, match="no memory control groups"):
            capped.make_group(1 << 30)
