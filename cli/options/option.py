"""What an option is: how a field declares one, the words it takes, and what click makes of it. Imports nothing slow."""

import ast
import dataclasses
import importlib.util
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Flag, auto
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_origin

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from common.errors import FinetuneError, UserError
from common.files import preset_files
from common.units import parse_bytes


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
_KEY = "option"  # Key in a field's metadata


# -- what a field says ------------------------------------------------------------------------------------------------


class Command(Flag):
    """Commands of ``finetune``; an option names those that have it."""

    TRAIN = auto()
    PLAN = auto()
    CHECK = auto()
    PROFILE = auto()
    VERIFY = auto()
    EXPORT = auto()
    EVALUATE = auto()
    DEMO = auto()

    RUN = TRAIN | PLAN
    """A plan takes the options of its run."""
    STEP = RUN | PROFILE
    MODEL = STEP | CHECK
    ALL = MODEL | VERIFY | EXPORT | EVALUATE | DEMO
    SOURCE = MODEL | EXPORT | EVALUATE
    """Commands that read a model."""
    SHAPE = STEP | EVALUATE


@dataclass(frozen=True)
class Declaration:
    """A declaration is what a field says about its option, next to name, type, default and docstring (the help)."""

    metavar: str | None = None  # Placeholder for the value in the help
    type: click.ParamType | None = None
    """Type of the value, or of each of several words; None: as the field's annotation says."""
    commands: Command = Command.RUN  # Commands that have it
    flags: str | None = None  # Both forms of a flag, where they are not ``--name/--no-name``
    presets: str | None = None  # Kind of presets that can be named (:func:`common.files.preset_files`)
    patterns: bool = False  # Whether words may be quoted patterns of file names
    excludes: str | None = None
    """Name of an option of which a run cannot have both: one on the command line undoes the other in a file."""
    of_call: bool = False  # Whether it belongs to a call, not to the run, whose own configuration leaves it out
    fixed: bool = False
    """Whether a continued run must keep its value. All others of a run may change, and the change is printed."""
    may_differ: bool = False  # Whether nodes need not agree about it, or others check that with better words
    hidden: bool = False  # Whether the help leaves it out

    def may_be_path(self, text: str) -> bool:
        """Return whether a path may replace a preset's name, and ``text`` looks like one."""
        return self.presets in ("models", "clusters") or (self.presets is not None and text.endswith(".toml"))

    def complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete names of presets, and paths, which may replace them."""
        assert self.presets is not None
        names = [CompletionItem(name) for name in sorted(preset_files(self.presets)) if name.startswith(incomplete)]
        return [*names, CompletionItem(incomplete, type="file")]


def option(
    default: Any, metavar: str | None = None, type: click.ParamType | Sequence[str] | None = None, **more: Any
) -> Any:
    """Declare a field of a dataclass to be an option.

    Args:
        default: of the field.
        metavar: see :class:`Declaration`, as for all others.
        type: a type of click's, or all words that can be chosen.
        more: other attributes of :class:`Declaration`.
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


@cache
def help_texts(module: str) -> dict[str, str]:
    """Return the first paragraph below each annotated attribute of a module's classes, on one line; ``lr`` is --lr.

    Python keeps none of them: they are read from the source, so that the module need not be imported.
    """
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    texts = {}
    for node in ast.parse(Path(spec.origin).read_text()).body:
        for item, text in pairwise(node.body if isinstance(node, ast.ClassDef) else []):
            match item, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(docstring))):
                    paragraph = re.sub("``([a-z_]+)``", lambda word: spelled(word[1]), docstring.split("\n\n")[0])
                    texts[name] = " ".join(paragraph.split())
    return texts


# -- what click makes of it -------------------------------------------------------------------------------------------


