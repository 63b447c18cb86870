"""``scripts/capped.py`` with real control groups where this machine lets us make them."""

import os
import re
import signal
import subprocess
import sys

import pytest

from common.memory.cgroups import own_groups
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
needs_groups = pytest.mark.skipif(
    bool(WHY_NOT), reason=f"no memory control group can be made here: {WHY_NOT}"
)


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
    child = "import mmap; held = mmap.mmap(-1, 150 << 20); "
    child += "[held.__setitem__(i, 1) for i in range(0, len(held), 4096)]"
    script = "import subprocess as s, sys; held = b'x' * (100 << 20); "
    script += f"sys.exit(s.call([sys.executable, '-c', {child!r}]))"
    status, _, error = run("200MiB", sys.executable, "-c", script)
    assert status != 0
    assert "KILLED" in error
    status, _, error = run("400MiB", sys.executable, "-c", script)
    assert (status, "nothing was killed" in error) == (0, True)
