"""Draw pages: sections, tables, bars, and charts as inline SVG, all readable without colors."""

import html
import math
from collections.abc import Iterable, Mapping, Sequence

from common.units import format_bytes, format_seconds

_STYLE = """
:root { color-scheme: light dark; --soft: light-dark(#5b6875, #9aa6b2); --line: light-dark(#d5dbe1, #38424d);
  --series: light-dark(#3567a8, #7fa9e0); }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: CanvasText; background: Canvas; margin: 0 auto; padding: 1rem;
  max-width: 72rem; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; margin: 0; }
h2 { font-size: 1rem; margin: 0 0 .3rem; }
p { margin: .2rem 0 1rem; color: var(--soft); }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); gap: 1.2rem; }
section { min-width: 0; } section.wide { grid-column: 1 / -1; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
svg .axis { stroke: var(--line); } svg .line { fill: none; stroke: var(--series); stroke-width: 1.6; }
svg .second { stroke: CanvasText; stroke-dasharray: 5 3; } svg circle { fill: CanvasText; }
table { border-collapse: collapse; width: 100%; } td { padding: .15rem .6rem .15rem 0; vertical-align: top; }
td:first-child { color: var(--soft); white-space: nowrap; width: 1%; }
progress { width: 100%; height: .7rem; display: block; accent-color: var(--series); }
pre { white-space: pre-wrap; margin: 0; font-size: 12px; }
"""
# Of a chart, and of the part that has its lines
_WIDTH = 360
_HEIGHT = 170
_TOP = 20
_BOTTOM = 145
_MARGIN = 6

Points = Sequence[tuple[float, float | None]]  # Steps and values; None: not finite


def page(title: str, heading: str, subtitle: str, sections: Iterable[str], reload_s: int = 0) -> str:
    """Return a whole page, which a browser loads again after ``reload_s`` seconds unless they are 0."""
    reload = f'<meta http-equiv="refresh" content="{reload_s}">\n' if reload_s else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n{reload}'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{html.escape(heading)}</h1>\n<p>{html.escape(subtitle)}</p>\n<main>\n"
        + "\n".join(sections)
        + "\n</main>\n</body>\n</html>\n"
    )


def section(heading: str, content: str, wide: bool = False) -> str:
    """Return a section under a heading; ``wide`` spans all columns."""
    return f"<section{' class=wide' if wide else ''}>\n<h2>{html.escape(heading)}</h2>\n{content}\n</section>"


def table(rows: Iterable[tuple[str, str]]) -> str:
    """Return rows of a name and a text."""
    return _table((name, html.escape(text)) for name, text in rows)


def busy_bars(busy: Mapping[str, float], whole: float) -> str:
    """Return the seconds that a step of ``whole`` seconds kept each resource busy, with bars."""
    return _table(
        (name, _bar(f"{format_seconds(seconds)}, {seconds / whole:.0%}", seconds / whole))
        for name, seconds in busy.items()
    )


def memory_bars(tiers: Iterable[tuple[str, float, float | None]]) -> str:
    """Return the bytes used of each tier, and with bars where it is known what there is."""
    return _table(
        (
            name,
            _bar(f"{format_bytes(used)} of {format_bytes(there)}", used / there)
            if there
            else format_bytes(used),
        )
        for name, used, there in tiers
    )


def _bar(text: str, share: float) -> str:
    return f'{text}<progress value="{share:.3f}" aria-label="{text}"></progress>'


def _table(rows: Iterable[tuple[str, str]]) -> str:
    cells = "\n".join(f"<tr><td>{html.escape(name)}</td><td>{cell}</td></tr>" for name, cell in rows)
    return f"<table>\n{cells}\n</table>"


def chart(name: str, lines: Mapping[str, Points]) -> str:
    """Return lines over an axis of steps, a second one dashed with a dot for each value; "" without finite values.

    Labels are the smallest and the largest value, the first and the last step, and each line's newest value.
    """
    finite = {
        line: [(x, y) for x, y in points if y is not None and math.isfinite(y)]
        for line, points in lines.items()
    }
    finite = {line: points for line, points in finite.items() if points}
    if not finite:
        return ""
    xs, ys = zip(*(point for points in finite.values() for point in points), strict=True)
    first, last, low, high = min(xs), max(xs), min(ys), max(ys)

    def at(x: float, y: float) -> tuple[float, float]:
        right = (x - first) / (last - first) if last > first else 0.5
        up = (y - low) / (high - low) if high > low else 0.5
        return _MARGIN + right * (_WIDTH - 2 * _MARGIN), _BOTTOM - up * (_BOTTOM - _TOP)

    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(name)}">',
        f'<path class="axis" d="M0 {_TOP}H{_WIDTH}M0 {_BOTTOM}H{_WIDTH}"/>',
        f'<text x="0" y="{_TOP - 6}">{high:,.6g}</text>',
        f'<text x="0" y="{_HEIGHT - 10}">{low:,.6g}</text>' if high > low else "",
        f'<text x="{_WIDTH}" y="{_HEIGHT - 10}" text-anchor="end">step {first:,} to {last:,}</text>',
    ]
    for number, points in enumerate(finite.values()):
        places = [at(x, y) for x, y in points]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline class="line{" second" if number else ""}" points="{joined}"/>')
        if number or len(points) == 1:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in places]
    newest = ", ".join(
        f"{line} {points[-1][1]:,.4g} (step {points[-1][0]:,}{', dashed' if number else ''})"
        for number, (line, points) in enumerate(finite.items())
    )
    return "\n".join(parts) + f"\n</svg>\n<p>{html.escape(newest)}</p>"
