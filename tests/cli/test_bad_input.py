"""What people get wrong and what goes wrong: one clear message, the right exit status, nothing lost, nothing left."""

import os
import resource
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from cli.main import main
from tests.cli.conftest import Finetune
from tests.helpers.command.messages import check

SMALL = ("--batch-size", "2", "--seq-len", "32", "--gpu", "cpu")


@pytest.mark.parametrize(("words", "told"), [
    (("--ssd", "/no/such/drive"), ("no directory /no/such/drive",)),
    (("--gpu", "voodoo2"), ("voodoo2", "--gpu cpu")),
    (("--seq-len", 65), ("--seq-len 65", "context of 64 tokens")),
    (("--steps", 1, *SMALL, "--host-memory", "64KiB"), ("--host-memory of at least", "MiB")),
    (("--steps", 1, *SMALL, "--device-memory", "64KiB"), ("--device-memory of at least", "MiB")),
])  # fmt: skip
def test_what_cannot_be(
    words: tuple[object, ...], told: tuple[str, ...], finetune: Finetune, checkpoint: Path
) -> None:
    check(finetune("--model", checkpoint, *words), 2, *told)


def test_unknown_data_file(finetune: Finetune, checkpoint: Path, data: Path) -> None:
    wrong = data.with_name("text.jsonl")
    check(finetune("--model", checkpoint, "--data", wrong), 2, f"no data file '{wrong}'", "'texts.jsonl'")


def test_preset_with_data(finetune: Finetune, data: Path) -> None:
    check(finetune("--model", "llama-10m", "--data", data), 2, "a preset has no tokenizer", "--data random")


def test_checkpoint_without_tokenizer(finetune: Finetune, own_checkpoint: Path, data: Path) -> None:
    for file in own_checkpoint.glob("tokenizer*"):
        file.unlink()
    check(finetune("--model", own_checkpoint, "--data", data), 2, "no tokenizer", "--data needs one")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_ssd_directory(finetune: Finetune, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "drive").mkdir(mode=0o555)
    check(finetune("--model", checkpoint, "--ssd", tmp_path / "drive"), 2, "not writable")


def test_output_that_cannot_be(finetune: Finetune, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check(
        finetune("--model", checkpoint, "--output", tmp_path / "file/out"),
        2,
        "--output",
        "is not a directory",
    )
    check(finetune("--model", checkpoint, "--output", checkpoint), 2, "is --model", "which is to be read")


def test_merge_into_what_is_no_directory(finetune: Finetune, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "lost")
    words = ("export", "--model", checkpoint, "--adapter", checkpoint, "--output")
    check(finetune(*words, tmp_path / "file"), 2, f"--output: {tmp_path / 'file'} is not a directory")
    check(finetune(*words, tmp_path / "link"), 2, f"link is a link to {tmp_path / 'lost'}, where nothing is")


def test_drives_that_are_to_stay_and_to_be_left(finetune: Finetune, checkpoint: Path, tmp_path: Path) -> None:
    """Also those that the run has, where --ssd is left out."""
    drives = [tmp_path / "a", tmp_path / "b c"]
    for drive in drives:
        drive.mkdir()
    words = ("--model", checkpoint, "--output", tmp_path / "out", "--ssd", *drives, "--resume", "--leave-ssd")
    check(
        finetune(*words, drives[1]),
        2,
        f"stay: give --ssd those that are to stay: --ssd {drives[0]} --leave-ssd '",
    )
    check(
        finetune(*words[:-3], "--resume", "--leave-ssd", drives[0]), 2, "those that are to stay, or new ones."
    )


def test_a_name_that_is_not_utf_8(finetune: Finetune, checkpoint: Path, tmp_path: Path) -> None:
    output = f"{tmp_path}/caf\udce9"
    check(
        finetune("--model", checkpoint, "--output", output),
        2,
        "caf",
        "is not UTF-8: give that file or directory",
    )
    assert not any(tmp_path.iterdir())


def test_evaluated_data_are_named_as_they_were_given(
    finetune: Finetune, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "cut')
    words = ("--model", checkpoint, *SMALL)
    check(
        finetune("evaluate", *words, "--data", tmp_path / "data.jsonl"),
        2,
        f"error: --data: {tmp_path}/data.jsonl",
    )


def test_output_that_holds_a_checkpoint(finetune: Finetune, checkpoint: Path, own_checkpoint: Path) -> None:
    before = (own_checkpoint / "model.safetensors").read_bytes()
    check(
        finetune("--model", checkpoint, "--output", own_checkpoint), 2, "config.json", "move that elsewhere"
    )
    assert (own_checkpoint / "model.safetensors").read_bytes() == before


def test_too_little_space(finetune: Finetune, checkpoint: Path, tmp_path: Path, monkeypatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 4096))
    command = ("--model", checkpoint, "--steps", 1, *SMALL, "--output", tmp_path / "out")
    check(finetune(*command), 2, "bytes needed", "4,096 bytes free", "Nothing was written")
    check(finetune(*command, "--no-save"), 2, "bytes)", "(4,096 bytes)", "Nothing was written")
    assert not list((tmp_path / "out").iterdir())


def test_truncated_shard(finetune: Finetune, own_checkpoint: Path, tmp_path: Path) -> None:
    weights = own_checkpoint / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1000)
    check(
        finetune("--model", own_checkpoint, "--steps", 1, *SMALL, "--output", tmp_path / "out"),
        1,
        str(weights.name),
    )
    assert not list((tmp_path / "out").iterdir())


