"""A drive that is full, at each file that the program, transformers, or peft writes of a result."""

import contextlib
import errno
import hashlib
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.inspect import evaluate
from cli.main import main
from cli.train import loop
from common.store.errors import advice_on
from tests.helpers.processes.pairs import with_data

SMALL = ("--batch-size", 1, "--seq-len", 16, "--gpu", "cpu", "--steps", 1)


@contextlib.contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """Let this process write no byte past ``nbytes`` of a file, as on a drive where no more is free."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def limited(function: Callable[..., Any], nbytes: int) -> Callable[..., Any]:
    """Return ``function`` on a drive that is full after ``nbytes`` of a file."""

    def on_full_drive(*arguments: Any) -> Any:
        with largest_file(nbytes):
            return function(*arguments)

    return on_full_drive


def digests(output: Path) -> dict[str, str]:
    """Return a hash of each file of a result."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in output.iterdir()
        if path.is_file() and path.name != "losses.jsonl"
    }


@pytest.mark.parametrize("kind", ["full", "lora", "merged"])
def test_each_file_of_a_result(
    kind: str,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The result is not there in part, one sentence names where, and the same command writes it later."""

    def finetune(*words: object) -> tuple[int, str]:
        status = main(with_data([str(word) for word in words]))
        return status, capsys.readouterr().err

    output = tmp_path / "out"
    adapters = ("--lora-rank", 2) if kind != "full" else ()
    train = ("--model", checkpoint, *SMALL, *adapters, "--output", output)
    assert finetune(*train)[0] == 0
    command: tuple[object, ...] = (*train, "--resume")
    if kind == "merged":
        command = ("export", "--model", checkpoint, "--adapter", output, "--output", tmp_path / "merged")
        assert finetune(*command)[0] == 0
        output = tmp_path / "merged"
    whole = digests(output)
    sizes = {name: (output / name).stat().st_size for name in whole}
    assert {"tokenizer.json", "adapter_config.json" if kind == "lora" else "config.json"} <= sizes.keys()
    for limit in sorted(set(sizes.values())):
        if kind == "merged":
            shutil.rmtree(output)
        else:
            for name in whole:
                (output / name).unlink(missing_ok=True)
        with monkeypatch.context() as patched:
            # Not the whole of a run: its shared memory is a file, too
            for function in (loop._save, evaluate.merge_adapter):
                patched.setattr(
                    sys.modules[function.__module__], function.__name__, limited(function, limit - 1)
                )
            status, error = finetune(*command)
        assert status == 1, (limit, sizes)
        assert error.count("\n") == 1 and "--debug" not in error, error
        assert str(tmp_path) in error and advice_on(OSError(errno.EFBIG, "")) in error, error
        there = digests(output) if output.exists() else {}
        assert there.items() <= whole.items()
        assert not {"adapter_config.json", "config.json"} & there.keys() or there == whole, there
    assert finetune(*command)[0] == 0
    assert digests(output) == whole
