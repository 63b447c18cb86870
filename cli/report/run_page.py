"""The page of a run, ``<output>/run/index.html``, rewritten while it trains."""

import html
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.job.job import Job
from cli.report.html import Series, bars, chart, folded, lanes, page, section, table
from cli.report.results import RESOURCES
from common.files import replace_file
from common.hardware.drives import warranted_bytes
from common.store.errors import described
from common.units import Interval, format_bytes, format_count, format_seconds

PAGE = "index.html"
MOST_POINTS = 1000  # Points of a curve on the page: of longer runs, every second, third, ... step, and the newest.
BETWEEN_S = 10.0  # Seconds from one writing of the page to the next, unless there is something to see at once
_GIB = 1 << 30
Lanes = Mapping[str, Sequence[Interval]]  # When each resource was busy, by name in :data:`RESOURCES`
_LOSS, _EVALUATION = "loss_metrics/global_avg_loss", "validation_metrics/loss"
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

        Raises:
            StoreError: if the system refuses.
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
        sections += [
            section("now", table(_now(facts, steps))),
            section("where the newest step's time went", _busy(newest)),
            *([section("the newest step", step_lanes(busy))] if busy else []),
        ]
        sections += [section("memory", _memory(facts, newest)), section("drives", table(_drives(facts, steps)))]
    sections.append(section("the run", table(facts.about), wide=True))
    sections.append(section("continue", f"<pre>{html.escape(facts.how_to_continue)}</pre>", wide=True))
    config = f"<pre>{html.escape(facts.config)}</pre>"
    sections.append(section("configuration", folded("config.toml", config), wide=True))
    data = json.dumps({name: {"step": x, "value": y} for name, (x, y) in curves.items()})
    return page(facts.title, facts.subtitle, sections, data)


def _curve(entries: list[dict[str, Any]], metric: str) -> tuple[list[int], list[float | None]]:
    """Return the steps and values of a metric, thinned out to at most :data:`MOST_POINTS` and the newest."""
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


def _busy(newest: Mapping[str, Any]) -> str:
    seconds = newest["time_metrics/end_to_end(s)"]
    names = {name: f"time_metrics/busy_{name}(s)" for name in RESOURCES}
    rows = [
        (RESOURCES[name], newest[metric] / seconds, f"{format_seconds(newest[metric])}, {newest[metric] / seconds:.0%}")
        for name, metric in names.items()
        if metric in newest
    ]
    return bars([*rows, ("the step", 1.0, format_seconds(seconds))])


def _memory(facts: PageFacts, newest: Mapping[str, Any]) -> str:
    rows = []
    for name, metric in (
        ("device", "memory/max_active(GiB)"),
        ("host", "memory/host(GiB)"),
        ("SSD", "memory/ssd(GiB)"),
    ):
        if metric not in newest:
            continue
        used, planned = newest[metric] * _GIB, facts.budgets.get(metric, 0.0)
        of = f" of {format_bytes(planned)} planned" if planned else ""
        rows.append((name, used / planned if planned else 0.0, f"{format_bytes(used)}{of}"))
    return bars(rows)


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
