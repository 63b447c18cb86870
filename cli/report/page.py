"""The page of a run, from its metrics file."""

import html
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.job.job import Job
from cli.report.drawing import Points, busy_bars, chart, memory_bars, page, section, table
from cli.report.results import RESOURCES
from common.files import replace_file
from common.hardware.directory_drive import warranted_bytes
from common.store.errors import described
from common.units import format_bytes, format_count, format_seconds

PAGE = "index.html"
MOST_POINTS = 1000  # Points of a curve on the page: of longer runs, every second, third, ... step, and the newest.
RELOAD_S = 30  # Seconds after which a browser loads the page of an unfinished run again
BETWEEN_S = 10.0  # Seconds from one writing of the page to the next, unless there is something to see at once
_GIB = 1 << 30
_LOSS, _EVALUATION, _SECONDS = "loss_metrics/global_avg_loss", "validation_metrics/loss", "time_metrics/end_to_end(s)"
_TIERS = {"device": "memory/max_active(GiB)", "host": "memory/host(GiB)"}
_CHARTS: dict[str, dict[str, str]] = {
    "loss": {"loss": _LOSS, "held out": _EVALUATION},
    "router loss": {"router loss": "loss_metrics/aux_loss"},
    **{
        name: {name: metric, "held out": f"validation_metrics/{metric}"}
        for name, metric in (
            ("preferred answers", "rewards/accuracies"),
            ("margin of rewards", "rewards/margins"),
            ("right classes", "accuracy"),
            ("margin of scores", "margin"),
        )
    },
    "rewards": {"chosen": "rewards/chosen", "rejected": "rewards/rejected"},
    "gradient norm": {"gradient norm": "grad_norm"},
    "learning rate": {"learning rate": "lr"},
    "tokens per second and device": {"tokens/s": "throughput(tps)"},
    "seconds per step": {"seconds": _SECONDS},
}
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
    budgets: Mapping[str, float]  # Bytes that the plan gives each tier, by its name
    endurance_bytes: float | None = None  # Bytes that the drives are warranted for; None: unknown


def facts_of(job: Job, plan: Mapping[str, Any], config: str) -> PageFacts:
    """Return the facts of a run, given its plan and its configuration file."""
    return PageFacts(
        title=job.output.name,
        subtitle=f"{job.architecture}, {format_count(job.parameters)} parameters",
        about={line[:8].strip(): line[9:].strip() for line in job.header().replace("\n         ", "; ").splitlines()},
        steps=job.steps,
        how_to_continue=job.settings.how_to_continue.removeprefix("To continue: "),
        config=config,
        budgets={
            "device": plan.get("device_bytes", 0),
            # Of several ranks, the plan is of one and the metric of all on a node.
            "host": 0 if job.settings.nodes else plan.get("host_bytes", 0),
        },
        endurance_bytes=warranted_bytes(job.ssd),
    )


class RunPage:
    """Rewrites a run's page from its metrics file."""

    def __init__(self, facts: PageFacts, metrics: Path) -> None:
        self._facts, self._metrics, self._next_time = facts, metrics, 0.0
        self._path = metrics.with_name(PAGE)

    def update(self, at_once: bool = False) -> None:
        """Write the page if it is time to, or ``at_once``."""
        if not at_once and time.monotonic() < self._next_time:
            return
        entries = read_metrics(self._metrics)
        with described("writing", self._path):
            replace_file(self._path, run_page(self._facts, entries))
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


def run_page(facts: PageFacts, entries: list[dict[str, Any]]) -> str:
    """Return the page of these lines of the metrics file."""
    # The line of a step whose process was killed before it wrote it has no times.
    steps = [entry for entry in entries if _SECONDS in entry]
    done, title = 0, f"step 0 of {facts.steps:,}"
    charts = {
        name: chart(name, {line: _points(entries, metric) for line, metric in lines.items()})
        for name, lines in _CHARTS.items()
    }
    sections = [section(name, drawn) for name, drawn in charts.items() if drawn]
    if steps:
        newest, done = steps[-1], steps[-1]["step"]
        loss = "not finite" if newest[_LOSS] is None else f"{newest[_LOSS]:.4g}"
        title = f"step {done:,} of {facts.steps:,}, loss {loss}"
        sections.append(section("now", table(_now(facts, entries, steps))))
        metrics, whole = {f"time_metrics/busy_{name}(s)": what for name, what in RESOURCES.items()}, newest[_SECONDS]
        busy = {what: newest[metric] for metric, what in metrics.items() if metric in newest}
        sections.append(section(f"newest step: {format_seconds(whole)}", busy_bars(busy, whole)))
        tiers = [(tier, newest.get(metric, 0.0) * _GIB, facts.budgets.get(tier)) for tier, metric in _TIERS.items()]
        sections.append(section("memory, of what is planned", memory_bars(tier for tier in tiers if tier[1])))
    sections.append(section("the run", table(facts.about.items()), wide=True))
    sections.append(section("to continue", f"<pre>{html.escape(facts.how_to_continue)}</pre>", wide=True))
    config = f"<details><summary>config.toml</summary><pre>{html.escape(facts.config)}</pre></details>"
    sections.append(section("configuration", config, wide=True))
    subtitle = f"{title}; {facts.subtitle}; written {time.strftime('%Y-%m-%d %H:%M:%S')}"
    return page(f"{title}: {facts.title}", facts.title, subtitle, sections, RELOAD_S if done < facts.steps else 0)


def _points(entries: list[dict[str, Any]], metric: str) -> Points:
    points = [(int(entry["step"]), entry[metric]) for entry in entries if metric in entry]
    stride = max(1, math.ceil(len(points) / MOST_POINTS))
    return points[:-1:stride] + points[-1:]


def _now(facts: PageFacts, entries: list[dict[str, Any]], steps: list[dict[str, Any]]) -> list[tuple[str, str]]:
    newest, recent = steps[-1], sorted(entry[_SECONDS] for entry in steps[-20:])
    left = (facts.steps - newest["step"]) * recent[len(recent) // 2]
    rows = [("time left", format_seconds(left) if left else "done"), ("tokens", format_count(newest["n_tokens_seen"]))]
    rows.append(("rate", f"{newest['throughput(tps)']:,.4g} tokens/s, {newest['tflops']:.3g} TFLOP/s per device"))
    evaluations = [entry for entry in entries if entry.get(_EVALUATION) is not None]
    if evaluations:
        last = evaluations[-1]
        rows.append(("held out", f"{last[_EVALUATION]:.4f} at step {last['step']:,}"))
        if (perplexity := last.get("validation_metrics/perplexity")) is not None:
            rows.append(("perplexity", f"{perplexity:.4g}"))
    if "network/sent(GiB)" in newest:
        sent = sum(entry.get("network/sent(GiB)", 0.0) for entry in steps) * _GIB
        rows.append(("network", f"{format_bytes(sent)} sent by each node"))
    if "ssd/written(GiB)" in newest:
        read = sum(entry.get("ssd/read(GiB)", 0.0) for entry in steps) * _GIB
        written = sum(entry.get("ssd/written(GiB)", 0.0) for entry in steps) * _GIB
        rows.append(("drives", f"{format_bytes(read)} read, {format_bytes(written)} written"))
        if written and facts.endurance_bytes is not None:
            days = facts.endurance_bytes / written * sum(entry[_SECONDS] for entry in steps) / 86400
            share = written / facts.endurance_bytes
            rows.append(("wear", f"{share:.2%} of the warranted writes; {days:,.0f} days left"))
    return rows