def test_loss_that_is_not_a_number(finetune: Finetune, checkpoint: Path, tmp_path: Path) -> None:
    command = ("--model", checkpoint, "--steps", 9, *SMALL, "--output", tmp_path / "out", "--dtype", "fp32")
    ruin = ("--lr", "1e38", "--schedule", "constant")
    outcome = finetune(*command, *ruin)
    assert outcome.status == 1
    assert "step 2" in outcome.err and "step 1 is committed" in outcome.err
    assert f"To continue: finetune --model {checkpoint}" in outcome.err
    assert outcome.err.rstrip().endswith("--resume")
    assert outcome.err.count("\n") == 1
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("debug", [False, True])
def test_the_unexpected(
    debug: bool, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(path: object) -> None:
        raise RuntimeError("no luck\ntoday.")

    monkeypatch.setattr("cli.job.model.load_config", fail)
    assert main(["--model", str(checkpoint), "--data", "random", *(["--debug"] if debug else [])]) == 1
    err = capfd.readouterr().err
    last = "finetune: error: RuntimeError: no luck today."
    assert ("Traceback" in err) is debug
    assert err.endswith(last + "\n" if debug else last + " Run again with --debug for the traceback.\n")


@pytest.mark.parametrize(
    "error", [MemoryError(), OSError(12, os.strerror(12)), RuntimeError("can't start new thread")]
)
def test_lack_of_memory_is_one_sentence(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: object) -> int:
        raise error

    monkeypatch.setattr("cli.main._run", run)
    assert main(["plan", "--model", "llama-10m"]) == 1
    assert "There is not enough memory" in (message := capsys.readouterr().err) and "--debug" not in message
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1 << 30, 1 << 30))
    assert main(["plan", "--model", "llama-10m"]) == 1
    assert "allows 1 GiB of address space: enter `ulimit -v unlimited`" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["out", "out/run", "out/store", "out/checkpoints", "out/.replaced", "drive"])
def test_a_link_to_itself_is_named(name: str, finetune: Finetune, checkpoint: Path) -> None:
    if name != "out":
        Path("out").mkdir()
    Path(name).symlink_to(Path(name).absolute())
    drives = ("--ssd", "drive") if name == "drive" else ()
    check(
        finetune("--model", checkpoint, *SMALL, "--output", "out", *drives),
        2,
        f"{name} is a link that leads back to itself",
    )
