"""Print docs/options.md, the page of all options: ``python -m cli.options > docs/options.md``."""

import click

from cli.options.all_options import GROUPS
from cli.options.command import GroupedCommand, build_command
from cli.options.option import GroupedOption

INTRODUCTION = """# Options

`finetune --help` shows the same, with an example for each group. In a file for `--config`, an option stands without its
dashes (`batch-size = 4`), in a table named after its group or in none; each run writes such a file,
`<output>/run/config.toml`.
This page is generated: change [`cli/options/all_options.py`](../cli/options/all_options.py), then run
`python -m cli.options > docs/options.md`.
"""


def options_page() -> str:
    """Return the page: a table for each group, a row for each option."""
    command = build_command(lambda **options: 0)
    context = click.Context(command, info_name="finetune")
    return "\n".join([INTRODUCTION, *(_section(command, context, heading) for heading in GROUPS)])


def _section(command: GroupedCommand, context: click.Context, heading: str) -> str:
    rows = [_row(option, context) for option in command.options if option.group == heading]
    head = ["| Option | Takes | Default | What it does |", "|---|---|---|---|"]
    return "\n".join([f"## {heading}\n", f"{GROUPS[heading].__doc__}\n", *head, *rows, ""])


def _row(option: GroupedOption, context: click.Context) -> str:
    takes = "" if option.is_flag else _code(option.make_metavar(context).strip("[]"))
    default = _code(str(option.plain_default)) if option.show_default else ""
    text = (option.help or "").replace("|", "\\|").replace("<", "\\<")
    return f"| `{option.shown}` | {takes} | {default} | {text} |"


def _code(text: str) -> str:
    escaped = text.replace("|", "\\|")  # a bar would end the cell, even between backticks
    return f"`{escaped}`"


if __name__ == "__main__":
    print(options_page(), end="")
