"""``scripts/bench_adam.py`` at a size that takes seconds: it measures every contender, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.helpers.processes import forked

ROOT = Path(__file__).parents[2]


def start(ssd: Path, *options: str) -> forked.Popen:
    sizes = ["--parameters", "300K", "--record", "100K", "--chunk", "20000", "--ring", "3"]
    return forked.Popen(
        [sys.executable, ROOT / "scripts" / "bench_adam.py", "--ssd", str(ssd), *sizes, *options],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_measures_every_contender_and_cleans_up(tmp_path: Path) -> None:
    process = start(tmp_path, "--rounds", "2", "--steps", "2", "--threads", "1", "--threads", "2")
    printed, errors = process.communicate(timeout=400)
    assert process.returncode == 0, errors
    rows = [line.split("  ") for line in printed.splitlines() if line.startswith("  ") and "M parameters" not in line]
    assert len(rows) == 12
    assert printed.count("AdamW on split weights, without a compiler") == printed.count("optimizer process") == 2
    assert not list(tmp_path.iterdir())


def test_cleans_up_when_it_is_interrupted(tmp_path: Path) -> None:
    process = start(tmp_path, "--rounds", "1000", "--steps", "1000")
    deadline = time.monotonic() + 240
    while not list(tmp_path.glob("*/store.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=240)
    assert process.returncode != 0
    assert not list(tmp_path.iterdir())
