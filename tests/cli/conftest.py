"""A checkpoint, data and a way to run the command, shared by the tests of ``cli``."""

import contextlib
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cli.main import main
from common.data.demo_text import train_demo_tokenizer
from tests.helpers.processes import forked
from tests.helpers.processes.pairs import pair, with_data  # noqa: F401 - a fixture

VOCAB = 384


class Outcome(NamedTuple):
    status: int
    out: str
    err: str


Finetune = Callable[..., Outcome]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer. Not to be changed: see :func:`own_checkpoint`."""
    directory = tmp_path_factory.mktemp("models") / "tiny-llama"
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)
    train_demo_tokenizer(VOCAB, directory)
    return directory


@pytest.fixture
def own_checkpoint(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return shutil.copytree(checkpoint, tmp_path / "own-checkpoint")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "texts.jsonl"
    file.write_text(
        "".join(json.dumps({"text": f"Document {i} counts to {i * i}. " * 4}) + "\n" for i in range(40))
    )
    return file


@pytest.fixture
def finetune(capfd: pytest.CaptureFixture[str]) -> Finetune:
    """Runs the command in this process and checks that it cleans up behind itself."""

    def run(*words: object) -> Outcome:
        capfd.readouterr()
        before = leftovers()  # what other tests keep for the whole session is none of ours
        status = main(with_data([str(word) for word in words]))
        assert leftovers() - before == set()
        return Outcome(status, *capfd.readouterr())

    return run


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Default outputs go to a folder of the test's own, a busy machine is no news, and messages are the command's."""
    monkeypatch.setattr("cli.report.progress.FIRST_AFTER_S", 3600.0)
    # What a log has next to messages
    monkeypatch.setattr("cli.report.progress.Heartbeat.began", lambda *_: None)
    monkeypatch.setattr("common.errors.FinetuneError.names_flags", True)  # whose errors these tests are about
    monkeypatch.chdir(tmp_path)


@contextlib.contextmanager
def sending(number: signal.Signals, when: Callable[[], Any]) -> Iterator[None]:
    """While this context is open, ``number`` is sent to this process once, as soon as ``when()`` is true."""
    over = threading.Event()

    def watch() -> None:
        while not when():
            if over.wait(0.02):
                return
        os.kill(os.getpid(), number)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def leftovers() -> set[str]:
    """Child processes that are there, and our shared memory that is."""
    children = [child for child in psutil.Process().children(recursive=True) if child.is_running()]
    children = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    children = [child for child in children if child.pid != forked.server_pid()]
    names = {f"{child.pid}: {' '.join(child.cmdline())}" for child in children}
    # Python's own tracker of shared memory stays for the life of the process.
    processes = {name for name in names if "resource_tracker" not in name}
    shared = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return processes | {name for name in shared if name.startswith("fuyou")}


def alone_and_on_two_ranks(finetune: Finetune, options: tuple[Any, ...], folder: Path) -> list[Path]:
    """Run the same training on one machine and on two ranks of it, each with a separate drive ``NAME-ssd``.

    Returns:
        Their output directories, ``alone`` and ``ranks``.
    """
    outputs = []
    for name, words in (("alone", ()), ("ranks", ("--nodes", "1", "--gpus-per-node", "2"))):
        drive = folder / f"{name}-ssd"
        drive.mkdir()
        done = finetune(*options, *words, "--ssd", drive, "--output", folder / name)
        assert done.status == 0, done.err
        outputs.append(folder / name)
    return outputs
