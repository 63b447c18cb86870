"""What an option of ``finetune`` is, as a field of a dataclass declares it. Imports nothing slow.

The same dataclass may configure a library: :mod:`fuyou.option_groups` has the engine's.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Flag, auto
from typing import Any

import click
from click.shell_completion import CompletionItem

from common.errors import UserError
from common.files import preset_files
from common.units import parse_bytes

_KEY = "option"  # Key in a field's metadata


class Command(Flag):
    """Commands of ``finetune``; an option names those that have it."""

    TRAIN = auto()
    PLAN = auto()
    CHECK = auto()
    PROFILE = auto()
    VERIFY = auto()
    EXPORT = auto()
    EVALUATE = auto()
    CHAT = auto()
    DEMO = auto()
    RECIPE = auto()

    RUN = TRAIN | PLAN  # A plan takes all options of its run, so that a line that trains can be planned
    STEP = RUN | PROFILE
    MODEL = STEP | CHECK
    CONFIGURED = MODEL | VERIFY | EXPORT | EVALUATE | CHAT | DEMO  # Commands that read a file of options
    ALL = CONFIGURED | RECIPE
    SOURCE = MODEL | EXPORT | EVALUATE  # Commands that read a model
    SHAPE = STEP | EVALUATE


@dataclass(frozen=True)
class Declaration:
    """A declaration is what a field says about its option, next to name, type, default and docstring (the help)."""

    metavar: str | None = None  # Placeholder for the value in the help
    type: click.ParamType | None = None
    """Type of the value, or of each of several words; None: as the field's annotation says."""
    commands: Command = Command.RUN  # Commands that have it
    flags: str | None = None  # Both forms of a flag, where they are not ``--name/--no-name``
    alone: bool = False  # Whether it may be given without its value, which then is True
    presets: str | None = None  # Kind of presets that can be named (:func:`common.files.preset_files`)
    patterns: bool = False  # Whether words may be quoted patterns of file names
    excludes: str = ""
    """Names of options that a run cannot have, too: one on the command line undoes the other in a file."""
    needs: str = ""  # Names of options without any of which it does nothing
    # Whether it belongs to a call, not to the run, whose own configuration leaves it out
    of_call: bool = False
    fixed: bool = False
    """Whether a continued run must keep its value. All others of a run may change, and the change is printed."""
    may_differ: bool = False  # Whether nodes need not agree about it, or others check that with better words
    hidden: bool = False  # Whether the help leaves it out
    heading: str = ""  # Heading in the help, if it is not that of the field's class
    values: str = ""  # What its values mean: the beginning of its help, where a table has it

    def may_be_path(self, text: str) -> bool:
        """Return whether a path may replace a preset's name, and ``text`` looks like one."""
        return self.presets in ("models", "clusters") or (self.presets is not None and text.endswith(".toml"))

    def complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete the placeholder's words in lower case, names of presets, and paths where it has FILE or DIR."""
        placeholder = self.metavar or ""
        names = re.findall("[a-z]+", placeholder)
        if self.presets is not None:
            names += sorted(
                preset_files(self.presets, ".jinja" if self.presets == "chat_templates" else ".toml")
            )
        paths = [CompletionItem(incomplete, type="file")] if re.search("FILE|DIR", placeholder) else []
        return [*(CompletionItem(name) for name in names if name.startswith(incomplete)), *paths]


def option(
    default: Any, metavar: str | None = None, type: click.ParamType | Sequence[str] | None = None, **more: Any
) -> Any:
    """Declare a field with this default to be an option of a click type, or of words to choose from.

    ``more`` are other attributes of :class:`Declaration`.
    """
    chosen = click.Choice(type) if isinstance(type, Sequence) else type
    return field(default=default, metadata={_KEY: Declaration(metavar, chosen, **more)})


def option_fields(cls: type) -> list[dataclasses.Field[Any]]:
    """Return the fields of a dataclass that are options, in the order of their declaration."""
    return [item for item in dataclasses.fields(cls) if _KEY in item.metadata]


def spelled(name: str) -> str:
    """Return a field's name as typed."""
    return f"--{name.replace('_', '-')}"


def declaration_of(item: dataclasses.Field[Any]) -> Declaration:
    """Return what a field says about its option."""
    declaration: Declaration = item.metadata[_KEY]
    return declaration


class WholeNumber(click.IntRange):
    """A whole number in a range; click's messages call it an integer range."""

    name = "whole number"


class TokenCount(WholeNumber):
    """A number of tokens, also as 64K (65,536) or 1M (1,048,576)."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and (match := re.fullmatch(r"(\d+)([KM])", value.strip().upper())):
            value = int(match[1]) << {"K": 10, "M": 20}[match[2]]
        return super().convert(value, param, ctx)


class FiniteFloat(click.FloatRange):
    """A number in a range; neither NaN, which is in no range and passes every comparison, nor infinity."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not math.isfinite(click.FLOAT.convert(value, param, ctx)):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return super().convert(value, param, ctx)


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


def _parse_budget(text: str) -> int:
    nbytes = parse_bytes(text)
    if nbytes <= 0:
        raise UserError(
            f"{text!r}: a budget must be more than 0 bytes. Leave the option out to use what there is."
        )
    return nbytes


SIZE = ParsedValue("size", parse_bytes)
BUDGET = ParsedValue("size", _parse_budget)  # A size in which something must fit
POSITIVE = WholeNumber(min=1)
COUNT = WholeNumber(min=0)
NOT_NEGATIVE = FiniteFloat(min=0)
ABOVE_ZERO = FiniteFloat(min=0, min_open=True)
BELOW_ONE = FiniteFloat(min=0, max=1, max_open=True)


def parse_days(text: str) -> float:
    """Return the days of ``--drive-life``, 0 for any."""
    try:
        days = 0.0 if text == "any" else float(text)
    except ValueError:
        days = math.nan
    if not 0 <= days < math.inf:
        raise UserError(f"{text!r} is neither a number of days nor any.")
    return days


DAYS = ParsedValue("days", parse_days)
