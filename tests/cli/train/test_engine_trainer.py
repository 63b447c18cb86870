"""What a run on the engine tells its loop."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cli.train.engine_trainer import _disk_usage
from tests.cli.conftest import Finetune


def test_a_limit_on_wear_is_never_ignored_in_silence(
    finetune: Finetune, checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fuyou.config.warranted_bytes", lambda _: 10**15)
    words = ("--model", checkpoint, "--data", data, "--ssd", tmp_path, "--output", tmp_path / "out", "--steps", 1)
    outcome = finetune(*words, "--drive-life", 50, "--host-memory", "1GiB")
    assert outcome.status == 0, outcome.err
    assert "--drive-life is not applied: measuring takes 4 GiB of host memory." in outcome.out


def test_a_file_that_vanishes_while_the_store_is_measured_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit renames its manifest: what was listed is not there any more."""
    folder = tmp_path / "store"
    folder.mkdir()
    (folder / "records").write_bytes(b"x" * 8192)
    (folder / "manifest.json.tmp").symlink_to(tmp_path / "gone")
    monkeypatch.setattr(Path, "is_file", lambda path: True)  # it was there a moment ago
    job: Any = SimpleNamespace(ssd=[tmp_path], run_name="store")
    assert _disk_usage(job) == (folder / "records").stat().st_blocks * 512 > 0
