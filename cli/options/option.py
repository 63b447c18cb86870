"""What an option is: how a field of the settings declares one, and what click makes of it. Imports nothing slow."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Flag, auto
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
_KEY = "option"
"""Key in a field's metadata."""


# -- what a field says ------------------------------------------------------------------------------------------------


class Mode(Flag):
    """A mode is one of the things that ``finetune`` does. An option names the modes that read it; others refuse it."""

    TRAIN = auto()
    DEMO = auto()
    VERIFY = auto()
    CHECK = auto()
    PROFILE = auto()
    PROFILE_NODES = auto()
    PLAN_HERE = auto()
    PLAN_BY_NAME = auto()
    PLAN_RANKS = auto()
    PLAN_CLUSTER = auto()

    PLAN = PLAN_HERE | PLAN_BY_NAME | PLAN_RANKS | PLAN_CLUSTER
    STEP = TRAIN | PROFILE | PLAN_HERE | PLAN_BY_NAME | PLAN_RANKS
    """Modes that depend on a step of the engine."""
    MODEL = STEP | CHECK
    RUN = TRAIN | PLAN_HERE | PLAN_BY_NAME | PLAN_RANKS
    """Modes of a run of this program, trained or planned: a plan takes the options of its run."""
    BATCH = STEP | PROFILE_NODES | PLAN_CLUSTER
    PLACE = TRAIN | CHECK | PROFILE | PLAN_HERE
    """Modes that look at the drives of this machine."""
    NODES = TRAIN | PROFILE_NODES
    ALL = PLAN | MODEL | NODES | DEMO | VERIFY


class Only(Flag):
    """Runs that an option is for; given for any other, it is refused (:class:`cli.options.settings.Settings`)."""

    ANY = 0
    NODES = auto()
    """Runs with ``--nodes``."""
    ONE_MACHINE = auto()
    """Runs without ``--nodes``."""
    IN_MEMORY = auto()
    """Runs with ``--nodes`` and without ``--ssd``."""
    OUT_OF_CORE = auto()
    """All runs but those in memory."""
    CHOSEN_STRATEGY = auto()
    """Runs whose strategy is not given, or ``--strategy auto``."""
    LORA = auto()
    SAMPLE = auto()


@dataclass(frozen=True)
class Declaration:
    """A declaration is what a field says about its option, next to name, type, default and docstring (the help)."""

    metavar: str | None = None
    """Placeholder for the value in the help."""
    type: click.ParamType | None = None
    """Type of the value, or of each of several words; None: as the field's annotation says."""
    modes: Mode = Mode.TRAIN
    """Modes that read it; none, if it acts while the command line is read."""
    only: Only = Only.ANY
    """Runs that it is for; with several, all must hold."""
    flags: str | None = None
    """Both forms of a flag, where they are not ``--name/--no-name``."""
    presets: str | None = None
    """Kind of presets that can be named (:func:`common.files.preset_files`)."""
    patterns: bool = False
    """Whether words may be quoted patterns of file names."""
    excludes: str | None = None
    """Name of an option of which a run cannot have both: one on the command line undoes the other in a file."""
    of_call: bool = False
    """Whether it belongs to a call, not to the run, whose own configuration leaves it out."""
    fixed: bool = False
    """Whether a continued run must keep its value. All others of a run may change, and the change is printed."""
    may_differ: bool = False
    """Whether nodes need not agree about it, or others check that with better words."""

    @property
    def may_be_path(self) -> bool:
        """Whether a path may replace a preset's name."""
        return self.presets in ("models", "clusters")

    def complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete names of presets, and paths where one may stand instead."""
        assert self.presets is not None
        names = [CompletionItem(name) for name in sorted(preset_files(self.presets)) if name.startswith(incomplete)]
        return names + ([CompletionItem(incomplete, type="file")] if self.may_be_path else [])


def option(
    default: Any = dataclasses.MISSING,
    metavar: str | None = None,
    type: click.ParamType | Sequence[str] | None = None,
    **more: Any,
) -> Any:
    """Declare a field of a dataclass to be an option; its docstring is the help.

    Args:
        default: of the field; without one, the field must be given, and the option has no default.
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
    """Return a field's name as it is typed."""
    return f"--{name.replace('_', '-')}"


def declaration_of(item: dataclasses.Field[Any]) -> Declaration:
    """Return what a field says about its option."""
    declaration: Declaration = item.metadata[_KEY]
    return declaration


# -- what click makes of it -------------------------------------------------------------------------------------------


class GroupedOption(click.Option):
    """An option that knows its heading; with ``words``, it takes all words up to the next option.

    A flag has two forms, ``--resume`` and ``--no-resume``, so that the command line can take back what a file says; the
    help shows the one that changes something.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        group: str,
        words: bool = False,
        declaration: Declaration | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(names, multiple=words, **kwargs)
        self.group = group
        self.words = words
        self.declaration = declaration or Declaration()

    @classmethod
    def of_field(
        cls, group: str, item: dataclasses.Field[Any], text: str, callback: Callable[..., Any] | None = None
    ) -> "GroupedOption":
        """Make the option that a field declares.

        Args:
            group: its heading.
            item: the field.
            text: the help.
            callback: for options that act while the command line is read, before all others.
        """
        declared = declaration_of(item)
        kwargs: dict[str, Any] = {"metavar": declared.metavar, "type": declared.type, "help": text}
        name = spelled(item.name)
        if item.type is bool:
            kwargs["is_flag"] = True
            if callback is None:
                name = declared.flags or f"{name}/--no-{name.removeprefix('--')}"
        elif declared.type is None and Path in (item.type, *get_args(item.type)):
            kwargs["type"] = click.Path(path_type=Path)
        if declared.presets is not None:
            kwargs["shell_complete"] = declared.complete
        if callback is not None:
            kwargs |= {"is_eager": True, "callback": callback, "expose_value": bool(declared.modes)}
        words = get_origin(item.type) is tuple
        if not words and item.default not in (None, dataclasses.MISSING):
            kwargs |= {"default": item.default, "show_default": item.type is not bool}
        return cls([name], group=group, words=words, declaration=declared, **kwargs)

    @property
    def shown(self) -> str:
        """The form that people type: ``--no-save`` for a flag that is set unless they do."""
        return (self.secondary_opts if self.is_flag and self.default is True else self.opts)[0]

    @property
    def plain_default(self) -> Any:
        """Its value where nobody gives one; None: none."""
        return self.to_info_dict()["default"]

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
    """Return a number, or fail with words where click says ``0 is not in the range x>=1``."""
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
