"""``--profile``: what is printed and written, and what people get wrong."""

import json
import signal
from pathlib import Path

import pytest

from fuyou.planner.profiling import Profile, blocks, measure
from tests.cli.conftest import Finetune, sending
from tests.helpers.command.messages import check


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(blocks, "REPEAT_SECONDS", 0.01)
    monkeypatch.setattr(measure, "DIRECTION_SECONDS", 0.05)
    monkeypatch.setattr(measure, "PAST_CACHE_SECONDS", 0.0)
    monkeypatch.setattr(measure, "WINDOW_SECONDS", 0.02)
    monkeypatch.setattr(measure, "UPDATED_ELEMENTS", 1 << 14)
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("_quick")
def test_a_profile(finetune: Finetune, checkpoint: Path, tmp_path: Path) -> None:
    drive = tmp_path / "nvme0"
    drive.mkdir()
    command = ("--profile", "--model", checkpoint, "--ssd", drive, "--gpu", "cpu", "--batch-size", "2")
    outcome = finetune(*command, "--seq-len", "32", "--dtype", "bf16")
    assert outcome.status == 0, outcome.err
    for words in (
        "micro-batches of 2 x 32 tokens in bf16 on cpu",
        "matrix products",
        "block backward",
        "to the device",
        "SSDs, 1 directory",
        "commit",
        "optimizer, 1 thread",
    ):
        assert words in outcome.out  # fmt: skip
    (file,) = (tmp_path / "cache" / "profiles").iterdir()
    assert str(file) in outcome.out
    assert not list(drive.iterdir())
    profile = Profile(**json.loads(file.read_text())["profile"])
    assert (profile.tokens, profile.measured_tokens, profile.adam_threads) == (64, 64, 1)
    assert all(seconds > 0 for _, seconds in profile.rates().non_block_seconds)


@pytest.mark.parametrize(("words", "message"), [
    (("--profile", "--ssd", "nowhere"), "no directory nowhere"),
    (("--profile", "--model", "gpt3-1.4b"), "gpt3-1.3b"),
    (("--profile", "--gpu", "cpu", "--host-memory", "1MiB", "--model", "llama-10m"), "--host-memory of at least"),
])  # fmt: skip
def test_what_does_not_go(finetune: Finetune, words: tuple[str, ...], message: str) -> None:
    check(finetune(*words), 2, message)


def test_ctrl_c_leaves_nothing(
    finetune: Finetune, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = tmp_path / "nvme0"
    drive.mkdir()
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    with sending(signal.SIGINT, lambda: list(drive.iterdir())):
        outcome = finetune("--profile", "--model", checkpoint, "--ssd", drive, "--gpu", "cpu")
    assert outcome.status == 130, outcome.err
    assert "Traceback" not in outcome.err
    assert not list(drive.iterdir())
    assert not (tmp_path / "cache").exists()
