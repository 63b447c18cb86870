"""The pages of a run and of a plan: tables, bars, and charts as inline SVG, all readable without colors."""

import html
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.job.job import Job
from cli.report.results import RESOURCES
from common.files import replace_file
from common.hardware.drives import warranted_bytes
from common.store.errors import described
from common.units import Interval, format_bytes, format_count, format_seconds

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


def busy_bars(busy: Mapping[str, float], whole: float) -> str:
    """Return bars of the seconds that a step kept each resource busy, and of the ``whole`` step."""
    rows = [(name, value / whole, f"{format_seconds(value)}, {value / whole:.0%}") for name, value in busy.items()]
    return bars([*rows, ("the step", 1.0, format_seconds(whole))])


def memory_bars(rows: Sequence[tuple[str, float, float | None]], what: str = "") -> str:
    """Return bars of bytes: a name, what is used, and what there is, if that is known."""
    return bars(
        [
            (
                name,
                used / there if there else 0.0,
                format_bytes(used) + (f" of {format_bytes(there)}{what}" if there else ""),
            )
            for name, used, there in rows
        ]
    )


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


PAGE = "index.html"
MOST_POINTS = 1000  # Points of a curve on the page: of longer runs, every second, third, ... step, and the newest.
BETWEEN_S = 10.0  # Seconds from one writing of the page to the next, unless there is something to see at once
_GIB = 1 << 30
Lanes = Mapping[str, Sequence[Interval]]  # When each resource was busy, by name in :data:`RESOURCES`
_LOSS, _EVALUATION = "loss_metrics/global_avg_loss", "validation_metrics/loss"
_SECONDS = "time_metrics/end_to_end(s)"
_TIERS = {"device": "memory/max_active(GiB)", "host": "memory/host(GiB)", "SSD": "memory/ssd(GiB)"}
_CURVES = {
    "loss": _LOSS, "evaluation": _EVALUATION, "gradient norm": "grad_norm", "learning rate": "lr",
    "tokens per second": "throughput(tps)", "seconds per step": "time_metrics/end_to_end(s)",
}  # fmt: skip
"""Curves by their names on the page, and their metrics."""


@dataclass(frozen=True)
class PageFacts:
    """Facts on the page that do not change."""

    title: str
    subtitle: str
    about: Mapping[str, str]  # Model, machine, data and so on, in words
    steps: int
    how_to_continue: str
    config: str  # The run's configuration file
    budgets: Mapping[str, float]  # Bytes that the plan gives each tier, by its metric's name
    endurance_bytes: float | None = None  # Bytes that the drives are warranted for; None: unknown


