"""The page of a run: self-contained, small, and its values are those of metrics.jsonl."""

import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from cli.report.page import MOST_POINTS, PageFacts, RunPage, Series, chart, read_metrics, run_page, step_lanes
from cli.report.results import RESOURCES

_GIB = 1 << 30
FACTS = PageFacts(
    title="tuned <&>", subtitle="a test", about={"model": "a <b>model</b>"}, steps=1000,
    how_to_continue="To continue: finetune --resume", config='[model]\nmodel = "x"\n',
    budgets={"memory/host(GiB)": 2.0 * _GIB}, endurance_bytes=1e15,
)  # fmt: skip
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def step(number: int) -> dict[str, Any]:
    return {
        "step": number, "loss_metrics/global_avg_loss": None if number == 7 else 2 + 1 / number,
        "grad_norm": 1.5 / number, "lr": 1e-5 * number, "skipped": 0.0, "n_tokens_seen": 1024 * number,
        "throughput(tps)": 512.25, "tflops": 0.5, "time_metrics/end_to_end(s)": 2.0,
        "memory/max_active(GiB)": 0.5, "memory/host(GiB)": 1.0, "memory/ssd(GiB)": 3.0,
        "time_metrics/busy_gpu(s)": 1.5, "time_metrics/busy_ssd(s)": 0.5,
        "ssd/read(GiB)": 0.25, "ssd/written(GiB)": 0.5,
    }  # fmt: skip


def entries(count: int) -> list[dict[str, Any]]:
    lines = []
    for number in range(1, count + 1):
        lines.append(step(number))
        if number % 100 == 0:
            lines.append({"step": number, "validation_metrics/loss": 3 - number / 1000})
    return lines


def data_of(page: str) -> dict[str, dict[str, list[float | None]]]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found is not None
    return dict(json.loads(found[1]))


def test_values_are_those_of_the_metrics(tmp_path: Path) -> None:
    lines = entries(1000)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 1001, "los')  # cut by a crash
    assert read_metrics(metrics) == lines
    written = RunPage(FACTS, metrics)
    written.update(at_once=True)
    page = (tmp_path / "index.html").read_text()
    assert len(page.encode()) < 300_000
    data = data_of(page)
    for name, metric in (
        ("loss", "loss_metrics/global_avg_loss"), ("gradient norm", "grad_norm"), ("learning rate", "lr"),
        ("evaluation", "validation_metrics/loss"), ("tokens per second", "throughput(tps)"),
    ):  # fmt: skip
        assert data[name]["step"] == [line["step"] for line in lines if metric in line]
        assert data[name]["value"] == [line[metric] for line in lines if metric in line]
    for words in ("1,000 of 1,000", "done", "1.5 s, 75%", "1 GiB of 2 GiB planned", "500 GiB written", "days left",
                  "tuned &lt;&amp;&gt;", "a &lt;b&gt;model&lt;/b&gt;", "finetune --resume"):  # fmt: skip
        assert words in page, words


def test_nothing_is_fetched_and_every_tag_is_closed() -> None:
    page = run_page(FACTS, entries(20), {"gpu": [(0.0, 1.0)]})
    assert not re.search(r"(src|href)=|https?://|@import|url\(", page)
    assert "prefers-color-scheme: dark" in page and 'name="viewport"' in page
    left: list[str] = []

    class Tags(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag not in ("meta", "line", "circle", "polyline", "path"):
                left.append(tag)

        def handle_endtag(self, tag: str) -> None:
            if tag not in ("meta", "line", "circle", "polyline", "path"):
                assert left.pop() == tag

    Tags().feed(page)
    assert left == []


@pytest.mark.parametrize("count", [0, 1, 2, MOST_POINTS + 1, 12_345])
def test_long_runs_are_thinned_out_and_short_ones_have_a_page(count: int) -> None:
    page = run_page(FACTS, entries(count))
    steps = data_of(page)["loss"]["step"]
    assert len(page.encode()) < 300_000 and len(steps) <= MOST_POINTS + 1
    assert (steps[0], steps[-1]) == (1, count) if count else steps == []


def test_a_chart_draws_every_finite_value() -> None:
    drawn = chart([Series("a", [1, 2, 3, 4], [1.0, math.nan, None, 3.0]), Series("b", [2], [2.0], dots=True)])
    lines = re.findall(r'<polyline class="([^"]*)" points="([^"]*)"', drawn)
    assert [kind for kind, _ in lines] == ["series", "series second"]
    points = [tuple(map(float, point.split(","))) for point in lines[0][1].split()]
    assert len(points) == 2 and points[0][0] < points[1][0] and points[0][1] > points[1][1]  # up is less
    assert chart([Series("a", [], [])]) == "<p>nothing yet</p>"


def test_lanes_are_drawn_where_something_was_busy() -> None:
    """Four seconds; what hardly shows is drawn with its neighbour, so that the file stays small."""
    many = [(10 + number / 1000, 10 + (number + 0.5) / 1000) for number in range(4000)]
    busy = {"gpu": [(10.0, 11.0), (13.0, 14.0)], "ssd": many, "unknown": [(0.0, 99.0)], "adam": []}
    drawn = step_lanes(busy)
    paths = re.findall(r'<path class="lane" d="([^"]*)"/>', drawn)
    assert len(paths) == 2 and paths[1].count("M") == 1
    (first, length), (second, other) = (
        map(float, re.findall(r"[\d.]+", part)[::2]) for part in paths[0].split("M")[1:]
    )
    assert other == pytest.approx(length, abs=0.2) and second - first == pytest.approx(3 * length, abs=0.3)
    assert "computing" in drawn and "the SSDs" in drawn and "4.0 s" in drawn
    assert drawn in run_page(FACTS, entries(3), busy) and step_lanes({"gpu": []}) == "<p>nothing was busy</p>"
    spread = {name: [(float(at), at + 0.5) for at in range(5000)] for name in RESOURCES}
    assert len(run_page(FACTS, entries(1000), spread).encode()) < 300_000


@pytest.mark.skipif(not any(map(shutil.which, BROWSERS)), reason="needs Chromium")
def test_a_browser_shows_it_without_errors(tmp_path: Path) -> None:
    browser = next(path for path in map(shutil.which, BROWSERS) if path)
    page = tmp_path / "index.html"
    page.write_text(run_page(FACTS, entries(50), {"gpu": [(0.0, 1.0)], "ssd": [(0.5, 2.0)]}))
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--window-size=390,844",
         "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr
    assert data_of(done.stdout) == data_of(page.read_text())
