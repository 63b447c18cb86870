"""Planned next to published: every value, and how well values and rankings agree."""

import tomllib
from dataclasses import dataclass
from functools import cache
from itertools import combinations, groupby
from pathlib import Path
from statistics import median
from typing import Any

from published.cases import FIGURES

DIFFERENT = 1.10  # systems whose values differ by more are ranked


@dataclass(frozen=True)
class Value:
    """A published value and what the planner says of it."""

    paper: str
    figure: str
    case: str
    strategy: str
    published: float
    planned: float
    unit: str
    better: str
    mark: str = ""  # ``baseline``, ``calibrates``, ``chosen``, ``slip`` or ``counted``
    ordered: bool = False  # Whether the order of systems follows from what they are

    @property
    def error(self) -> float:
        """Planned over published, less one."""
        return self.planned / self.published - 1 if self.published else float(self.planned != 0)


@cache
def values() -> list[Value]:
    """Plan everything in ``figures.toml``."""
    figures: list[dict[str, Any]] = tomllib.loads(
        Path(__file__).with_name("figures.toml").read_text(encoding="utf-8")
    )["figure"]
    planned = []
    for figure in figures:
        plan = FIGURES[figure["paper"], figure["figure"]]
        chosen, ordered = figure.get("chosen"), figure.get("ordered", False)
        for case, system, published, *marks in figure["rows"]:
            mark = marks[0] if marks else "chosen" if chosen else ""
            planned.append(
                Value(
                    figure["paper"], figure["figure"], case, system, published, plan(case, system), figure["unit"],
                    figure["better"], mark, ordered,
                )
            )  # fmt: skip
    return planned


def pairs(planned: list[Value]) -> list[tuple[Value, Value, bool]]:
    """Every pair of systems of one case that differ, the better one first, and whether it is planned to be better.

    Pairs that cannot come out wrong, and those of which both values were known, do not count.
    """
    key = lambda value: (value.paper, value.figure, value.unit, value.case)  # noqa: E731
    result = []
    for _, group in groupby(sorted(planned, key=key), key):
        for pair in combinations(group, 2):
            low, high = sorted(pair, key=lambda value: value.published)
            known = all(value.mark in ("chosen", "calibrates") for value in pair)
            if high.published > DIFFERENT * low.published and not low.ordered and not known:
                best, other = (high, low) if high.better == "higher" else (low, high)
                result.append((best, other, high.planned > low.planned))
    return result


def summary(planned: list[Value]) -> dict[str, Any]:
    """Return the shares and errors of all values that the planner was not given."""
    compared = [value for value in planned if value.mark not in ("baseline", "calibrates", "chosen", "slip")]
    errors = [abs(value.error) for value in compared]
    ranked = pairs(planned)
    return {
        "values": len(compared),
        "median_error": median(errors),
        "largest_error": max(errors),
        "above_50_percent": sum(error > 0.5 for error in errors),
        "pairs": len(ranked),
        "ranked_right": sum(right for _, _, right in ranked),
    }
