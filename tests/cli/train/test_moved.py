"""Drives at other mount points, an output directory elsewhere, another machine: the run is found, and continues."""

import json
import os
import re
import shlex
import shutil
import socket
from pathlib import Path

import pytest

from tests.cli.conftest import Finetune

SMALL = ("--batch-size", 2, "--seq-len", 16, "--gpu", "cpu", "--schedule", "constant")


def losses(output: Path) -> list[float]:
    lines = (output / "losses.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_a_run_continues_wherever_its_directories_are(
    finetune: Finetune, checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drives(*names: str) -> list[Path]:
        for name in names:
            (tmp_path / name).mkdir(exist_ok=True)
        return [tmp_path / name for name in names]

    def train(*words: object, data: Path = data) -> None:
        outcome = finetune("--model", checkpoint, "--data", data, *SMALL, *words)
        assert outcome.status == 0, outcome.err

    out, whole = tmp_path / "elsewhere" / "renamed", tmp_path / "whole"
    train("--steps", 5, "--ssd", *drives("w0", "w1"), "--output", whole)
    train("--steps", 2, "--ssd", *drives("a", "b"), "--output", tmp_path / "out")

    # Other mount points, another output directory, another machine, with a copy of the data and a file system that
    # wants blocks of 64 KiB for direct I/O; and one drive more.
    (tmp_path / "a").rename(tmp_path / "x")
    shutil.copytree(tmp_path / "b", tmp_path / "y")
    shutil.rmtree(tmp_path / "b")
    out.parent.mkdir()
    (tmp_path / "out").rename(out)
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    real = os.preadv

    def large_blocks(descriptor: int, buffers: list, offset: int) -> int:
        if _is_direct(descriptor) and (offset % 65536 or len(buffers[0]) % 65536):
            raise OSError(22, "Invalid argument")
        return real(descriptor, buffers, offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", large_blocks)
        copied = Path(shutil.copyfile(data, out.parent / "copied.jsonl"))
        train("--steps", 4, "--ssd", *drives("y", "z", "x"), "--output", out, "--resume", data=copied)
    assert all(len(list(drive.iterdir())) == 1 for drive in drives("x", "y", "z"))

    # Two drives fewer, without which it continues.
    rest = ("--steps", 5, "--ssd", *drives("z"), "--output", out, "--resume", "--host-memory", "700MiB")
    refused = finetune("--model", checkpoint, "--data", data, *SMALL, *rest)
    assert refused.status == 2 and all(
        name in refused.err for name in ("--leave-ssd", *map(str, drives("x", "y")))
    )
    train(*rest, "--leave-ssd", *drives("x", "y"))
    assert not any(any(drive.iterdir()) for drive in drives("x", "y"))
    assert losses(out) == losses(whole)
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_a_store_in_the_output_moves_to_a_drive(
    finetune: Finetune, checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    output, drive = tmp_path / "an output", tmp_path / "a drive"
    drive.mkdir()
    assert (
        finetune("--model", checkpoint, "--data", data, *SMALL, "--steps", 1, "--output", output).status == 0
    )
    moved = ("--output", output, "--steps", 2, "--resume", "--ssd", drive)
    assert "this command again. To give it up" in finetune(*moved).err
    refused = finetune(*moved, "--leave-ssd", output)
    assert "this command again without --leave-ssd" in refused.err
    command = re.search("enter `mv (.+)`", refused.err)
    assert refused.status == 2 and command, refused.err
    shutil.move(*shlex.split(command[1]))
    done = finetune(*moved)
    assert done.status == 0 and "resume   after step 1 of 2" in done.out, done.err


def _is_direct(descriptor: int) -> bool:
    flags = next(
        line for line in Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines() if "flags:" in line
    )
    return bool(int(flags.split()[1], 8) & os.O_DIRECT)
