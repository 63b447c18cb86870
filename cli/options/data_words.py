"""Words that options about data take: ``a.jsonl=0.7``, ``prompt=question``, ``2%``. Imports nothing slow."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError


@dataclass(frozen=True)
class Fraction:
    """A part of a whole, less than all of it."""

    value: float

    @classmethod
    def parse(cls, text: str) -> "Fraction":
        """Parse ``"2%"`` or ``"0.02"``.

        Raises:
            UserError: neither, or not between nothing and half.
        """
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
    """Return the days of ``--drive-life``, 0 for any.

    Raises:
        UserError: if it is neither a number above 0 nor any.
    """
    try:
        days = 0.0 if text == "any" else float(text)
    except ValueError:
        days = math.nan
    if not 0 <= days < math.inf:
        raise UserError(f"{text!r} is neither a number of days nor any.")
    return days


def check_column(text: str) -> str:
    """Return ``prompt=question`` as it is.

    Raises:
        UserError: it is no pair of names.
    """
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
    """Return data sets, each with its files and its weight. Without weights, all files are one data set.

    Raises:
        UserError: some have weights, and others have none.
    """
    split = [split_weight(word) for word in words]
    without = [name for name, weight in split if weight is None]
    if len(without) == len(split):
        return [(tuple(words), None)] if words else []
    if without:
        raise UserError(f"--data: {without[0]} has no weight, and others have: give each one, FILE=0.5.")
    return [((name,), weight) for name, weight in split]
