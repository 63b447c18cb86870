"""Processes that die, hang, or meet where only one may be."""

import fcntl
import os
import signal
import subprocess
from pathlib import Path

import pytest

import fuyou.optimizer.process.client
from common.errors import FinetuneError, UserError
from common.store import DirectoryLock, Layout, Store, StoreError
from tests.helpers.small_engine import small_engine, train


def test_a_second_run_is_rejected_and_a_dead_one_leaves_no_lock(tmp_path: Path) -> None:
    with small_engine(tmp_path, lr=1e-3) as engine:
        train(engine, 1)
        with pytest.raises(UserError, match=r"in use by another run.*in this process, close"):
            DirectoryLock([tmp_path / "fuyou-run"], patience=0)
    DirectoryLock([tmp_path / "fuyou-run"], patience=0).close()
    assert sorted(path.name for path in (tmp_path / "fuyou-run").iterdir()) == [
        "manifest.json", "store.json", "weights.0", "weights.1",
    ]  # fmt: skip


def test_what_a_killed_run_left_next_to_its_store_is_removed_by_the_next(tmp_path: Path) -> None:
    """Also by one that needs no such room itself."""
    scratch, layout = tmp_path / "fuyou-run" / "scratch", Layout(1)
    layout.allocate("gradients", 1 << 20)
    for life in range(2):
        if life:
            scratch.mkdir()
            Store.create([scratch], layout, io="posix").close()
        with small_engine(tmp_path, lr=1e-3, resume=bool(life)):
            assert not scratch.exists()


def test_a_lock_lasts_as_long_as_any_of_its_owners(tmp_path: Path) -> None:
    """As when the engine is killed while the optimizer process has a write in progress."""
    lock = DirectoryLock([tmp_path])
    other = subprocess.Popen(["sleep", "600"], pass_fds=lock.descriptors)
    try:
        lock.close()
        with pytest.raises(UserError, match="in use"):
            DirectoryLock([tmp_path], patience=0)
    finally:
        other.kill()
        other.wait()
    DirectoryLock([tmp_path], patience=0).close()


def test_the_optimizer_process_owns_the_lock_too(tmp_path: Path) -> None:
    with small_engine(tmp_path, lr=1e-3) as engine:
        pid = engine._run.pids()[1]
        held = [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()]
    assert held.count(str(tmp_path / "fuyou-run")) == 1


def test_where_directories_cannot_be_locked_a_file_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.flock

    def network_file_system(descriptor: int, operation: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(9, "Bad file descriptor")
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", network_file_system)
    with DirectoryLock([tmp_path]), pytest.raises(UserError, match="in use"):
        DirectoryLock([tmp_path], patience=0)
    DirectoryLock([tmp_path], patience=0).close()
    (tmp_path / ".lock").unlink()
    (tmp_path / ".lock").mkdir()
    with pytest.raises(StoreError, match=f"locking of {tmp_path.name} .* failed at .*lock: Is a directory"):
        DirectoryLock([tmp_path])


def test_a_hung_optimizer_process_is_noticed_and_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = small_engine(tmp_path, lr=1e-3)
    losses = train(engine, 1)
    engine.flush()
    child = engine._run.pids()[1]
    os.kill(child, signal.SIGSTOP)
    monkeypatch.setattr(fuyou.optimizer.process.client, "PATIENCE_BEATS", 1)  # the usual patience is a minute
    with pytest.raises(FinetuneError, match="has not answered for 2 s and was killed"):
        train(engine, 3)
    engine.close()
    assert not os.path.exists(f"/proc/{child}")
    with small_engine(tmp_path, lr=1e-3, resume=True) as engine:
        assert engine.step_count == 1
        assert train(engine, 1) != losses


def test_memory_that_is_missing_is_noticed_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fuyou.engine.common_decisions.memory_available_bytes", lambda: 10 << 20)
    with pytest.raises(UserError, match=r"would take .* of host memory, and 10.* available"):
        small_engine(tmp_path)
    assert list(tmp_path.iterdir()) == []
