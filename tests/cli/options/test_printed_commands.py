"""Every command that the program prints is one that it understands."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from cli.options.command import COMMANDS, EXAMPLES, FIRST_EXAMPLES, Finetune, parse_command_line
from cli.options.settings import Settings
from common.errors import UserError

ROOT = Path(__file__).parents[3]
COMMAND = re.compile(r"\bfinetune((?: +(?:--[a-z][a-z-]*|[\w./*:=-]+))+)")
OF_OTHERS = {
    "--include", "--exclude", "--ntasks-per-node", "--cpus", "--cpus-per-task", "--mem", "--memory", "--nproc-per-node",
    "--governor", "--repo-type", "--gpu-bind", "--no-deps", "--no-input", "--disable-pip-version-check", "--retries",
    "--timeout",
}  # fmt: skip
"""Options of hf, srun, docker, torchrun, cpupower, and pip."""


def texts() -> Iterator[tuple[str, str]]:
    """Yield every text in the program's sources that is no docstring, with ``x`` for what is put in."""
    for file in sorted(
        file for top in ("cli", "fuyou", "fcdp", "common") for file in (ROOT / top).rglob("*.py")
    ):
        if file.name in ("command.py", "drawing.py"):
            # Whose examples are below, and whose style has variables
            continue
        tree = ast.parse(file.read_text())
        parts = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                yield (
                    str(file),
                    "".join(part.value if isinstance(part, ast.Constant) else "x" for part in node.values),
                )
            elif (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and node not in parts | docstrings
            ):
                yield str(file), node.value


def test_options_that_messages_name_exist() -> None:
    options = Finetune(lambda name: 0).options
    known = {name for option in options for name in (*option.opts, *option.secondary_opts)} | OF_OTHERS
    known |= {"--help", "--version", "--no-x", *(f"--{name}" for name in COMMANDS)}
    # The engine's alone, and of stores that earlier versions made
    known |= {"--single-slot", "--train-experts"}
    named = {
        (file, word) for file, text in texts() for word in re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", text)
    }
    assert len(named) > 200
    assert sorted(each for each in named if each[1] not in known) == []


def test_commands_in_messages_parse() -> None:
    commands = {
        match.group(1) for _, text in texts() for match in COMMAND.finditer(text) if " --" in match.group(1)
    }
    assert commands >= {" plan --cluster x --model x"}
    for command in commands:
        words = ["2" if word == "N" else word for word in shlex.split(command)]
        # Then a sentence continues
        ends = [end for end in range(len(words), 0, -1) if is_understood(words[:end])]
        options = [place for place, word in enumerate(words) if word.startswith("--")]
        assert ends and ends[0] > options[-1], command


def is_understood(words: list[str]) -> bool:
    try:
        parse_command_line(words)
    except click.exceptions.Exit:  # --help
        return True
    except click.BadOptionUsage:
        return words[-1].startswith("--")  # named without a value
    except (click.ClickException, UserError):
        return False
    return True


@pytest.mark.parametrize(
    "line", [line for lines in (*EXAMPLES.values(), FIRST_EXAMPLES) for line in lines.splitlines()]
)
def test_examples_of_the_help_parse(line: str) -> None:
    words = shlex.split(line.partition(" > ")[0], comments=True)
    words = words[words.index("finetune") + 1 :]
    if "--config" in words:
        Path(words[words.index("--config") + 1]).parent.mkdir(parents=True, exist_ok=True)
        Path(words[words.index("--config") + 1]).write_text("")
    parse_command_line(words)


@pytest.mark.parametrize("given", [
    "", "--resume", "--resume auto", "--resume=auto", "--resume no", "--overwrite", "--resume no --overwrite",
    "--resume auto --data a auto b --chat-template 'say --resume'", "--ssd=a --ssd b c --resume",
])  # fmt: skip
def test_the_command_that_continues_a_run_parses(given: str) -> None:
    words = ("--model", "my model", *shlex.split(given), "--steps", "3")
    settings = Settings.of_options(
        {**parse_command_line(words).params, "resume": True, "overwrite": False}, words
    )
    _, _, command = settings.how_to_continue.partition("To continue: ")
    program, *continued = shlex.split(command)
    options, before = parse_command_line(continued).params, parse_command_line(words).params
    assert program == "finetune" and options["resume"] is True
    changed = {name for name, value in options.items() if value != before[name]}
    assert changed <= {"resume", "overwrite"} and not options["overwrite"]
