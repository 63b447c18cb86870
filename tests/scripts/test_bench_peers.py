"""``scripts/bench_peers.py`` and its runner: contenders that obey, die, hang and stay; the tables; the drive."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import bench_max_model  # noqa: E402
import peers.runner  # noqa: E402
from peers.contender import Task  # noqa: E402
from peers.runner import Contender, ContenderFailedError, Step  # noqa: E402

from tests.helpers.processes import forked  # noqa: E402

TINY: dict[str, Any] = {
    "model_type": "gpt2", "vocab_size": 97, "n_positions": 32, "n_layer": 3, "n_embd": 64, "n_head": 2,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip


def tiny(directory: Path, dtype: str = "bf16", **settings: Any) -> Task:
    return Task(TINY, 2, 24, 2, str(directory), settings, lr=1e-3, dtype=dtype)


def start(module: str, task: Task, **options: Any) -> Contender:
    return Contender(Path(sys.executable), module, task, {"OMP_NUM_THREADS": "2"}, timeout_s=300, **options)


def steps(module: str, directory: Path, count: int = 2, dtype: str = "bf16", **settings: Any) -> list[Step]:
    """Of a contender that starts from a loss of about ln(97) = 4.57."""
    with start(module, tiny(directory, dtype, **settings)) as contender:
        taken = [contender.step() for _ in range(count)]
        assert contender.facts["parameters"] == 158_336
    assert all(4.3 < step.loss < 4.9 for step in taken)
    assert all(step.seconds > 0 for step in taken)
    return taken


@pytest.fixture
def _forked_contenders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contenders come without seconds of imports; one is started as it is for users, and its memory looked at."""
    monkeypatch.setattr(peers.runner, "subprocess", forked.as_subprocess())


@pytest.mark.slow
@pytest.mark.usefixtures("_forked_contenders")
def test_fsdp2_trains(tmp_path: Path) -> None:
    steps("peers.fsdp2_offload", tmp_path)
    in_memory, sharded = (steps(f"peers.{name}", tmp_path, 3, "fp32") for name in ("in_memory", "fsdp2_offload"))
    assert [step.loss for step in sharded] == pytest.approx([step.loss for step in in_memory], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_engine_trains(tmp_path: Path, dtype: str) -> None:
    with start("peers.streamed", tiny(tmp_path, dtype, host_memory="streamed")) as contender:
        taken = [contender.step() for _ in range(3)]
        assert contender.peak_bytes > 100 << 20
    # Three steps of at least 12 bytes per parameter, less what is still to be written: that of at most two.
    assert sum(step.written_bytes for step in taken) > 12 * 158_336
    assert all(4.3 < step.loss < 4.9 for step in taken)


@pytest.mark.usefixtures("_forked_contenders")
def test_one_that_dies_is_reported_with_its_last_output(tmp_path: Path) -> None:
    task = Task({**TINY, "n_head": 7}, 2, 24, 2, str(tmp_path))
    with pytest.raises(ContenderFailedError, match=r"exit status 1: .*divisible"):
        start("peers.in_memory", task, watch=False)


def test_one_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    script = tmp_path / "hangs.py"
    script.write_text("import subprocess, time\nsubprocess.Popen(['sleep', '97531'])\ntime.sleep(97531)\n")
    with pytest.raises(ContenderFailedError, match="time limit: no ready within 2 s"):
        Contender(Path(sys.executable), "hangs", tiny(tmp_path), {"PYTHONPATH": str(tmp_path)}, timeout_s=2)
    assert not [one for one in psutil.process_iter(["cmdline"]) if "97531" in (one.info["cmdline"] or [])]


@pytest.mark.slow
def test_ctrl_c_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "bench_peers.py"), "--ssd", str(tmp_path), "--models", "125m"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = forked.Popen(
        [*command, "--contenders", "fuyou", "--threads", "2"], env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 240
    while not list(tmp_path.glob("bench-peers-*/fuyou*")) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.terminate()  # the same way as Ctrl-C, and it works under any test runner
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert list(tmp_path.iterdir()) == []


def test_the_climb_continues_above_what_a_smaller_cap_allowed() -> None:
    ladder = [bench_max_model.Rung(layers, 64) for layers in (1, 2, 3, 4)]
    tried: list[int] = []

    def attempt(rung: bench_max_model.Rung, cap: int) -> bench_max_model.Try:
        tried.append(rung.layers)
        return bench_max_model.Try(rung, [1.0], problem="" if rung.layers <= cap else "killed by the cap")

    small = bench_max_model.climb(ladder, 2, attempt, None)
    large = bench_max_model.climb(ladder, 9, attempt, small.largest)
    assert tried == [1, 2, 3, 3, 4]
    assert small.largest is not None and small.largest.rung.layers == 2
    assert small.stopped is not None and small.stopped.problem == "killed by the cap"
    assert large.largest is not None and large.largest.rung.layers == 4
    assert large.stopped is None
