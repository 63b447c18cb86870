"""What the command sets up in its process; standard streams that are closed, or cannot be written any more."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from cli.main import _naming_output, main
from common.errors import FinetuneError
from tests.helpers.processes import forked


@pytest.mark.parametrize("closed", [(0, 1, 2), (1,), (2,), (0, 2)])
def test_no_file_of_a_run_gets_the_number_of_a_closed_stream(closed: tuple[int, ...]) -> None:
    code = (
        f"import os, sys; [os.close(fd) for fd in {closed}]; sys.stdout = sys.stderr = None\n"
        "import cli.main; cli.main._open_closed_streams(); print('x'); print('x', file=sys.stderr)\n"
        "os._exit(os.open(os.devnull, os.O_RDONLY))"
    )
    with forked.Popen(
        [sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        assert process.wait(60) > 2


def test_kernels_are_compiled_in_this_process() -> None:
    """PyTorch would start a process for each processor, whose memory no plan counts."""
    code = (
        "import sys; sys.argv = ['finetune', '--version']; from cli.main import main; main()\n"
        "from torch._inductor import config; print('threads', config.decide_compile_threads())"
    )
    with forked.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert "threads 1\n" in process.communicate(timeout=120)[0]


def test_a_closed_pipe_is_named(tmp_path: Path) -> None:
    """click ends the command without a message there."""
    reader, writer = os.pipe()
    os.close(reader)
    words = ["--model", "llama-10m", "--data", "random", "--gpu", "cpu", "--output", str(tmp_path / "out")]
    with forked.Popen(
        [sys.executable, "-m", "cli.main", *words], stdout=writer, stderr=subprocess.PIPE, text=True
    ) as process:  # fmt: skip
        os.close(writer)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 1 and "error: Standard output cannot be written (Broken pipe)" in err, err


def test_a_full_drive_of_the_log_is_named() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(FinetuneError, match=r"Standard output cannot be written \(No space left on device\)"):
        _naming_output(os.write)(full, b"a line")
    os.close(full)


def test_python_without_docstrings_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cli.main.sys.flags", SimpleNamespace(optimize=2))
    assert main(["check"]) == 2
    assert "leave out -OO" in capsys.readouterr().err
