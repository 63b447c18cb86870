"""``scripts/bench_peers.py`` and its runner: contenders that obey, die, hang and stay; the tables; the drive."""

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import peers.runner  # noqa: E402
from peers.contender import Task  # noqa: E402
from peers.runner import Contender, Step  # noqa: E402

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
    in_memory, sharded = (
        steps(f"peers.{name}", tmp_path, 3, "fp32") for name in ("in_memory", "fsdp2_offload")
    )
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
