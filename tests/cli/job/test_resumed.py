"""--resume where there is nothing, --resume auto, and what must not change, reported before the data are read."""

from pathlib import Path

import pytest

from cli.options.command import parse_command_line
from tests.cli.conftest import Finetune
from tests.helpers.command.messages import check

SMALL = ("--batch-size", "2", "--seq-len", "32", "--gpu", "cpu")


@pytest.mark.parametrize("words", [["--resume", "auto"], ["--resume=auto"], ["--resume-auto"]])
def test_resume_auto_is_a_flag_of_its_own(words: list[str]) -> None:
    options = parse_command_line(["--model", "auto", *words, "--steps", "3"]).params
    assert (options["resume"], options["resume_auto"], options["steps"]) == (False, True, 3)


def test_nothing_to_resume(finetune: Finetune, checkpoint: Path, tmp_path: Path) -> None:
    command = ("--model", checkpoint, *SMALL, "--steps", 1, "--output", tmp_path / "out")
    check(finetune(*command, "--resume"), 2, "nothing to continue", "--resume auto")
    (tmp_path / "out").mkdir(exist_ok=True)  # as a run leaves it that is killed before it has a store
    check(finetune(*command, "--resume"), 2, "nothing to continue", "--resume auto")
    begun = finetune(*command, "--resume", "auto")
    assert begun.status == 0 and "step 1/1" in begun.out, begun.err


def test_what_must_not_change_is_compared_before_the_data_are_read(
    finetune: Finetune, checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    command = ("--model", checkpoint, "--data", data, *SMALL, "--steps", 1, "--output", tmp_path / "out")
    assert finetune(*command).status == 0
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{")
    other = ("--data", broken, "--resume")
    check(finetune(*command, *other, "--lora-rank", 4), 2, "began with no adapters, and now it is --lora-rank 4")
    check(finetune(*command, *other, "--batch-size", 4), 2, "began with --batch-size 2, and now it is 4")
    check(finetune(*command, *other), 2, "broken.jsonl, line 1 is not JSON")
    extended = finetune(*command, "--steps", 2, "--resume")
    assert extended.status == 0 and "extended from 1 step to 2: the learning rate of step 2 is" in extended.out
