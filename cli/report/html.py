"""Parts of HTML pages: the frame with its styles, tables, bars, and charts as inline SVG.

Everything is readable without colors: a series has a name and a dash pattern, a bar its value.
"""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.units import Interval, format_seconds

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --soft: #5b6875; --line: #d5dbe1; --paper: #fff; --bar: #3567a8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6eaee; --soft: #9aa6b2; --line: #38424d; --paper: #14191f; --bar: #7fa9e0; }
}
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
  padding: 1rem; max-width: 72rem; }
h1 { font-size: 1.4rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1rem; margin: 0 0 .3rem; }
p { margin: .2rem 0 1rem; color: var(--soft); }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); gap: 1.2rem; }
section { min-width: 0; } section.wide { grid-column: 1 / -1; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--soft); font: 11px system-ui, sans-serif; }
svg .grid { stroke: var(--line); } svg .series { fill: none; stroke: var(--bar); stroke-width: 1.6; }
svg .second { stroke: var(--ink); stroke-dasharray: 5 3; } svg circle { fill: var(--ink); }
table { border-collapse: collapse; width: 100%; } td { padding: .15rem .6rem .15rem 0; vertical-align: top;
  overflow-wrap: anywhere; } td:first-child { color: var(--soft); white-space: nowrap; }
