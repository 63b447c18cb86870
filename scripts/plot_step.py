"""Draw a step's trace as a picture: the lanes of ``finetune --trace FILE``, from top to bottom as Perfetto shows them.

python scripts/plot_step.py step.json step.png
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
sys.path[1:1] = [str(ROOT), str(ROOT / "scripts")]  # not installed: run from a checkout

from drawing import open_pyplot, save  # noqa: E402

from common.errors import FinetuneError, UserError  # noqa: E402

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#999999")
"""One colour per group of lanes, in the order of their numbers (Okabe and Ito: told apart by everybody)."""


@dataclass(frozen=True)
class Lane:
    """What is drawn in one line."""

    group: int
    label: str
    bars: list[tuple[float, float, str]]
    """Beginning and length in milliseconds, and the task's name."""


def read_lanes(path: Path) -> list[Lane]:
    """The lanes of a Chrome trace, in order.

    Raises:
        UserError: the file is not there, or no such trace.
    """
    try:
        events: list[Mapping[str, Any]] = json.loads(path.read_text())["traceEvents"]
        groups = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
        threads = {event["tid"]: event for event in events if event["name"] == "thread_name"}
        bars: dict[int, list[tuple[float, float, str]]] = {thread: [] for thread in sorted(threads)}
        for event in events:
            if event["ph"] == "X":
                bars[event["tid"]].append((event["ts"] / 1e3, event["dur"] / 1e3, event["name"]))
        return [
            Lane(event["pid"], f"{groups[event['pid']]}: {event['args']['name']}", bars[thread])
            for thread, event in sorted(threads.items())
        ]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a trace that finetune --trace has written ({error!r}).") from None


def draw(lanes: list[Lane], path: Path, title: str) -> None:
    """Draw ``lanes`` into ``path``, whose ending says in which format.

    Raises:
        UserError: matplotlib is missing, or the file cannot be written.
    """
    pyplot = open_pyplot()
    figure, axes = pyplot.subplots(figsize=(12, 0.8 + 0.32 * len(lanes)), layout="constrained")
    for line, lane in enumerate(lanes):
        spans = [(begin, length) for begin, length, _ in lane.bars]
        colour = COLOURS[lane.group % len(COLOURS)]
        axes.broken_barh(spans, (line - 0.4, 0.8), facecolors=colour, edgecolors="white", linewidth=0.3)
    axes.set_yticks(range(len(lanes)), [lane.label for lane in lanes])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("milliseconds since the end of the step before")
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)
    save(pyplot, figure, path, dpi=150)


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@click.argument("picture", type=click.Path(path_type=Path))
@click.option("--title", default="", help="Default: the trace's name.")
def main(trace: Path, picture: Path, title: str) -> None:
    """Draw the lanes of TRACE into PICTURE (.png, .svg, .pdf)."""
    try:
        draw(read_lanes(trace), picture, title or trace.stem)
    except FinetuneError as error:
        print(f"plot_step: error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)


if __name__ == "__main__":
    main()
