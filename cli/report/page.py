"""The page of a run, from its metrics file."""

import html
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.job.job import Job
from cli.report.drawing import Series, chart, folded, memory_bars, page, section, step_bars, table
from cli.report.results import RESOURCES
from common.files import replace_file
from common.hardware.directory_drive import warranted_bytes
from common.store.errors import described
from common.units import Interval, format_bytes, format_count, format_seconds

PAGE = "index.html"
MOST_POINTS = 1000  # Points of a curve on the page: of longer runs, every second, third, ... step, and the newest.
RELOAD_S = 30  # Seconds after which a browser loads the page of an unfinished run again
BETWEEN_S = 10.0  # Seconds from one writing of the page to the next, unless there is something to see at once
_GIB = 1 << 30
Lanes = Mapping[str, Sequence[Interval]]  # When each resource was busy, by name in :data:`RESOURCES`
_LOSS, _EVALUATION, _RATE = "loss_metrics/global_avg_loss", "validation_metrics/loss", "tokens per second"
_SECONDS = "time_metrics/end_to_end(s)"
_TIERS = {"device": "memory/max_active(GiB)", "host": "memory/host(GiB)", "SSD": "memory/ssd(GiB)"}
_CHARTS: dict[str, dict[str, str]] = {
    "loss": {"loss": _LOSS, "held out": _EVALUATION},
    "router loss": {"router loss": "loss_metrics/aux_loss"},
    **{name: {name: metric, "held out": f"validation_metrics/{metric}"} for name, metric in {
        "preferred answers": "rewards/accuracies", "margin of rewards": "rewards/margins", "right classes": "accuracy",
        "margin of scores": "margin"}.items()},
    "rewards": {"chosen": "rewards/chosen", "rejected": "rewards/rejected"},
    "gradient norm": {"gradient norm": "grad_norm"}, "learning rate": {"learning rate": "lr"},
    "tokens per second, all ranks": {"tokens/s": _RATE}, "seconds per step": {"seconds": _SECONDS},
}  # fmt: skip
"""Metrics of each chart, by the names of their lines. Charts without values are left out."""


@dataclass(frozen=True)
class PageFacts:
    """Facts on the page that do not change."""

    title: str
    subtitle: str
    about: Mapping[str, str]  # Model, machine, data and so on, in words
    steps: int
    how_to_continue: str  # The command
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
        """Write the page if it is time to, or ``at_once``; ``lanes`` are the times when the newest step was busy."""
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
    lines = job.header().replace("\n         ", "; ").splitlines()
    about = {line[:8].strip(): line[9:].strip() for line in lines}
    return PageFacts(
        title=job.output.name,
        subtitle=f"{job.architecture}, {format_count(job.parameters)} parameters",
        about=about,
        steps=job.steps,
        how_to_continue=job.settings.how_to_continue.removeprefix("To continue: "),
        config=config,
        budgets={
            "memory/max_active(GiB)": float(plan.get("device_bytes", 0)),
            # Of several ranks, the plan is of one and the metric of all on a node.
            "memory/host(GiB)": 0.0 if job.settings.nodes else float(plan.get("host_bytes", 0)),
            "memory/ssd(GiB)": float(plan.get("ssd_bytes", job.store_bytes)),
        },
        endurance_bytes=warranted_bytes(job.ssd),
    )


def run_page(facts: PageFacts, entries: list[dict[str, Any]], busy: Lanes | None = None) -> str:
    """Return the page of these lines of the metrics file, with the times when the newest step kept resources busy."""
    # The line of a step whose process was killed before it wrote it has no times.
    steps = [entry for entry in entries if _SECONDS in entry]
    rates = [
        {"step": entry["step"], _RATE: entry["n_tokens_seen"] / entry["step"] / entry[_SECONDS]} for entry in steps
    ]
    curves = {
        metric: _curve(rates if metric == _RATE else entries, metric)
        for lines in _CHARTS.values()
        for metric in lines.values()
    }
    sections = []
    for name, lines in _CHARTS.items():
        series = [
            Series(line, *curves[metric], "second" if at else "") for at, (line, metric) in enumerate(lines.items())
        ]
        if any(item.steps for item in series):
            sections.append(section(name, chart(name, series)))
    newest = steps[-1] if steps else {}
    done = newest.get("step", 0)
    title = f"step {done:,} of {facts.steps:,}"
    if newest:
        sections += _newest_step(facts, entries, steps, busy or {})
        title += f", loss {newest[_LOSS]:.4g}" if newest[_LOSS] is not None else ", loss not finite"
    sections.append(section("the run", table(facts.about.items()), wide=True))
    sections.append(section("to continue", f"<pre>{html.escape(facts.how_to_continue)}</pre>", wide=True))
    config = f"<pre>{html.escape(facts.config)}</pre>"
    sections.append(section("configuration", folded("config.toml", config), wide=True))
    data = json.dumps({metric: {"step": x, "value": y} for metric, (x, y) in curves.items() if x})
    subtitle = f"{title}; {facts.subtitle}; written {time.strftime('%Y-%m-%d %H:%M:%S')}"
    return page(f"{title}: {facts.title}", facts.title, subtitle, sections, data, RELOAD_S if done < facts.steps else 0)


