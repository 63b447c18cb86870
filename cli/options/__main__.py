"""Print docs/options.md, the page of all options: ``python -m cli.options > docs/options.md``."""

import click

from cli.options.all_options import GROUPS
from cli.options.command import GroupedCommand, build_command
from cli.options.option import GroupedOption

INTRODUCTION = """# Options

The same as `finetune --help`. In a file for `--config`, write an option without its dashes (`batch-size = 4`), in a
table named after its group or in none; each run writes such a file, `<output>/run/config.toml`. This page is
generated: change [`cli/options/all_options.py`](../cli/options/all_options.py), then run
`python -m cli.options > docs/options.md`.
"""


def options_page() -> str:
    """Return the page: a list for each group of options."""
    command = build_command(lambda **options: 0)
    context = click.Context(command, info_name="finetune")
    return "\n".join([INTRODUCTION, *(_section(command, context, heading) for heading in GROUPS)])


def _section(command: GroupedCommand, context: click.Context, heading: str) -> str:
    items = [_item(option, context) for option in command.options if option.group == heading]
    return "\n".join([f"## {heading}\n", f"{GROUPS[heading].__doc__}\n", *items, ""])


def _item(option: GroupedOption, context: click.Context) -> str:
    takes = "" if option.is_flag else f" {option.make_metavar(context).strip('[]')}"
    default = f" (`{option.plain_default}`)" if option.show_default else ""
    text = (option.help or "").replace("<", "\\<")
    return f"* `{option.shown}{takes}`{default}: {text}"


if __name__ == "__main__":
    print(options_page(), end="")
