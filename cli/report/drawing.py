"""Draw pages: sections, tables, bars, and charts as inline SVG, all readable without colors."""

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from common.units import Interval, format_bytes, format_seconds

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --soft: #5b6875; --line: #d5dbe1; --paper: #fff; --bar: #3567a8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6eaee; --soft: #9aa6b2; --line: #38424d; --paper: #14191f; --bar: #7fa9e0; }
}
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
  padding: 1rem; max-width: 72rem; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; margin: 0; }
h2 { font-size: 1rem; margin: 0 0 .3rem; }
p { margin: .2rem 0 1rem; color: var(--soft); }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); gap: 1.2rem; }
section { min-width: 0; } section.wide { grid-column: 1 / -1; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
svg .grid { stroke: var(--line); } svg .series { fill: none; stroke: var(--bar); stroke-width: 1.6; }
svg .second { stroke: var(--ink); stroke-dasharray: 5 3; }
svg circle { fill: var(--ink); }
p svg { display: inline; width: 1.6rem; height: .7rem; } p span { white-space: nowrap; margin-right: 1rem; }
table { border-collapse: collapse; width: 100%; } td { padding: .15rem .6rem .15rem 0; vertical-align: top; }
td:first-child { color: var(--soft); white-space: nowrap; width: 1%; }
.share { display: grid; grid-template-columns: 1fr auto; column-gap: .6rem; margin-bottom: .4rem; }
.share :first-child { color: var(--soft); }
.bar { grid-column: 1 / -1; background: var(--line); fill: var(--bar); height: .7rem; border-radius: .2rem; }
pre { white-space: pre-wrap; background: color-mix(in srgb, var(--line) 35%, transparent); padding: .6rem;
  font-size: 12px; }
"""
_WIDTH, _HEIGHT, _RIGHT, _BOTTOM, _TOP = 360, 170, 10, 20, 8
_CHARACTER = 8.0  # Width of a digit, rounded up
_PARTS = 300  # Horizontal resolution of a bar


@dataclass(frozen=True)
class Series:
    """A line of a chart; values that are not finite are left out."""

    name: str
    steps: Sequence[float]
    values: Sequence[float | None]
    style: str = ""  # `second`: dashed, with a dot for each value


def page(title: str, heading: str, subtitle: str, sections: Sequence[str], data: str = "", reload_s: int = 0) -> str:
    """Return a whole page, which a browser loads again after ``reload_s`` seconds unless they are 0.

    ``data`` is JSON, without ``</``, for programs that read the page.
    """
    embedded = f'<script type="application/json" id="data">{data}</script>\n' if data else ""
    reload = f'<meta http-equiv="refresh" content="{reload_s}">\n' if reload_s else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n{reload}'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{html.escape(heading)}</h1>\n<p>{html.escape(subtitle)}</p>\n<main>\n"
        + "\n".join(sections)
        + f"\n</main>\n{embedded}</body>\n</html>\n"
    )


def section(heading: str, content: str, wide: bool = False) -> str:
    """Return a section under a heading; ``wide`` spans all columns."""
    return f"<section{' class=wide' if wide else ''}>\n<h2>{html.escape(heading)}</h2>\n{content}\n</section>"


def table(rows: Iterable[tuple[str, str]]) -> str:
    cells = "\n".join(f"<tr><td>{html.escape(name)}</td><td>{html.escape(text)}</td></tr>" for name, text in rows)
    return f"<table>\n{cells}\n</table>"


def _bar(name: str, text: str, parts: Iterable[tuple[float, float]]) -> str:
    """Return a bar under its name and a text, filled in ``parts``: beginning and length, of 1."""
    path = "".join(f"M{_PARTS * x:.1f} 0h{max(0.5, _PARTS * length):.1f}v10H{_PARTS * x:.1f}z" for x, length in parts)
    return (
        f'<div class="share"><span>{html.escape(name)}</span><span>{html.escape(text)}</span>'
        f'<svg class="bar" viewBox="0 0 {_PARTS} 10" preserveAspectRatio="none" aria-hidden="true">'
        f'<path d="{path}"/></svg></div>'
    )


def step_bars(busy: Mapping[str, float], whole: float, spans: Mapping[str, Sequence[Interval]] | None = None) -> str:
    """Return bars of the seconds that a step of ``whole`` seconds kept each resource busy.

    With ``spans``, when it did, a bar is drawn from the first of all these times to the last.
    """
    ends = [end for each in (spans or {}).values() for span in each for end in span]
    bars = []
    for name, seconds in busy.items():
        parts = [(0.0, min(1.0, seconds / whole))]
        if ends:
            parts = _joined((spans or {}).get(name, ()), min(ends), max(ends))
        bars.append(_bar(name, f"{format_seconds(seconds)}, {seconds / whole:.0%}", parts))
    return "\n".join(bars)


def _joined(spans: Sequence[Interval], begin: float, end: float) -> list[tuple[float, float]]:
    """Return parts of the time between ``begin`` and ``end``, without gaps too short to show."""
    joined: list[list[float]] = []
    for first, last in spans:
        first, last = max(first, begin), min(last, end)
        if joined and first < joined[-1][1] + (end - begin) / _PARTS:
            joined[-1][1] = max(joined[-1][1], last)
        elif first < last:
            joined.append([first, last])
    return [((first - begin) / (end - begin), (last - first) / (end - begin)) for first, last in joined]


def memory_bars(rows: Iterable[tuple[str, float, float | None]], what: str = "") -> str:
    """Return bars of bytes: a name, what is used, and what there is, if that is known."""
    return "\n".join(
        _bar(
            name,
            format_bytes(used) + (f" of {format_bytes(there)}{what}" if there else ""),
            [(0.0, min(1.0, used / there) if there else 0.0)],
        )
        for name, used, there in rows
    )


def folded(summary: str, content: str) -> str:
    """Return content that opens with a click on its summary."""
    return f"<details><summary>{html.escape(summary)}</summary>\n{content}\n</details>"


def ticks(low: float, high: float) -> list[float]:
    """Return two to six round values between two: multiples of 1, 2, or 5 times a power of ten."""
    least = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(least))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
    return [step * number for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def chart(name: str, series: Sequence[Series]) -> str:
    """Return lines over an axis of steps, and a legend with their newest values."""
    lines = [
        (item, [(x, y) for x, y in zip(item.steps, item.values, strict=True) if y is not None and math.isfinite(y)])
        for item in series
    ]
    lines = [(item, points) for item, points in lines if points]
    if not lines:
        return "<p>nothing yet</p>"
    xs, ys = zip(*(point for _, points in lines for point in points), strict=True)
    low, high = min(ys), max(ys)
    if low == high:
        low, high = low - (abs(low) or 1) * 0.1, high + (abs(high) or 1) * 0.1
    first, last = min(xs), max(max(xs), min(xs) + 1)
    labels = {y: f"{y:,.6g}" for y in ticks(low, high)}
    left = _CHARACTER * max(map(len, labels.values())) + 6

    def x_of(x: float) -> float:
        return left + (x - first) / (last - first) * (_WIDTH - left - _RIGHT)

    def y_of(y: float) -> float:
        return _HEIGHT - _BOTTOM - (y - low) / (high - low) * (_HEIGHT - _BOTTOM - _TOP)

    title = html.escape(f"{name} from step {min(xs):,} to {max(xs):,}")
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}">']
    for y, label in labels.items():
        at = y_of(y)
        parts.append(f'<line class="grid" x1="{left:.0f}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{left - 4:.0f}" y="{at + 4:.1f}" text-anchor="end">{label}</text>')
    for x in (x for x in ticks(first, last) if x == round(x)):
        label = f"{x:,.0f}"
        at = min(x_of(x), _WIDTH - _CHARACTER / 2 * len(label))  # in the picture, also at its right edge
        parts.append(f'<text x="{at:.1f}" y="{_HEIGHT - 4}" text-anchor="middle">{label}</text>')
    for item, points in lines:
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in points)
        parts.append(f'<polyline class="series {item.style}" points="{path}"/>')
        if item.style == "second" or len(points) == 1:
            parts += [f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="2.5"/>' for x, y in points]
    legend = "".join(
        '<span><svg viewBox="0 0 26 10" aria-hidden="true">'
        f'<line class="series {item.style}" x1="0" x2="24" y1="5" y2="5"/></svg> '
        f"{html.escape(item.name)} {points[-1][1]:,.4g} (step {points[-1][0]:,})</span>"
        for item, points in lines
    )
    return "\n".join(parts) + f"\n</svg>\n<p>{legend}</p>"