def _newest_step(
    facts: PageFacts, entries: list[dict[str, Any]], steps: list[dict[str, Any]], busy: Lanes
) -> list[str]:
    newest = steps[-1]
    metrics = {name: f"time_metrics/busy_{name}(s)" for name in RESOURCES}
    seconds = {RESOURCES[name]: newest[metric] for name, metric in metrics.items() if metric in newest}
    spans = {RESOURCES[name]: each for name, each in busy.items() if name in RESOURCES}
    memory = [
        (name, newest[metric] * _GIB, facts.budgets.get(metric))
        for name, metric in _TIERS.items()
        if newest.get(metric)
    ]
    busy_section = section(
        f"newest step: {format_seconds(newest[_SECONDS])}", step_bars(seconds, newest[_SECONDS], spans)
    )
    return [
        section("now", table(_now(facts, entries, steps).items())),
        *([busy_section] if seconds else []),
        section("memory", memory_bars(memory, " planned")),
        section("drives" if "ssd/written(GiB)" in newest else "network", table(_traffic(facts, steps).items())),
    ]


def _curve(entries: list[dict[str, Any]], metric: str) -> tuple[list[int], list[float | None]]:
    points = [(int(entry["step"]), entry[metric]) for entry in entries if metric in entry]
    stride = max(1, math.ceil(len(points) / MOST_POINTS))
    thinned = points[::stride] + ([points[-1]] if points and (len(points) - 1) % stride else [])
    return [step for step, _ in thinned], [value for _, value in thinned]


def _now(facts: PageFacts, entries: list[dict[str, Any]], steps: list[dict[str, Any]]) -> dict[str, str]:
    newest, recent = steps[-1], sorted(entry[_SECONDS] for entry in steps[-20:])
    left = (facts.steps - newest["step"]) * recent[len(recent) // 2]
    loss = newest[_LOSS]
    rows = {"step": f"{newest['step']:,} of {facts.steps:,}", "loss": "not finite" if loss is None else f"{loss:.4f}"}
    for entry in (entry for entry in entries if entry.get(_EVALUATION) is not None):
        perplexity = entry.get("validation_metrics/perplexity")
        rows["held out"] = f"{entry[_EVALUATION]:.4f} at step {entry['step']:,}"
        rows["held out"] += f", perplexity {perplexity:.4g}" if perplexity is not None else ""
    return rows | {
        "time left": format_seconds(left) if newest["step"] < facts.steps else "done",
        "tokens": format_count(newest["n_tokens_seen"]),
        "rate": f"{format_count(newest['n_tokens_seen'] / newest['step'] / newest[_SECONDS])} tokens/s, "
        f"{newest['tflops']:.3g} TFLOP/s per device",
    }


def _traffic(facts: PageFacts, steps: list[dict[str, Any]]) -> dict[str, str]:
    written = [entry["ssd/written(GiB)"] * _GIB for entry in steps if "ssd/written(GiB)" in entry]
    if not written:
        sent = sum(entry.get("network/sent(GiB)", 0.0) for entry in steps) * _GIB
        return {"so far": f"{format_bytes(sent)} sent by each node"}
    read = [entry["ssd/read(GiB)"] * _GIB for entry in steps if "ssd/read(GiB)" in entry]
    seconds = sum(entry[_SECONDS] for entry in steps)
    per_day = sum(written) / seconds * 86400 if seconds else 0.0
    rows = {
        "newest step": f"{format_bytes(read[-1])} read, {format_bytes(written[-1])} written",
        "so far": f"{format_bytes(sum(read))} read, {format_bytes(sum(written))} written",
        "per day": f"{format_bytes(per_day)} written at this rate",
    }
    if facts.endurance_bytes is None:
        return rows | {"wear": "not known: no preset in configs/drives has these drives"}
    days = facts.endurance_bytes / per_day if per_day else math.inf
    return rows | {"wear": f"{sum(written) / facts.endurance_bytes:.2%} of the warranted writes; {days:,.0f} days left"}
