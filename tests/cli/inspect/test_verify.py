"""``finetune --verify``: a run as it was written, and one with a flipped bit."""

import re
import shutil
from pathlib import Path

from common.store.folders import successor_folder
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

    for place, message in {
        drives[1]: f"The run in {drives[1]}/fuyou-.* is striped over 2 directories, and number 1 is not among those",
        tmp_path: f"There is no run in {tmp_path}. Give --verify the directories",
    }.items():
        wrong = finetune("--verify", place)
        assert wrong.status == 2 and re.search(message, wrong.err), wrong.err
    copies = [tmp_path / "copy" / drive.name for drive in drives]  # as they lie where several ranks share drives
    for drive, copy in zip(drives, copies, strict=True):
        (folder,) = drive.iterdir()
        shutil.copytree(folder, copy / folder.name / "rank-1")
    of_ranks = finetune("--verify", *copies)
    assert of_ranks.status == 0 and f"{copies[1]}/{folder.name}/rank-1: step 2," in of_ranks.out
    (folder,) = drives[0].iterdir()
    moving = shutil.copytree(folder, successor_folder(folder))
    wrong = finetune("--verify", *drives)
    assert wrong.status == 2 and f"The run in {folder} was moving to other drives when it was killed" in wrong.err
    shutil.rmtree(moving)

    for file in drives[1].glob("*/weights.*"):  # one byte per page in both slots, whichever is the committed one
        content = bytearray(file.read_bytes())
        for position in range(0, len(content), 4096):
            content[position] ^= 1
        file.write_bytes(content)
    damaged = finetune("--verify", *drives)
    assert damaged.status == 1 and f"{drives[1]}/" in damaged.err and f"{drives[0]}/" not in damaged.err
    assert damaged.out.endswith(" damaged\n")
    assert all(line.startswith("finetune: error: ") for line in damaged.err.splitlines())
