"""A click command whose help has headings with examples, and some of whose options take several words."""

import glob
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from common.errors import UserError

WRITTEN = "cli.written"
"""Key in ``click.Context.meta``: by name, the value of each option that is on the command line or in a file, as it is
written there."""


class GroupedOption(click.Option):
    """An option that knows its heading; with ``words``, it takes all words up to the next option.

    A flag has two forms, ``--resume`` and ``--no-resume``, so that the command line can take back what a file says; the
    help shows the one that changes something.
    """

    def __init__(self, names: Sequence[str], *, group: str, words: bool = False, **kwargs: Any) -> None:
        if kwargs.get("is_flag") and not kwargs.get("is_eager"):
            names = [f"{name}/--no-{name.removeprefix('--')}" if "/" not in name else name for name in names]
        super().__init__(names, multiple=words, **kwargs)
        self.group = group
        self.words = words

    @property
    def shown(self) -> str:
        """The form that people type: ``--no-save`` for a flag that is set unless they do."""
        return (self.secondary_opts if self.is_flag and self.default is True else self.opts)[0]

    @property
    def plain_default(self) -> Any:
        """Its value where nobody gives one; None: none."""
        return self.to_info_dict()["default"]

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """As click makes it, but for one of a flag's two forms."""
        record = super().get_help_record(ctx)
        return record and (self.shown if self.is_flag else record[0], record[1])

    def get_help_extra(self, ctx: click.Context) -> Any:
        """Defaults are shown; ranges such as ``x>=1`` are said only to those who leave them."""
        extra = super().get_help_extra(ctx)
        extra.pop("range", None)
        return extra

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        """Convert and check; what is wrong in a file is said to be there."""
        source = ctx.get_parameter_source(self.name or "")
        if source in (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP):
            ctx.meta.setdefault(WRITTEN, {})[self.name] = value
        try:
            return super().process_value(ctx, value)
        except click.BadParameter as error:
            if source is not ParameterSource.DEFAULT_MAP:
                raise
            raise click.BadParameter(f"{error.message} (It is in {ctx.params['config']}.)", ctx, self) from error


class GroupedCommand(click.Command):
    """A command whose help has headings, and some of whose options take several words.

    click has options with a fixed number of values only. Shells expand ``--ssd /mnt/nvme*`` into one ``--ssd`` and
    several words: the option is repeated before each of them, and click sees what it knows.

    Args:
        examples: command lines for each heading.
        exclusive: pairs of options of which at most one may hold: one on the command line undoes the other in a file.
    """

    def __init__(
        self, *args: Any, examples: Mapping[str, str], exclusive: Sequence[tuple[str, str]] = (), **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._examples = examples
        self._exclusive = exclusive

    @property
    def options(self) -> list[GroupedOption]:
        """All of them, in the order of the help."""
        return [option for option in self.params if isinstance(option, GroupedOption)]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        names = {name for option in self.options if option.words for name in option.opts}
        rest = super().parse_args(ctx, repeat_option(args, names))
        for pair in self._exclusive:
            for one, other in (pair, pair[::-1]):
                typed = ctx.get_parameter_source(one) is ParameterSource.COMMANDLINE
                if typed and ctx.get_parameter_source(other) is ParameterSource.DEFAULT_MAP:
                    del ctx.meta[WRITTEN][other]
                    ctx.params[other] = next(option.plain_default for option in self.options if option.name == other)
        return rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Every heading with its options and an example or two."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for option in self.options:
            record = option.get_help_record(ctx)
            if record is not None:
                groups.setdefault(option.group, []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records, col_max=28)
                if heading in self._examples:
                    formatter.write_paragraph()
                    formatter.write("".join(f"  $ {line}\n" for line in self._examples[heading].splitlines()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Options; a word that is none belongs to the option of several words before it, and is a path."""
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [CompletionItem(incomplete, type="file")]

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        found = super().get_help_option(ctx)
        return (
            found
            and GroupedOption(
                ["--help"], group="Other", is_flag=True, is_eager=True, expose_value=False, help=found.help,
                callback=found.callback,
            )
        )  # fmt: skip


def repeat_option(args: Sequence[str], names: set[str]) -> list[str]:
    """``--ssd a b`` becomes ``--ssd=a --ssd=b`` for the options in ``names``; all else stays.

    A word that begins with a dash is an option; a file of such a name is given as ``./-name``.

    Raises:
        click.BadOptionUsage: no word follows.
    """
    result: list[str] = []
    position = 0
    while position < len(args):
        name, equals, value = args[position].partition("=")
        position += 1
        if name not in names:
            result.append(args[position - 1])
            continue
        values = [value] if equals else []
        while position < len(args) and not (args[position].startswith("-") and len(args[position]) > 1):
            values.append(args[position])
            position += 1
        if not values:
            raise click.BadOptionUsage(name, f"Option {name!r} requires an argument.")
        result += [f"{name}={value}" for value in values]
    return result


def expand_pattern(option: str, name: str) -> list[str]:
    """What a quoted pattern stands for, sorted; a name without pattern signs, or that exists as it is, is itself.

    Raises:
        UserError: nothing matches.
    """
    path = str(Path(name).expanduser())
    if Path(path).exists() or not glob.has_magic(path):
        return [name]
    found = sorted(glob.glob(path, recursive=True))
    if not found:
        raise UserError(f"{option} {name}: nothing matches this pattern.")
    return found


class FiniteFloat(click.FloatRange):
    """A number in a range; neither NaN, which is in no range and passes every comparison, nor infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class ParsedValue(click.ParamType):
    """A value read by one of our own functions, whose UserError becomes click's."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except UserError as error:
            self.fail(str(error), param, ctx)
