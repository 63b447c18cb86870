"""--resume where there is nothing, --resume auto, and what must not change, reported before the data are read."""

import dataclasses
import shlex
from pathlib import Path
from typing import get_origin

import click
import pytest

from cli.options.command import parse_command_line
from cli.options.config_file import effective_config
from cli.options.settings import Settings, with_own_options
from common.options import Command, declaration_of, option_fields, spelled
from tests.cli.conftest import Finetune
from tests.helpers.command.histories import history
from tests.helpers.command.messages import check

SMALL = ("--batch-size", "2", "--seq-len", "32", "--gpu", "cpu")


def test_nothing_to_resume(finetune: Finetune, checkpoint: Path, tmp_path: Path) -> None:
    command = ("--model", checkpoint, "--data", "random", *SMALL, "--steps", 1, "--output", tmp_path / "out")
    check(finetune(*command, "--resume"), 2, "no step was committed", "--resume auto")
    (tmp_path / "out").mkdir(exist_ok=True)  # as a run leaves it that is killed before it has a store
    check(finetune(*command, "--resume"), 2, "no step was committed", "--resume auto")
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
    check(
        finetune(*command, *other, "--lora-rank", 4),
        2,
        "began with no --lora-rank, and now it is --lora-rank 4",
    )
    check(
        finetune(*command, *other, "--batch-size", 4),
        2,
        "began with --batch-size 2, and now it is --batch-size 4",
    )
    check(finetune(*command, *other), 2, "broken.jsonl, line 1 is not JSON")
    extended = finetune(*command, "--steps", 2, "--resume")
    assert (
        extended.status == 0 and "extended from 1 step to 2: the learning rate of step 2 is" in extended.out
    )


OF_A_RUN = [
    field for field in option_fields(Settings)
    if Command.TRAIN in declaration_of(field).commands and not declaration_of(field).of_call
    and field.name not in ("output", "config", "write_config")
]  # fmt: skip


def values(field: dataclasses.Field) -> list[list[str]]:
    """Two values of an option as they are typed, neither of which is its default."""
    name, declared = spelled(field.name), declaration_of(field)
    if field.type is bool:
        on, _, off = (declared.flags or f"{name}/{name.replace('--', '--no-')}").partition("/")
        return [[off if field.default else on], [on if field.default else off]]
    if isinstance(declared.type, click.Choice):
        words = [str(word) for word in declared.type.choices if word != field.default]
        return [[name, words[0]], [name, words[-1] if words[-1] != words[0] else str(field.default)]]
    words = {"columns": ["a=b", "c=d"], "output": ["out", "other"]}.get(field.name)
    if words is None:
        of_type = {
            str(number): parse for number in ("5", "0.5", "0.25", "64", "1GiB", "x", "y")
            for parse in [f"{name}={number}"] if is_valid(parse)
        }  # fmt: skip
        words = list(of_type)[-2:]
    assert get_origin(field.type) is tuple or len(words) == 2
    return [[name, word] for word in words]


def is_valid(word: str) -> bool:
    try:
        parse_command_line([word])
    except click.ClickException:
        return False
    return True


@pytest.mark.parametrize("field", OF_A_RUN, ids=lambda field: field.name)
def test_an_option_left_out_has_the_value_of_the_run_and_another_value_is_printed(
    field: dataclasses.Field, tmp_path: Path
) -> None:
    before, after = values(field)
    output = ["--output", str(tmp_path)]
    config = tmp_path / "run" / "config.toml"
    config.parent.mkdir()
    config.write_text(effective_config(parse_command_line([*before, *output]), of_run=True))

    def resumed(*words: str) -> tuple[click.Context, tuple[str, ...]]:
        line = [*words, *output, "--resume"]
        return with_own_options(parse_command_line(line), line)

    begun = parse_command_line(["--config", str(config)]).params[field.name]
    assert begun != parse_command_line([]).params[field.name]
    left_out, changes = resumed()
    assert left_out.params[field.name] == begun and not changes
    assert resumed(*before)[1] == resumed("--config", str(config))[1] == ()
    other, changes = resumed(*after)
    assert (
        other.params[field.name] not in (begun, None) and " instead of " in changes[0] and len(changes) == 1
    )


def test_a_run_that_is_continued_by_its_output_alone_is_the_same_run(
    finetune: Finetune, checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    options = shlex.split(
        "--lr 1e-2 --weight-decay 5 --beta1 0.5 --beta2 0.7 --eps 1e-2 --max-grad-norm 0.1 --schedule linear --warmup 2"
        " --seed 7 --steps 4 --eval-split 10% --eval-every 3"
    )
    command = ("--model", checkpoint, "--data", data, *SMALL, *options)
    assert finetune(*command, "--output", tmp_path / "whole").status == 0
    cut = tmp_path / "cut"
    assert finetune(*command, "--output", cut, "--max-hours", "0.00001").status == 0
    assert len(history(cut)) == 1
    done = finetune("--output", cut, "--resume", "--lr", "2e-2", "--max-hours", "0.00001")
    assert done.status == 0 and "changed  --lr 0.02 instead of --lr 0.01" in done.out, done.err
    back = finetune("--output", cut, "--resume", "--lr", "1e-2")
    assert back.status == 0 and "changed  --lr 0.01 instead of --lr 0.02" in back.out, back.err
    losses = [entry["loss"] for entry in history(tmp_path / "whole")]
    assert [entry["loss"] for entry in history(cut)][:2] == losses[:2]
    again = tmp_path / "again"
    assert finetune(*command, "--output", again, "--max-hours", "0.00001").status == 0
    done = finetune("--output", again, "--resume")
    assert done.status == 0 and "changed" not in done.out, done.err
    assert history(again) == history(tmp_path / "whole")