class GroupedOption(click.Option):
    """An option that knows its heading; with ``words``, it takes all words up to the next option.

    A flag has two forms, ``--resume`` and ``--no-resume``, so that the command line can take back what a file says; the
    help shows the one that changes something.
    """

    def __init__(
        self, names: Sequence[str], group: str, declaration: Declaration, words: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(names, multiple=words, **kwargs)
        self.group, self.declaration, self.words = group, declaration, words

    @classmethod
    def of_field(
        cls, group: str, item: dataclasses.Field[Any], text: str, callback: Callable[..., Any] | None = None
    ) -> "GroupedOption":
        """Make the option that a field declares, under a heading; with a ``callback``, it acts before all others."""
        declared, name = declaration_of(item), spelled(item.name)
        kwargs: dict[str, Any] = {"metavar": declared.metavar, "type": declared.type, "help": text}
        kwargs["hidden"] = declared.hidden
        if item.type is bool:
            kwargs["is_flag"] = True
            name = declared.flags or f"{name}/--no-{name.removeprefix('--')}"
        elif declared.type is None and Path in (item.type, *get_args(item.type)):
            kwargs["type"] = click.Path(path_type=Path)
        if declared.presets is not None:
            kwargs["shell_complete"] = declared.complete
        if callback is not None:
            kwargs |= {"is_eager": True, "callback": callback}
        words = get_origin(item.type) is tuple
        if not words and item.default not in (None, ""):
            kwargs |= {"default": item.default, "show_default": item.type is not bool}
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
        """Return it with a value, as typed."""
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
        """Convert and check; errors in a file name the file."""
        source = ctx.get_parameter_source(self.name or "")
        if source in (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP):
            ctx.meta.setdefault(WRITTEN, {})[self.name] = value
        try:
            return super().process_value(ctx, value)
        except click.BadParameter as error:
            if source is not ParameterSource.DEFAULT_MAP:
                raise
            raise click.BadParameter(f"{error.message} (It is in {ctx.params['config']}.)", ctx, self) from error


class WholeNumber(click.IntRange):
    """An integer in a range; the error message spells the range out."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return _in_range(self, click.INT.convert(value, param, ctx), value, param, ctx)


class TokenCount(WholeNumber):
    """A number of tokens, also as 64K (65,536) or 1M (1,048,576)."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and (match := re.fullmatch(r"(\d+)([KM])", value.strip().upper())):
            value = int(match[1]) << {"K": 10, "M": 20}[match[2]]
        return super().convert(value, param, ctx)


class FiniteFloat(click.FloatRange):
    """A number in a range; neither NaN, which is in no range and passes every comparison, nor infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = click.FLOAT.convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return _in_range(self, number, value, param, ctx)


def _in_range(
    numbers: click.IntRange | click.FloatRange,
    number: Any,
    written: Any,
    param: click.Parameter | None,
    ctx: click.Context | None,
) -> Any:
    low, high, wrong = numbers.min, numbers.max, None
    if low is not None and (number <= low if numbers.min_open else number < low):
        wrong = f"{'more than' if numbers.min_open else 'at least'} {low:g}"
    if high is not None and (number >= high if numbers.max_open else number > high):
        wrong = f"{'less than' if numbers.max_open else 'at most'} {high:g}"
    if wrong is not None:
        numbers.fail(f"it must be {wrong}, not {written}.", param, ctx)
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


def _parse_budget(text: str) -> int:
    nbytes = parse_bytes(text)
    if nbytes <= 0:
        raise UserError(f"{text!r}: a budget must be more than 0 bytes. Leave the option out to use what there is.")
    return nbytes


SIZE = ParsedValue("size", parse_bytes)
BUDGET = ParsedValue("size", _parse_budget)
"""A size in which something must fit."""
POSITIVE = WholeNumber(min=1)
COUNT = WholeNumber(min=0)
NOT_NEGATIVE = FiniteFloat(min=0)
ABOVE_ZERO = FiniteFloat(min=0, min_open=True)
BELOW_ONE = FiniteFloat(min=0, max=1, max_open=True)


@dataclass(frozen=True)
class Fraction:
    """A part of a whole, less than all of it."""

    value: float

    @classmethod
    def parse(cls, text: str) -> "Fraction":
        """Parse ``"2%"`` or ``"0.02"``."""
        try:
            value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
        except ValueError:
            value = math.nan
        if not 0 < value <= 0.5:
            raise UserError(f"{text!r} is not a part such as 2% or 0.02, up to 50%.")
        return cls(value)

    def __str__(self) -> str:
        return f"{self.value:g}"


def parse_days(text: str) -> float:
    """Return the days of ``--drive-life``, 0 for any."""
    try:
        days = 0.0 if text == "any" else float(text)
    except ValueError:
        days = math.nan
    if not 0 <= days < math.inf:
        raise UserError(f"{text!r} is neither a number of days nor any.")
    return days


def check_column(text: str) -> str:
    """Return ``prompt=question`` unchanged."""
    name, equals, column = text.partition("=")
    if not (name and equals and column):
        raise UserError(f"{text!r} is not NAME=COLUMN, as in prompt=question.")
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