class RunPage:
    """Rewrites a run's page from its metrics file."""

    def __init__(self, facts: PageFacts, metrics: Path) -> None:
        self._facts, self._metrics, self._next_time = facts, metrics, 0.0
        self._lanes: Lanes = {}
        self.path = metrics.with_name(PAGE)

    def update(self, at_once: bool = False, lanes: Lanes | None = None) -> None:
        """Write the page if it is time to, or ``at_once``.

        Args:
            lanes: when the newest step kept each resource busy; None if no step has ended.
        """
        self._lanes = self._lanes if lanes is None else lanes
        if not at_once and time.monotonic() < self._next_time:
            return
        entries = read_metrics(self._metrics)
        with described("writing", self.path):
            replace_file(self.path, run_page(self._facts, entries, self._lanes))
        # A long run's file takes longer to read: never more than a small part of the time goes there.
        self._next_time = time.monotonic() + max(BETWEEN_S, len(entries) / 500)


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file, without those that a crash has cut off."""
    entries = []
    for line in file.read_text(errors="replace").splitlines() if file.exists() else []:
        try:
            entries.append(dict(json.loads(line)))
        except (ValueError, TypeError):
            continue
    return entries


def facts_of(job: Job, plan: Mapping[str, Any], config: str) -> PageFacts:
    lines = job.header().replace("\n         ", " ").splitlines()
    about = {line[:8].strip(): line[9:].strip() for line in lines}
    return PageFacts(
        title=job.output.name,
        subtitle=f"{job.architecture}, {format_count(job.parameters)} parameters, {job.steps:,} steps",
        about=about,
        steps=job.steps,
        how_to_continue=job.settings.how_to_continue,
        config=config,
        budgets={
            "memory/max_active(GiB)": float(plan.get("device_bytes", 0)),
            "memory/host(GiB)": float(plan.get("host_bytes", 0)),
            "memory/ssd(GiB)": float(job.store_bytes),
        },
        endurance_bytes=warranted_bytes(job.ssd),
    )


def run_page(facts: PageFacts, entries: list[dict[str, Any]], busy: Lanes | None = None) -> str:
    """Return the page.

    Args:
        entries: lines of the metrics file.
        busy: when the newest step kept each resource busy, if known.
    """
    curves = {name: _curve(entries, metric) for name, metric in _CURVES.items()}
    # The line of a step whose process was killed before it wrote it has no times.
    steps = [entry for entry in entries if "time_metrics/end_to_end(s)" in entry]
    newest = steps[-1] if steps else {}
    sections = [
        section(
            "loss", chart([Series("loss", *curves["loss"]), Series("evaluation", *curves["evaluation"], dots=True)])
        ),
        *(section(name, chart([Series(name, *curve)])) for name, curve in list(curves.items())[2:]),
    ]
    if newest:
        metrics = {RESOURCES[name]: f"time_metrics/busy_{name}(s)" for name in RESOURCES}
        busy_seconds = {name: newest[metric] for name, metric in metrics.items() if metric in newest}
        memory = [
            (name, newest[metric] * _GIB, facts.budgets.get(metric))
            for name, metric in _TIERS.items()
            if metric in newest
        ]
        sections += [
            section("now", table(_now(facts, steps))),
            section("where the newest step's time went", busy_bars(busy_seconds, newest[_SECONDS])),
            *([section("the newest step", step_lanes(busy))] if busy else []),
        ]
        sections += [
            section("memory", memory_bars(memory, " planned")),
            section("drives", table(_drives(facts, steps))),
        ]
    sections.append(section("the run", table(facts.about), wide=True))
    sections.append(section("continue", f"<pre>{html.escape(facts.how_to_continue)}</pre>", wide=True))
    config = f"<pre>{html.escape(facts.config)}</pre>"
    sections.append(section("configuration", folded("config.toml", config), wide=True))
    data = json.dumps({name: {"step": x, "value": y} for name, (x, y) in curves.items()})
    return page(facts.title, facts.subtitle, sections, data)


def _curve(entries: list[dict[str, Any]], metric: str) -> tuple[list[int], list[float | None]]:
    points = [(int(entry["step"]), entry[metric]) for entry in entries if metric in entry]
    stride = max(1, math.ceil(len(points) / MOST_POINTS))
    thinned = points[::stride] + ([points[-1]] if points and (len(points) - 1) % stride else [])
    return [step for step, _ in thinned], [value for _, value in thinned]


def _now(facts: PageFacts, steps: list[dict[str, Any]]) -> dict[str, str]:
    newest, recent = steps[-1], sorted(entry["time_metrics/end_to_end(s)"] for entry in steps[-20:])
    left = (facts.steps - newest["step"]) * recent[len(recent) // 2]
    loss = newest[_LOSS]
    return {
        "step": f"{newest['step']:,} of {facts.steps:,}",
        "loss": "not finite" if loss is None else f"{loss:.4f}",
        "time left": format_seconds(left) if newest["step"] < facts.steps else "done",
        "tokens": format_count(newest["n_tokens_seen"]),
        "rate": f"{format_count(newest['throughput(tps)'])} tokens/s, {newest['tflops']:.3g} TFLOP/s per device",
    }


def step_lanes(busy: Lanes) -> str:
    known = {RESOURCES[name]: spans for name, spans in busy.items() if spans and name in RESOURCES}
    ends = [end for spans in known.values() for span in spans for end in span]
    return lanes(known, min(ends), max(ends)) if ends else "<p>nothing was busy</p>"


def _drives(facts: PageFacts, steps: list[dict[str, Any]]) -> dict[str, str]:
    written = [entry["ssd/written(GiB)"] * _GIB for entry in steps if "ssd/written(GiB)" in entry]
    if not written:
        sent = sum(entry.get("network/sent(GiB)", 0.0) for entry in steps) * _GIB
        return {"network": f"{format_bytes(sent)} sent by each node so far"}
    read = [entry["ssd/read(GiB)"] * _GIB for entry in steps if "ssd/read(GiB)" in entry]
    seconds = sum(entry["time_metrics/end_to_end(s)"] for entry in steps)
    per_day = sum(written) / seconds * 86400 if seconds else 0.0
    rows = {
        "newest step": f"{format_bytes(read[-1])} read, {format_bytes(written[-1])} written",
        "so far": f"{format_bytes(sum(read))} read, {format_bytes(sum(written))} written",
        "per day": f"{format_bytes(per_day)} written at this rate",
    }
    if facts.endurance_bytes is None:
        return rows | {"wear": "the drives' endurance is not known (configs/drives has the known kinds)"}
    days = facts.endurance_bytes / per_day if per_day else math.inf
    return rows | {"wear": f"{sum(written) / facts.endurance_bytes:.2%} of the warranted writes; {days:,.0f} days left"}
