"""The page of a run, from its metrics file."""

import html
import json
import math
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cli.job.job import Job
from cli.job.outputs import PAGE
from cli.options.loss_sum import EVALUATION
from cli.report.drawing import Points, busy_bars, chart, memory_bars, page, section, table
from cli.report.results import RESOURCES
from common.files import replace_file
from common.hardware.directory_drive import warranted_bytes
from common.store.errors import described
from common.units import format_bytes, format_count, format_seconds

# Points of a curve on the page: of longer runs, every second, third, ... step, and the newest.
MOST_POINTS = 1000
RELOAD_S = 30  # Seconds after which a browser loads the page of an unfinished run again
BETWEEN_S = 10.0  # Seconds from one writing of the page to the next, unless there is something to see at once
_GIB = 1 << 30
_LOSS = "loss_metrics/global_avg_loss"
_SECONDS = "time_metrics/end_to_end(s)"
_SHOWN = (
    _SECONDS, "n_tokens_seen", "throughput(tps)", "tflops", "memory/max_active(GiB)", "memory/host(GiB)"
)  # fmt: skip
"""Metrics of a step that are not in charts alone."""
_CHARTS: dict[str, dict[str, str]] = {
    "loss": {"loss": _LOSS, "held out": EVALUATION},
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


class RunPage:
    """Rewrites a run's page from its metrics file."""

    def __init__(self, job: Job, plan: Mapping[str, Any], config: str, metrics: Path) -> None:
        self._job = job
        self._plan = plan
        self._config = config
        self._metrics = metrics
        self._path = metrics.with_name(PAGE)
        self._next_time = 0.0

    def update(self, at_once: bool = False) -> None:
        """Write the page if it is time to, or ``at_once``."""
        if not at_once and time.monotonic() < self._next_time:
            return
        entries = read_metrics(self._metrics)
        with described("writing", self._path):
            replace_file(self._path, run_page(self._job, self._plan, self._config, entries))
        # A long run's file takes longer to read: never more than a small part of the time goes there.
        self._next_time = time.monotonic() + max(BETWEEN_S, len(entries) / 500)


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file, without those that a crash has cut off, or that do not have numbers.

    Of each step, there is its newest line and that of its newest evaluation.
    """
    entries: dict[tuple[int, bool], dict[str, Any]] = {}
    for line in file.read_text(errors="replace").splitlines() if file.is_file() else []:
        try:
            entry = dict(json.loads(line))
        except (ValueError, TypeError, RecursionError):
            continue
        if isinstance(entry.get("step"), int) and all(
            isinstance(each, int | float | None) for each in entry.values()
        ):
            entries[entry["step"], EVALUATION in entry] = entry
    return list(entries.values())


def run_page(job: Job, plan: Mapping[str, Any], config: str, entries: list[dict[str, Any]]) -> str:
    """Return the page of a run with its plan, its configuration file, and these lines of its metrics file."""
    # A process that was killed may have written a line without times, and a damaged line may lack any value.
    steps = [
        entry for entry in entries if _LOSS in entry and all(entry.get(name) is not None for name in _SHOWN)
    ]
    done = 0
    state = f"step 0 of {job.steps:,}"
    charts = {
        name: chart(name, {line: _points(entries, metric) for line, metric in lines.items()})
        for name, lines in _CHARTS.items()
    }
    sections = [section(name, drawn) for name, drawn in charts.items() if drawn]
    if steps:
        newest = steps[-1]
        done = steps[-1]["step"]
        loss = "not finite" if newest[_LOSS] is None else f"{newest[_LOSS]:.4g}"
        state = f"step {done:,} of {job.steps:,}, loss {loss}"
        sections.append(section("now", table(_now(job, entries, steps))))
        metrics = {f"time_metrics/busy_{name}(s)": what for name, what in RESOURCES.items()}
        whole = newest[_SECONDS]
        busy = {what: newest[metric] for metric, what in metrics.items() if newest.get(metric) is not None}
        sections.append(section(f"newest step: {format_seconds(whole)}", busy_bars(busy, whole)))
        # Of ranks: the plan's is one's, the metric all's
        host = 0 if job.settings.nodes else plan.get("host_bytes", 0)
        tiers = (
            ("device", newest["memory/max_active(GiB)"] * _GIB, plan.get("device_bytes", 0)),
            ("host", newest["memory/host(GiB)"] * _GIB, host),
        )
        sections.append(section("memory, of what is planned", memory_bars(tiers)))
    lines = job.header().replace("\n         ", "; ").splitlines()
    sections.append(
        section("the run", table((line[:8].strip(), line[9:].strip()) for line in lines), wide=True)
    )
    # From any directory
    command = shlex.join(["finetune", "--output", str(job.output.resolve()), "--resume"])
    sections.append(section("to continue", f"<pre>{html.escape(command)}</pre>", wide=True))
    folded = f"<details><summary>config.toml</summary><pre>{html.escape(config)}</pre></details>"
    sections.append(section("configuration", folded, wide=True))
    name = job.output.name
    model = f"{job.architecture}, {format_count(job.parameters)} parameters"
    subtitle = f"{state}; {model}; written {time.strftime('%Y-%m-%d %H:%M:%S')}"
    return page(f"{state}: {name}", name, subtitle, sections, RELOAD_S if done < job.steps else 0)


def _points(entries: list[dict[str, Any]], metric: str) -> Points:
    points = [(int(entry["step"]), entry[metric]) for entry in entries if metric in entry]
    stride = max(1, math.ceil(len(points) / MOST_POINTS))
    return points[:-1:stride] + points[-1:]


def _now(job: Job, entries: list[dict[str, Any]], steps: list[dict[str, Any]]) -> list[tuple[str, str]]:
    newest = steps[-1]
    recent = sorted(entry[_SECONDS] for entry in steps[-20:])
    left = (job.steps - newest["step"]) * recent[len(recent) // 2]
    rows = [
        ("time left", format_seconds(left) if left else "done"),
        ("tokens", format_count(newest["n_tokens_seen"])),
    ]
    rows.append(
        ("rate", f"{newest['throughput(tps)']:,.4g} tokens/s, {newest['tflops']:.3g} TFLOP/s per device")
    )
    evaluations = [entry for entry in entries if entry.get(EVALUATION) is not None]
    if evaluations:
        last = evaluations[-1]
        rows.append(("held out", f"{last[EVALUATION]:.4f} at step {last['step']:,}"))
        if (perplexity := last.get("validation_metrics/perplexity")) is not None:
            rows.append(("perplexity", f"{perplexity:.4g}"))
    if "network/sent(GiB)" in newest:
        sent = sum(entry.get("network/sent(GiB)") or 0.0 for entry in steps) * _GIB
        rows.append(("network", f"{format_bytes(sent)} sent by each node"))
    if "ssd/written(GiB)" in newest:
        read = sum(entry.get("ssd/read(GiB)") or 0.0 for entry in steps) * _GIB
        written = sum(entry.get("ssd/written(GiB)") or 0.0 for entry in steps) * _GIB
        rows.append(("drives", f"{format_bytes(read)} read, {format_bytes(written)} written"))
        warranted = warranted_bytes(job.ssd)
        if written and warranted is not None:
            days = warranted / written * sum(entry[_SECONDS] for entry in steps) / 86400
            rows.append(("wear", f"{written / warranted:.2%} of the warranted writes; {days:,.0f} days left"))
    return rows
