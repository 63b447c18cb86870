"""Print docs/options.md, the page of all options: ``python scripts/options_page.py > docs/options.md``."""

import sys
from pathlib import Path

import click

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # not installed: run from a checkout

from cli.options.all_options import HEADINGS
from cli.options.command import COMMANDS, Finetune
from cli.options.option import GroupedOption
from common.options import Command

INTRODUCTION = """# Options

The same as `finetune COMMAND --help`. Without a command, `finetune` trains. In a file for `--config`, write an option
without its dashes (`batch-size = 4`), in a table named after its group or in none; each run writes
`<output>/run/config.toml`. This page is generated: change
[`cli/options/all_options.py`](../cli/options/all_options.py) or
[`fuyou/option_groups.py`](../fuyou/option_groups.py), then run `python scripts/options_page.py > docs/options.md`.
"""


def options_page() -> str:
    """Return the page: the commands, and a list for each group of options."""
    commands = "".join(f"* `finetune {name}`: {text}\n" for name, text in COMMANDS.items())
    options = Finetune(lambda name, **options: 0).options
    sections = [
        "\n".join(
            [
                f"## {heading}\n",
                f"{group.__doc__}\n",
                *(_item(option) for option in options if option.group == heading and not option.hidden),
                "",
            ]
        )
        for heading, group in HEADINGS.items()
    ]
    return "\n".join([INTRODUCTION, commands, *sections])


def _item(option: GroupedOption) -> str:
    takes = (
        ""
        if option.is_flag
        else f" {option.make_metavar(click.Context(click.Command('finetune'))).strip('[]')}"
    )
    value = option.plain_default
    default = f" (`{' '.join(value) if option.words else value}`)" if option.show_default else ""
    commands = option.declaration.commands
    names = [name for name in COMMANDS if Command[name.upper()] in commands]
    only = "" if "train" in names else f" (only {', '.join(names)})"
    text = (option.help or "").replace("<", "\\<")
    return f"* `{option.shown}{takes}`{default}{only}: {text}"


if __name__ == "__main__":
    print(options_page(), end="")
