"""Draw a run as one picture: loss, learning rate, gradient norm, throughput, memory per tier, traffic.

python scripts/plot_run.py RUN_DIR [PICTURE]
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
sys.path[1:1] = [str(ROOT), str(ROOT / "scripts")]  # not installed: run from a checkout

from common.errors import FinetuneError, UserError  # noqa: E402

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class Panel:
    """One small picture."""

    title: str
    unit: str
    lines: Mapping[str, str]
    """Label and metric of each line; those that a run has not are left out."""
    logarithmic: bool = False


PANELS = (
    Panel("loss", "nats per token", {
        "training": "loss_metrics/global_avg_loss", "held out": "validation_metrics/loss",
    }),
    Panel("learning rate", "", {"": "lr"}),
    Panel("gradient norm, before clipping", "", {"": "grad_norm"}),
    Panel("throughput", "tokens/s per device", {"": "throughput(tps)"}),
    Panel("memory in use", "GiB", {
        "device": "memory/max_active(GiB)", "host": "memory/host(GiB)", "SSD": "memory/ssd(GiB)",
    }, logarithmic=True),
    Panel("traffic per step", "GiB", {
        "SSD, read": "ssd/read(GiB)", "SSD, written": "ssd/written(GiB)", "network, sent": "network/sent(GiB)",
    }),
)  # fmt: skip

COLOURS = ("#0072B2", "#E69F00", "#009E73")
"""One colour per line of a panel (Okabe and Ito: told apart by everybody)."""


def find_metrics(directory: Path) -> Path:
    """The metrics in a run's output directory, or in its folder ``run``.

    Raises:
        UserError: if there are none.
    """
    for file in (directory / "run" / METRICS, directory / METRICS):
        if file.is_file():
            return file
    raise UserError(f"{directory} is not the output directory of a run: there is no run/{METRICS} in it.")


def read_metrics(file: Path) -> list[dict[str, float]]:
    """What every step and every evaluation measured, in order.

    Raises:
        UserError: it cannot be read, or is not what ``finetune`` has written.
    """
    try:
        rows: list[dict[str, float]] = [json.loads(line) for line in file.read_text().splitlines()]
        if not any("lr" in row for row in rows) or not all("step" in row for row in rows):
            raise ValueError("no step in it")
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}.") from None
    except (ValueError, TypeError) as error:
        raise UserError(f"{file} does not hold a run's metrics: {error}.") from None
    return rows


def points(rows: Sequence[Mapping[str, float]], metric: str) -> tuple[list[float], list[float]]:
    """Steps that have ``metric``, and its values."""
    points = [(row["step"], row[metric]) for row in rows if row.get(metric) is not None]  # null: not finite
    return [step for step, _ in points], [value for _, value in points]


def draw(rows: Sequence[Mapping[str, float]], picture: Path, title: str) -> None:
    """Draw all panels into ``picture``, whose ending says in which format.

    Raises:
        UserError: matplotlib is missing, or the file cannot be written.
    """
    pyplot = _open_pyplot()
    figure, grid = pyplot.subplots(3, 2, figsize=(11, 9), sharex=True, layout="constrained")
    for axes, panel in zip(grid.flat, PANELS, strict=True):
        _draw_panel(axes, panel, rows)
    for axes in grid[-1]:
        axes.set_xlabel("step")
    figure.suptitle(title)
    _save(pyplot, figure, picture, dpi=110)


def _draw_panel(axes: Any, panel: Panel, rows: Sequence[Mapping[str, float]]) -> None:
    drawn = 0
    for colour, (label, metric) in zip(COLOURS, panel.lines.items(), strict=False):
        steps, values = points(rows, metric)
        if panel.logarithmic:
            values = [value if value > 0 else math.nan for value in values]
        if any(value > 0 for value in values):
            marker = "o" if metric.startswith("validation") or len(steps) == 1 else None
            axes.plot(steps, values, color=colour, label=label, linewidth=1.2, marker=marker, markersize=4)
            drawn += 1
    if drawn and panel.logarithmic:
        axes.set_yscale("log")
    elif drawn and "loss" not in panel.title:
        axes.set_ylim(bottom=0)
    if drawn > 1:
        axes.legend(frameon=False)
    axes.set_title(panel.title, fontsize=11)
    axes.set_ylabel(panel.unit)
    axes.spines[["top", "right"]].set_visible(False)


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.argument("picture", type=click.Path(path_type=Path), required=False)
@click.option("--title", default="", help="Default: the directory's name.")
def main(run_dir: Path, picture: Path | None, title: str) -> None:
    """Draw the run in RUN_DIR into PICTURE (.png, .svg, .pdf; default: RUN_DIR/run/run.png)."""
    try:
        metrics = find_metrics(run_dir)
        target = picture or metrics.with_name("run.png")
        draw(read_metrics(metrics), target, title or run_dir.resolve().name)
        print(target)
    except FinetuneError as error:
        print(f"plot_run: error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)


def _open_pyplot() -> Any:
    """Return matplotlib's pyplot, set to draw into files.

    Raises:
        UserError: matplotlib is missing.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise UserError("Drawing needs matplotlib: pip install 'fuyou[plots]', or pip install matplotlib.") from None
    return pyplot


def _save(pyplot: Any, figure: Any, path: Path, dpi: int) -> None:
    try:
        figure.savefig(path, dpi=dpi)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be written: {error}.") from None
    finally:
        pyplot.close(figure)


if __name__ == "__main__":
    main()
