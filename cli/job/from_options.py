"""From the options of a parsed command line to the settings of a run."""

from dataclasses import fields
from typing import Any

from cli.options.grouped import expand_pattern
from cli.options.settings import Settings


def settings_of(arguments: tuple[str, ...], options: dict[str, Any]) -> Settings:
    """Return the settings that a command line asks for.

    Args:
        arguments: the command line itself.
        options: its parsed options, by their names in Python.

    Raises:
        UserError: the options do not go together.
    """
    given = {field.name: options[field.name] for field in fields(Settings) if field.name in options}
    for name in ("ssd", "leave_ssd", "data", "eval_data"):
        given[name] = tuple(
            path for word in options[name] for path in expand_pattern(f"--{name.replace('_', '-')}", word)
        )
    given["lora_targets"] = tuple(options["lora_targets"])
    return Settings(**given, arguments=arguments)
