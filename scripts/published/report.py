"""Tables of what is planned next to what was published."""

from collections.abc import Iterable, Sequence

from published.choices import CLEARLY, all_testbeds, choice_of
from published.score import pairs, summary, values


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table with padded columns."""
    lines = [[str(cell) for cell in row] for row in (headings, *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))} |"
        for line in lines
    )


def published_choices() -> str:
    """The planner's choice on every testbed."""
    rows = []
    for testbed in all_testbeds():
        choice = choice_of(testbed)
        rows.append((
            testbed.paper, testbed.case, testbed.winner, choice.compared, choice.best.name, f"{choice.gain:+.1%}",
            choice.verdict, choice.reason,
        ))  # fmt: skip
    headings = ("paper", "case", "its winner", "ours of its systems", "ours of all", "faster", "", "by")
    return f"""### Choices with our engine

{table(headings, rows)}

A tie is planned less than {CLEARLY:.0%} faster than the paper's winner, which is within the planner's own error.
"""


def published_values() -> str:
    """Every measured value next to the planner's."""
    shown = [value for value in values() if value.mark != "baseline"]
    rows = [
        (
            value.paper, value.figure, value.case, value.strategy, f"{value.published:g}", f"{value.planned:.3g}",
            f"{value.error:+.0%}", value.unit, value.mark,
        )
        for value in shown
    ]  # fmt: skip
    headings = ("paper", "figure", "case", "system", "published", "planned", "error", "unit", "")
    wrong = [
        (a.paper, a.figure, a.case, a.strategy, b.strategy) for a, b, right in pairs(values()) if not right
    ]
    return f"""### Published values

{table(headings, rows)}

{summary(values())}

Pairs in the wrong order (the published order):

{table(("paper", "figure", "case", "better", "worse"), wrong)}
"""
