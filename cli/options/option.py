"""What click makes of a field that declares an option, and the values of a few. Imports nothing slow."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args, get_origin

import click
from click.core import ParameterSource

from common.errors import FinetuneError, UserError
from common.options import Declaration, declaration_of, spelled


@contextmanager
def naming(option: str) -> Iterator[None]:
    """Let errors inside begin with ``option`` (``--data``), unless they name it themselves."""
    try:
        yield
    except (UserError, FinetuneError) as error:
        if type(error) not in (UserError, FinetuneError) or option.split()[0] in str(error):
            raise
        raise type(error)(f"{option}: {error}") from error


WRITTEN = "cli.written"
"""Key in ``click.Context.meta``: by name, the value of each option that is on the command line or in a file, as it is
written there."""


class GroupedOption(click.Option):
    """An option that knows its heading; with ``words``, it takes all words up to the next option.

    A flag has two forms, ``--overwrite`` and ``--no-overwrite``, so that the command line can take back what a file
    says; the help shows the one that changes something.
    """

    def __init__(
        self, names: Sequence[str], group: str, declaration: Declaration, words: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(names, multiple=words, **kwargs)
        self.group = group
        self.declaration = declaration
        self.words = words

    @classmethod
    def of_field(
        cls, group: str, item: dataclasses.Field[Any], text: str, callback: Callable[..., Any] | None = None
    ) -> "GroupedOption":
        """Make the option that a field declares, under a heading; with a ``callback``, it acts before all others."""
        declared = declaration_of(item)
        name = spelled(item.name)
        kwargs: dict[str, Any] = {"metavar": declared.metavar, "type": declared.type, "help": text}
        kwargs["hidden"] = declared.hidden
        if item.type is bool:
            kwargs["is_flag"] = True
            name = declared.flags or f"{name}/--no-{name.removeprefix('--')}"
        elif declared.type is None and Path in (item.type, *get_args(item.type)):
            kwargs["type"] = click.Path(path_type=Path)
        if declared.presets is not None or re.search("[a-z]|FILE|DIR", declared.metavar or ""):
            kwargs["shell_complete"] = declared.complete
        if callback is not None:
            kwargs |= {"is_eager": True, "callback": callback}
        words = get_origin(item.type) is tuple
        if item.default not in (None, "", ()):
            kwargs |= {"default": item.default, "show_default": not isinstance(item.default, bool)}
        if declared.alone:
            kwargs |= {"is_flag": False, "flag_value": True}
        return cls([name], group, declared, words, **kwargs)

    @property
    def shown(self) -> str:
        """The form that people type: ``--no-save`` for a flag that is set unless they do."""
        return (self.secondary_opts if self.is_flag and self.default is True else self.opts)[0]

    @property
    def plain_default(self) -> Any:
        """Its value where none is given; None: none."""
        return self.to_info_dict()["default"]

    def typed(self, value: Any) -> str:
        if self.is_flag:
            return (self.opts if value else self.secondary_opts)[0]
        if value in (None, (), []):
            return f"no {self.shown}"
        return f"{self.shown} {' '.join(map(str, value)) if self.words else value}"

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return what click does, but one of a flag's two forms."""
        record = super().get_help_record(ctx)
        return record and (self.shown if self.is_flag else record[0], record[1])

    def get_help_extra(self, ctx: click.Context) -> Any:
        """Leave out ranges such as ``x>=1``, which only error messages need; keep defaults."""
        extra = super().get_help_extra(ctx)
        extra.pop("range", None)
        return extra

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        source = ctx.get_parameter_source(self.name or "")
        if source in (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP):
            ctx.meta.setdefault(WRITTEN, {})[self.name] = value
            names_file = re.search("DIR|FILE", self.metavar or "")
            if names_file and "" in (value if self.words else [str(value)]):
                raise UserError(f"{self.opts[0]} is empty: is a variable of the shell not set? Name a path.")
        try:
            return super().process_value(ctx, value)
        except click.BadParameter as error:
            if source is not ParameterSource.DEFAULT_MAP:
                raise
            raise click.BadParameter(
                f"{error.message} (It is in {ctx.params['config']}.)", ctx, self
            ) from error


def parse_resume(text: str) -> bool | str:
    """Parse the value of ``--resume``, which may have none."""
    values: dict[str, bool | str] = {"True": True, "auto": "auto", "no": False}
    if text not in values:
        raise UserError(f"--resume takes auto, no, or nothing, not {text!r}.")
    return values[text]


def parse_part(text: str) -> float:
    """Parse ``"2%"`` or ``"0.02"``."""
    try:
        value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 0.5:
        raise UserError(f"{text!r} is not a part such as 2% or 0.02, up to 50%.")
    return value


def check_column(text: str) -> str:
    """Return ``prompt=question`` unchanged."""
    name, equals, column = text.partition("=")
    if not (name and equals and column):
        raise UserError(f"{text!r} is not NAME=COLUMN, as in prompt=question.")
    return text


def check_name(text: str) -> str:
    """Return the name of a module unchanged."""
    if "," in text:
        raise UserError(f"separate names with spaces: {text.replace(',', ' ')}")
    return text


def split_weight(word: str) -> tuple[str, float | None]:
    """Return the name and the weight of ``a.jsonl=0.7``; None: it has none, as a file of that very name."""
    name, equals, weight = word.rpartition("=")
    if not equals or Path(word).expanduser().exists():
        return word, None
    try:
        return name, float(weight)
    except ValueError:
        return word, None


def data_sets(words: Sequence[str]) -> list[tuple[tuple[str, ...], float | None]]:
    """Return data sets, each with its files and its weight. Without weights, all files are one data set."""
    split = [split_weight(word) for word in words]
    without = [name for name, weight in split if weight is None]
    if len(without) == len(split):
        return [(tuple(words), None)] if words else []
    if without:
        raise UserError(f"--data: {without[0]} has no weight, and others have: give each one, FILE=0.5.")
    return [((name,), weight) for name, weight in split]
