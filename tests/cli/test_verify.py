"""``finetune --verify``: a run as it was written, and one with a flipped bit."""

from pathlib import Path

from tests.cli.conftest import Finetune

SMALL = ("--batch-size", 1, "--seq-len", 16, "--gpu", "cpu", "--steps", 2, "--no-save")


def test_a_whole_run_and_a_damaged_one(finetune: Finetune, checkpoint: Path, tmp_path: Path) -> None:
    drives = [tmp_path / "nvme0", tmp_path / "nvme1"]
    for drive in drives:
        drive.mkdir()
    trained = finetune("--model", checkpoint, *SMALL, "--ssd", *drives, "--output", tmp_path / "out")
    assert trained.status == 0, trained.err
    whole = finetune("--verify", *drives)
    assert (whole.status, whole.err) == (0, "")
    assert "step 2," in whole.out and whole.out.endswith(": all as written\n")
    assert whole.out.count("verify   ") == 1, "one run on two drives"

    for file in drives[1].glob("*/weights.*"):  # one byte per page in both slots, whichever is the committed one
        content = bytearray(file.read_bytes())
        for position in range(0, len(content), 4096):
            content[position] ^= 1
        file.write_bytes(content)
    damaged = finetune("--verify", *drives)
    assert damaged.status == 1 and f"{drives[1]}/" in damaged.err and f"{drives[0]}/" not in damaged.err
    assert damaged.out.endswith(" damaged\n")
    assert all(line.startswith("finetune: error: ") for line in damaged.err.splitlines())


def test_mistakes(finetune: Finetune, tmp_path: Path) -> None:
    for words, message in {
        ("--verify", tmp_path): f"There is no run in {tmp_path}",
        ("--verify", tmp_path / "absent"): "There is no run in",
        ("--verify", tmp_path, "--model", "llama-10m"): "--verify trains nothing and cannot be combined with --model",
        ("--verify", tmp_path, "--plan"): "cannot be combined with --plan",
    }.items():
        outcome = finetune(*words)
        assert outcome.status == 2 and message in outcome.err and outcome.err.count("\n") == 1, outcome.err
