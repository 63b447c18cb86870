"""``scripts/bench_io.py``: what it makes of fio's words, and all of it on a few megabytes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.helpers.processes import forked
from tests.helpers.scripts import SCRIPTS, load_script

SCRIPT = SCRIPTS / "bench_io.py"
needs_fio = pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")


bench_io = load_script("bench_io")


def test_rate_is_all_bytes_over_the_longer_time() -> None:
    job = {"read": {"io_bytes": 3000, "runtime": 2}, "write": {"io_bytes": 1000, "runtime": 4}, "trim": {}}
    output = "fio: a warning {with a brace}\n" + json.dumps({"fio version": "fio-3", "jobs": [job]}, indent=2)
    assert bench_io.rate_of(output) == 1e6


def test_ratios_are_taken_round_by_round() -> None:
    row = bench_io.Row("case", "psync", {}, [2.0, 4.0], [1.0, 6.0])
    assert row.ratios() == [0.5, 1.5]


def run(*arguments: str | Path, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **({"PATH": path} if path is not None else {})}
    return forked.run([sys.executable, SCRIPT, *arguments], timeout=240, env=environment)


def test_without_fio_it_says_how_to_get_it(tmp_path: Path) -> None:
    done = run("--ssd", tmp_path, path="/nonexistent")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "bench_io: fio is not installed: apt install fio\n"


@needs_fio
def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_io, "CHOOSING_ROUNDS", 1)
    monkeypatch.setattr(bench_io, "PAUSE_S", 0)
    monkeypatch.setattr(bench_io, "FIO_ENGINES", ("psync", "no-such-engine"))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    ssd, figures = tmp_path / "ssd", tmp_path / "figures.json"
    ssd.mkdir()
    options = ["--ssd", ssd, "--size", "1MB", "--rounds", "1", "--kind", "parameters", "--json", figures]
    done = CliRunner().invoke(bench_io.main, [str(option) for option in options])
    assert done.exit_code == 0, done.output
    assert list(ssd.iterdir()) == []
    content = json.loads(figures.read_text())
    assert [row["case"] for row in content["rows"]] == [
        f"{drives}, parameters, {direction}"
        for drives in ("1 directory", "3 directories")
        for direction in ("read", "write", "mixed")
    ]
    for row in content["rows"]:
        assert row["case"] in done.output
        assert len(row["fio"]) == len(row["ours"]) == 1
        assert min(*row["fio"], *row["ours"]) > 0
        assert list(row["tries"]) == ["psync"] == [row["reference"]]


@needs_fio
def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    process = forked.Popen(
        [sys.executable, SCRIPT, "--ssd", tmp_path, "--size", "100MB", "--rounds", "50"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 240
    while not list(tmp_path.glob("bench-io-*/*/*/records")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=240)
    assert process.returncode != 0
    assert list(tmp_path.iterdir()) == []
