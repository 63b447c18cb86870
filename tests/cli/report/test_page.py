"""The pages of a run and a plan: self-contained, small, nothing cut off, and with the values of metrics.jsonl."""

import html
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cli.report.drawing import chart
from cli.report.page import MOST_POINTS, RunPage, read_metrics, run_page
from tests.cli.conftest import Finetune

CONFIG = '[model]\nmodel = "x"\n'


def a_job(header: str = "model    a <b>model</b>", output: str = "tuned <&>") -> Any:
    return SimpleNamespace(
        output=Path(output), architecture="Llama", parameters=1000, steps=1000, ssd=(), header=lambda: header,
        settings=SimpleNamespace(nodes=None),
    )  # fmt: skip


JOB, PLAN = a_job(), {"host_bytes": 2 << 30}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def step(number: int) -> dict[str, Any]:
    return {
        "step": number, "loss_metrics/global_avg_loss": None if number == 7 else 2 + 1 / number,
        "grad_norm": 1.5 / number, "lr": 1e-5 * number, "n_tokens_seen": 1024 * number,
        "throughput(tps)": 256.0, "tflops": 0.5, "time_metrics/end_to_end(s)": 2.0,
        "memory/max_active(GiB)": 0.5, "memory/host(GiB)": 1.0,
        "time_metrics/busy_gpu(s)": 1.5, "time_metrics/busy_ssd(s)": 0.5,
        "ssd/read(GiB)": 0.25, "ssd/written(GiB)": 0.5,
    }  # fmt: skip


def entries(count: int) -> list[dict[str, Any]]:
    lines = []
    for number in range(1, count + 1):
        lines.append(step(number))
        if number % 100 == 0:
            loss = 3 - number / 1000
            lines.append(
                {
                    "step": number,
                    "validation_metrics/loss": loss,
                    "validation_metrics/perplexity": math.exp(loss),
                }
            )
    return lines


def test_values_are_those_of_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.report.page.warranted_bytes", lambda _: 10**15)
    lines = entries(1000)
    metrics = tmp_path / "metrics.jsonl"
    # The last one cut by a crash
    others = '{"step": 1001, "loss": "edited"}\n{"step": "1002"}\n{"step": 1003, "los'
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + others)
    assert read_metrics(metrics) == lines
    written = RunPage(JOB, PLAN, CONFIG, metrics)
    written.update(at_once=True)
    page = (tmp_path / "index.html").read_text()
    assert len(page.encode()) < 300_000
    drawn = {len(points.split()) for points in re.findall(r'points="(.*?)"', page)}
    assert drawn == {999, 1000, 10}  # the loss of a step is not finite; evaluations
    for words in ("<title>step 1,000 of 1,000, loss 2.001", "done", "1.5 s, 75%",
                  "2.0000 at step 1,000", "7.389", "held out 2 (step 1,000, dashed)",
                  "256 tokens/s", "1 GiB of 2 GiB", "500 GiB written", "days left",
                  "tuned &lt;&amp;&gt;", "a &lt;b&gt;model&lt;/b&gt;",
                  html.escape(f"finetune --output '{Path.cwd()}/tuned <&>' --resume")):  # fmt: skip
        assert words in page, words
    assert "http-equiv" not in page and 'http-equiv="refresh"' in run_page(
        JOB, PLAN, CONFIG, lines[:9]
    )  # until it is done


def test_nothing_is_fetched_and_every_tag_is_closed() -> None:
    page = run_page(JOB, PLAN, CONFIG, entries(20))
    assert not re.search(r"(src|href)=|https?://|@import|url\(", page)
    assert "color-scheme: light dark" in page and 'name="viewport"' in page
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
    page = run_page(JOB, PLAN, CONFIG, entries(count))
    lines = [points.split() for points in re.findall(r'points="(.*?)"', page)]
    assert len(page.encode()) < 300_000 and all(len(points) <= MOST_POINTS + 1 for points in lines)
    assert (f"step 1 to {count:,}" in page) == bool(lines) == bool(count)