.bar { background: var(--line); height: .6rem; border-radius: .3rem; overflow: hidden; min-width: 5rem; }
svg .lane { stroke: var(--bar); stroke-width: 14; }
.bar i { display: block; height: 100%; background: var(--bar); }
pre { overflow-x: auto; background: color-mix(in srgb, var(--line) 35%, transparent); padding: .6rem; font-size: 12px; }
"""
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 480, 190, 56, 20, 8
_LANE, _LANE_PARTS = 22, 300  # Height of a lane, and its horizontal resolution


@dataclass(frozen=True)
class Series:
    """A line of a chart; values that are not finite are left out."""

    name: str
    steps: Sequence[float]
    values: Sequence[float | None]
    dots: bool = False  # Whether each value has a dot, for few values


def page(title: str, subtitle: str, sections: Sequence[str], data: str = "") -> str:
    """Return a whole page.

    Args:
        data: JSON for programs that read the page; without ``</``.
    """
    embedded = f'<script type="application/json" id="data">{data}</script>\n' if data else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{html.escape(title)}</h1>\n<p>{html.escape(subtitle)}</p>\n<main>\n"
        + "\n".join(sections)
        + f"\n</main>\n{embedded}</body>\n</html>\n"
    )


def section(heading: str, content: str, wide: bool = False) -> str:
    """Return a section under a heading; ``wide`` spans all columns."""
    return f"<section{' class=wide' if wide else ''}>\n<h2>{html.escape(heading)}</h2>\n{content}\n</section>"


def table(rows: Mapping[str, str]) -> str:
    cells = "\n".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(text)}</td></tr>" for name, text in rows.items()
    )
    return f"<table>\n{cells}\n</table>"


def bars(rows: Sequence[tuple[str, float, str]]) -> str:
    """Return bars, each with a name, its share of the whole (drawn up to 1), and a text."""
    cells = "\n".join(
        f"<tr><td>{html.escape(name)}</td>"
        f'<td><div class="bar"><i style="width:{min(1.0, max(0.0, part)):.1%}"></i></div>'
        f"{html.escape(text)}</td></tr>"
        for name, part, text in rows
    )
    return f"<table>\n{cells}\n</table>"


def lanes(rows: Mapping[str, Sequence[Interval]], begin: float, end: float) -> str:
    """Return lanes, one per name, that show when each was busy between ``begin`` and ``end``.

    Gaps shorter than :data:`_LANE_PARTS` can show are closed.
    """
    width, shortest = _WIDTH - 2 * _LEFT - 8, (end - begin) / _LANE_PARTS
    parts = [f'<svg viewBox="0 0 {_WIDTH} {len(rows) * _LANE + _BOTTOM}" role="img">']
    for number, (name, intervals) in enumerate(rows.items()):
        drawn: list[list[float]] = []
        for first, last in intervals:
            first, last = max(first, begin), min(last, end)
            if drawn and first < drawn[-1][1] + shortest:
                drawn[-1][1] = max(drawn[-1][1], last)
            elif first < last:
                drawn.append([first, last])
        y = number * _LANE + _LANE / 2
        parts.append(f'<text x="0" y="{y + 4:.0f}">{html.escape(name)}</text>')
        parts.append(f'<line class="grid" x1="{2 * _LEFT}" x2="{_WIDTH - 8}" y1="{y:.0f}" y2="{y:.0f}"/>')
        path = " ".join(
            f"M{2 * _LEFT + (first - begin) / (end - begin) * width:.1f} {y:.0f}"
            f"h{max(0.5, (last - first) / (end - begin) * width):.1f}"
            for first, last in drawn
        )
        parts.append(f'<path class="lane" d="{path}"/>')
    bottom = len(rows) * _LANE + _BOTTOM - 4
    parts.append(f'<text x="{2 * _LEFT}" y="{bottom}">0</text>')
    parts.append(f'<text x="{_WIDTH - 8}" y="{bottom}" text-anchor="end">{format_seconds(end - begin)}</text>')
    return "\n".join([*parts, "</svg>"])


def folded(summary: str, content: str) -> str:
    """Return content that opens with a click on its summary."""
    return f"<details><summary>{html.escape(summary)}</summary>\n{content}\n</details>"


def chart(series: Sequence[Series], unit: str = "") -> str:
    """Return lines over an axis of steps, each with its name and newest value."""
    points = [
        [(x, y) for x, y in zip(item.steps, item.values, strict=True) if y is not None and math.isfinite(y)]
        for item in series
    ]
    everything = [point for line in points for point in line]
    if not everything:
        return "<p>nothing yet</p>"
    xs, ys = zip(*everything, strict=True)
    low, high = min(ys), max(ys)
    if low == high:
        low, high = low - (abs(low) or 1) * 0.1, high + (abs(high) or 1) * 0.1
    first, last = min(xs), max(max(xs), min(xs) + 1)

    def x_of(x: float) -> float:
        return _LEFT + (x - first) / (last - first) * (_WIDTH - _LEFT - 8)

    def y_of(y: float) -> float:
        return _HEIGHT - _BOTTOM - (y - low) / (high - low) * (_HEIGHT - _BOTTOM - _TOP)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">']
    for part in (0.0, 0.5, 1.0):
        value = low + part * (high - low)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - 8}" y1="{y_of(value):.1f}" y2="{y_of(value):.1f}"/>'
        )
        parts.append(f'<text x="{_LEFT - 4}" y="{y_of(value) + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    parts.append(f'<text x="{_LEFT}" y="{_HEIGHT - 4}">step {first:g}</text>')
    parts.append(f'<text x="{_WIDTH - 8}" y="{_HEIGHT - 4}" text-anchor="end">{last:g}</text>')
    for number, (item, line) in enumerate(zip(series, points, strict=True)):
        if not line:
            continue
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in line)
        parts.append(f'<polyline class="series{" second" if number else ""}" points="{path}"/>')
        if item.dots or len(line) == 1:
            parts += [f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="2.5"/>' for x, y in line]
    parts.append("</svg>")
    legend = ", ".join(
        f"{'dashed' if number else 'solid'}: {item.name}" if len(series) > 1 else item.name
        for number, item in enumerate(series)
    )
    newest = "; ".join(f"{line[-1][1]:.4g}{unit} at step {line[-1][0]:g}" for line in points if line)
    return "\n".join(parts) + f"\n<p>{html.escape(legend)}: {html.escape(newest)}</p>"
