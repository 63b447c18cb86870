"""``--resume``: an option that is left out takes the run's own value, and one that differs is printed or rejected."""

from collections.abc import Iterable
from typing import Any

import click

from cli.options.command import parse_command_line
from cli.options.config_file import option_as_toml, options_in_files
from cli.options.option import GroupedOption, Mode
from cli.options.settings import CONFIG, RUN, Settings, output_directory


def settings_of(mode: Mode, context: click.Context, arguments: tuple[str, ...]) -> Settings:
    """Return what a command line asks for.

    Raises:
        UserError: the options do not go together, or the continued run's own configuration cannot be read.
    """
    changes: tuple[str, ...] = ()
    if mode is Mode.TRAIN and (context.params["resume"] or context.params["resume_auto"]):
        context, changes = with_own_options(context, arguments)
    return Settings.of_options(context.params, arguments, context=context, changes=changes)


def with_own_options(context: click.Context, arguments: Iterable[str]) -> tuple[click.Context, tuple[str, ...]]:
    """Return a command line whose left out options have the run's own values, and what differs, for people."""
    file = output_directory(context.params["output"], context.params["model"] or "") / RUN / CONFIG
    if not file.is_file():
        return context, (f"{file} is missing: options that are left out have their defaults",)
    stored = parse_command_line(["--config", str(file)])
    continued = parse_command_line(arguments, stored.default_map)
    return continued, tuple(_changes(stored, continued))


def _changes(stored: click.Context, now: click.Context) -> Iterable[str]:
    for option in options_in_files(now):
        before, after = stored.params[option.name or ""], now.params[option.name or ""]
        # Paths are equal where they are when absolute. Options of a call have no value in a run's own configuration.
        is_same = option_as_toml(stored, option, of_run=True) == option_as_toml(now, option, of_run=True)
        takes_own = option.name == "dtype" and after == "auto"
        if not (before == after or is_same or takes_own):
            yield f"{typed(option, after)} instead of {typed(option, before)}"


def typed(option: GroupedOption, value: Any) -> str:
    """Return an option with a value as it is typed."""
    if option.is_flag:
        return (option.opts if value else option.secondary_opts)[0]
    if value in (None, (), []):
        return f"no {option.shown}"
    return f"{option.shown} {' '.join(map(str, value)) if option.words else value}"