def test_a_chart_draws_every_finite_value() -> None:
    drawn = chart("x", {"a": [(1, 1.0), (2, math.nan), (3, None), (4, 3.0)], "b": [(2, 2.0)]})
    lines = re.findall(r'<polyline class="([^"]*)" points="([^"]*)"', drawn)
    assert [kind for kind, _ in lines] == ["line", "line second"]
    points = [tuple(map(float, point.split(","))) for point in lines[0][1].split()]
    assert len(points) == 2 and points[0][0] < points[1][0] and points[0][1] > points[1][1]  # up is less
    assert "a 3 (step 4), b 2 (step 2, dashed)" in drawn
    assert chart("x", {"a": []}) == ""


LOOK = """<script>
const wrong = [], paper = document.body;
const light = color => { const [r, g, b] = color.match(/[\\d.]+/g).map(x => { x /= 255;
  return x <= .03928 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4 }); return .2126 * r + .7152 * g + .0722 * b };
for (const width of [390, 1280]) {
  paper.style.width = width + "px"; paper.style.maxWidth = "none";
  const edge = paper.getBoundingClientRect().right + .5;
  const say = (what, item) => wrong.push(width + ": " + what + ": " + item.textContent.slice(0, 60));
  for (const item of document.querySelectorAll("h1, h2, p, td, pre, svg, progress")) {
    const box = item.getBoundingClientRect();
    if (box.right > edge || box.left < 0) say("beyond the page", item);
    if (item.scrollWidth > item.clientWidth + 1 && item.clientWidth) say("cut", item);
  }
  for (const drawing of document.querySelectorAll("svg[role]")) {
    const all = drawing.getBoundingClientRect(), boxes = [];
    if (!drawing.getAttribute("aria-label")) say("without a name", drawing);
    for (const text of drawing.querySelectorAll("text")) {
      const box = text.getBoundingClientRect();
      if (box.left < all.left - .5 || box.right > all.right + .5 ||
          box.top < all.top - 2 || box.bottom > all.bottom + 2) say("cut", text);
      if (box.height < 10) say("too small", text);
      for (const other of boxes) if (box.left < other.right && other.left < box.right && box.top < other.bottom - 3 &&
          other.top < box.bottom - 3) say("over another", text);
      boxes.push(box);
    }
  }
}
const back = light(getComputedStyle(paper).backgroundColor);
for (const item of document.querySelectorAll("h1, p, td, pre")) {
  const text = light(getComputedStyle(item).color);
  if ((Math.max(text, back) + .05) / (Math.min(text, back) + .05) < 4.5)
    wrong.push("pale: " + item.textContent.slice(0, 60));
}
document.title = JSON.stringify({wrong, dark: back < .5});
</script>"""
"""Looks at a page 390 and 1280 pixels wide, and writes into its title what is cut off, covered, too small, or pale."""


@pytest.mark.skipif(not any(map(shutil.which, BROWSERS)), reason="needs Chromium")
@pytest.mark.parametrize("dark", [pytest.param(False, marks=pytest.mark.slow), True], ids=["light", "dark"])
def test_a_browser_shows_everything(dark: bool, finetune: Finetune, tmp_path: Path) -> None:
    browser = next(path for path in map(shutil.which, BROWSERS) if path)
    run, plan = tmp_path / "run.html", tmp_path / "plan.html"
    long = a_job("data     " + "x" * 300, "/" + "long/" * 80)
    run.write_text(run_page(long, PLAN, CONFIG, entries(250)))
    planned = finetune("plan", "--gpu", "4090", "--drive", "p5510", "--model", "gpt2-125m", "--html", plan)
    assert planned.status == 0
    for path in (run, plan):
        page = path.read_text()
        path.write_text(page.replace("</body>", LOOK + "</body>"))
        done = subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
             "--window-size=1300,900", f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--dump-dom",
             path.as_uri()],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        assert "CONSOLE" not in done.stderr
        title = html.unescape(re.findall("<title>(.*?)</title>", done.stdout, re.S)[0])
        assert json.loads(title) == {"wrong": [], "dark": dark}
    text, about = planned.out, plan.read_text()
    for words in re.findall(r"[\d.]+ (?:GiB|TiB|tokens/s|TFLOP/s|days)", text):
        assert words in about, words


def test_lines_that_lack_a_value_are_drawn_without_it() -> None:
    """A run does not end because a bit of its metrics has flipped, in a name or a number."""
    whole = step(3)
    for name in whole.keys() - {"step"}:
        for line in ({**whole, name: None}, {key: value for key, value in whole.items() if key != name}):
            assert run_page(JOB, PLAN, CONFIG, [step(1), line]).rstrip().endswith("</html>"), name
