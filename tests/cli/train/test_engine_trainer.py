"""What a run on the engine tells its loop."""

from pathlib import Path

import pytest

from tests.cli.conftest import Finetune


def test_a_limit_on_wear_is_never_ignored_in_silence(
    finetune: Finetune, checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fuyou.config.warranted_bytes", lambda _: 10**15)
    words = (
        "--model",
        checkpoint,
        "--data",
        data,
        "--ssd",
        tmp_path,
        "--output",
        tmp_path / "out",
        "--steps",
        1,
    )
    outcome = finetune(*words, "--drive-life", 50, "--host-memory", "1GiB")
    assert outcome.status == 0, outcome.err
    assert "--drive-life is not applied: measuring takes 4 GiB of host memory." in outcome.out
